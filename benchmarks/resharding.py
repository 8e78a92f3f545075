"""Bytes per second from a trainer's shard into the embedded engine's memory, against one thread's memcpy of as many.

Another line tells of the whole hand-over between two actors, with both checksums of every tensor and all calls, and for
how long the engine pauses.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ray
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from benchmarks.support.training import start_trainer
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.runtime.trainer_group import TrainerGroup
from mcore_mas.training.weight_sync import WeightSync
from rollout.engines.embedded.engine import HostedEngine
from rollout.engines.embedded.settings import EmbeddedSettings
from rollout.models.architecture import read_architecture
from rollout.models.tensors import whole
from rollout.sync.memory import memory_path
from rollout.sync.shared import SharedWeights

REPEATS = 7
GOAL = 0.8


def make_model(folder: Path) -> None:
    """Two layers of Qwen2.5-1.5B's shapes under a small vocabulary, at random: 106 million parameters, 425 MB."""
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def best(seconds: list[float]) -> float:
    """The least disturbed repeat."""
    return min(seconds)


def seconds(do: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def transfer(folder: Path) -> float:
    """Memcpy's seconds over those of gathering all weights and writing them in the engine's order, alternating."""
    trainer = start_trainer(folder, Objective(loss="cross_entropy"))
    shared = SharedWeights(memory_path(), read_architecture(folder), create=True)
    source = [whole(rows).clone() for _, rows in trainer.model.weights()]
    target = [torch.zeros_like(tensor) for tensor in source]

    def copy() -> None:
        for to, tensor in zip(target, source, strict=True):
            to.copy_(tensor)

    def reshard() -> None:
        shared.halves[0].fill(trainer.model.weights())

    try:
        reshard()  # touches every page
        pairs = [(seconds(copy), seconds(reshard)) for _ in range(REPEATS)]
    finally:
        shared.file.unlink()
    copied, resharded = (best(list(column)) for column in zip(*pairs, strict=True))
    size = sum(tensor.nbytes for tensor in source)
    print(
        f"{size / 1e6:.0f} MB, without checksums: {resharded:.3f} s, {size / resharded / 1e9:.2f} GB/s; "
        f"memcpy {size / copied / 1e9:.2f} GB/s"
    )
    return copied / resharded


async def hand_over_checked(folder: Path) -> None:
    """Alternate hand-overs and copies, and print both."""
    spec = TrainerSpec(model=str(folder), lr=1e-3, objective=Objective(loss="cross_entropy"))
    trainer = TrainerGroup("p", spec, threads=1)
    engine = HostedEngine(EmbeddedSettings(folder=folder, max_length=64, rows=8))
    await trainer.ready()
    await engine.stats()
    sync = WeightSync(trainer, engine)
    size = round((await sync.push(1))["hand_over_mb"] * 1e6)  # the first touches every page
    await sync.push(2)
    source, target = torch.ones(size // 4), torch.zeros(size // 4)
    whole, pause, copy = [], [], []
    for version in range(3, 3 + REPEATS):
        copy.append(seconds(lambda: target.copy_(source)))
        metrics = await sync.push(version)
        whole.append(metrics["hand_over_s"])
        pause.append(metrics["engine_pause_s"])
    engine.close()
    print(
        f"hand-over with both checksums and all calls: {best(whole):.3f} s, {size / best(whole) / 1e9:.2f} GB/s, "
        f"{best(copy) / best(whole):.2f} of memcpy; the engine pauses {best(pause):.4f} s"
    )


def main() -> None:
    """Make a model and measure on it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        ray.init(
            "local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
        )
        try:
            asyncio.run(hand_over_checked(Path(folder)))
        finally:
            ray.shutdown()
        ratio = transfer(Path(folder))
    print(f"name=resharding ratio={ratio:.2f} goal={GOAL:.2f} reference=memcpy n={REPEATS}")


if __name__ == "__main__":
    main()
