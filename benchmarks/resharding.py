"""Bandwidth from a trainer's shard into the embedded engine's memory, against memcpy on one thread.

Another line shows the whole weight sync between two actors, with checksums on both sides and all
calls, and the pause of the engine.
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

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.result import print_result
from benchmarks.support.training import start_trainer
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.runtime.trainer_group import TrainerGroup
from mcore_mas.training.weight_sync import WeightSync
from rollout.engines.embedded.engine import HostedEngine
from rollout.engines.embedded.settings import EmbeddedSettings
from rollout.models.architecture import read_architecture
from rollout.models.tensors import join_blocks
from rollout.sync.memory import memory_path
from rollout.sync.shared import SharedWeights

REPEATS = 7
GOAL = 0.8
OBJECTIVE = Objective(loss="cross_entropy")


def make_two_layers(folder: Path) -> None:
    """Save random weights of two layers of Qwen2.5-1.5B with a small vocabulary: 106 million parameters, 425 MB."""
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


def wall_seconds(function: Callable[[], object]) -> float:
    """Return the wall-clock time of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def measure_transfer(folder: Path) -> float:
    """Return the time of memcpy, divided by that of gathering all weights and writing them in the engine's layout."""
    trainer = start_trainer(folder, OBJECTIVE)
    shared = SharedWeights(memory_path(), read_architecture(folder), create=True)
    source = [join_blocks(rows).clone() for _, rows in trainer.model.weights()]
    target = [torch.zeros_like(tensor) for tensor in source]

    def copy() -> None:
        for target_tensor, source_tensor in zip(target, source, strict=True):
            target_tensor.copy_(source_tensor)

    def reshard() -> None:
        shared.halves[0].fill(trainer.model.weights())

    copy_times = []
    reshard_times = []
    try:
        reshard()  # touches every page
        for _ in range(REPEATS):
            copy_times.append(wall_seconds(copy))
            reshard_times.append(wall_seconds(reshard))
    finally:
        shared.file.unlink()
    copy_s = min(copy_times)
    reshard_s = min(reshard_times)
    size = sum(tensor.nbytes for tensor in source)
    print(
        f"{size / 1e6:.0f} MB, without checksums: {reshard_s:.3f} s, {size / reshard_s / 1e9:.2f} "
        f"GB/s; memcpy {size / copy_s / 1e9:.2f} GB/s"
    )
    return copy_s / reshard_s


async def measure_weight_sync(folder: Path) -> None:
    """Alternate weight syncs with copies of as many bytes in memory; print the fastest of each."""
    spec = TrainerSpec(model=str(folder), lr=1e-3, objective=OBJECTIVE)
    trainer = TrainerGroup("p", spec, threads=1)
    engine = HostedEngine(EmbeddedSettings(folder=folder, max_length=64, rows=8))
    await trainer.ready()
    await engine.stats()
    sync = WeightSync(trainer, engine)
    first = await sync.push(1)  # touches every page
    await sync.push(2)
    size = round(first["hand_over_mb"] * 1e6)
    source = torch.ones(size // 4)
    target = torch.zeros(size // 4)
    sync_times = []
    pauses = []
    copy_times = []
    for version in range(3, 3 + REPEATS):
        copy_times.append(wall_seconds(lambda: target.copy_(source)))
        metrics = await sync.push(version)
        sync_times.append(metrics["hand_over_s"])
        pauses.append(metrics["engine_pause_s"])
    engine.close()
    sync_s = min(sync_times)
    print(
        f"weight sync with both checksums and all calls: {sync_s:.3f} s, {size / sync_s / 1e9:.2f} "
        f"GB/s, {min(copy_times) / sync_s:.2f} of memcpy; the engine pauses {min(pauses):.4f} s"
    )


def main() -> None:
    """Make a model, and measure on it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_two_layers(folder)
        ray.init(
            "local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
        )
        try:
            asyncio.run(measure_weight_sync(folder))
        finally:
            ray.shutdown()
        ratio = measure_transfer(folder)
    print_result("resharding", ratio, goal=GOAL, reference="memcpy", repeats=REPEATS)


if __name__ == "__main__":
    main()
