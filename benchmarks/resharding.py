"""Bytes per second from a trainer's shard into the embedded engine, checked, against a memcpy of as many bytes."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import ray
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout, installed or not

from mcore_mas.core.losses import Objective
from mcore_mas.handover import hand_over
from mcore_mas.megatron.gang import Gang
from mcore_mas.megatron.spec import TrainerSpec
from rollout.engines.hosted import HostedEngine
from rollout.transports.checksum import checksum

REPEATS = 7
GOAL = 0.8


def make_model(folder: Path) -> None:
    """61 million parameters, 245 MB, at random."""
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def best(seconds: list[float]) -> float:
    """The least disturbed repeat."""
    return min(seconds)


async def measure(folder: Path) -> None:
    """Alternate hand-overs and copies, and print both."""
    spec = TrainerSpec(model=str(folder), lr=1e-3, objective=Objective(loss="cross_entropy"))
    gang = Gang("p", spec, threads=1)
    engine = HostedEngine(folder, max_length=64, rows=8)
    await gang.ready()
    await engine.stats()
    size = round((await hand_over(gang, engine, 1))["hand_over_mb"] * 1e6)  # the first touches every page
    await hand_over(gang, engine, 2)
    source, target = torch.ones(size // 4), torch.zeros(size // 4)
    whole, pause, copy, check = [], [], [], []
    for version in range(3, 3 + REPEATS):
        began = time.perf_counter()
        target.copy_(source)
        copy.append(time.perf_counter() - began)
        metrics = await hand_over(gang, engine, version)
        whole.append(metrics["hand_over_s"])
        pause.append(metrics["engine_pause_s"])
        began = time.perf_counter()
        checksum(source[: len(source) // 768 * 768].view(-1, 768))
        check.append(time.perf_counter() - began)
    engine.close()
    print(
        f"{size / 1e6:.0f} MB; memcpy {size / best(copy) / 1e9:.2f} GB/s, checksum {size / best(check) / 1e9:.2f} GB/s"
    )
    print(
        f"hand-over with both checksums {best(whole):.3f} s, {size / best(whole) / 1e9:.2f} GB/s; "
        f"the engine pauses {best(pause):.3f} s of it to compare"
    )
    ratio = best(copy) / best(whole)
    print(f"name=resharding ratio={ratio:.2f} goal={GOAL:.2f} reference=memcpy n={REPEATS}")


def main() -> None:
    """Make a model and measure on it."""
    torch.set_num_threads(1)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder))
            asyncio.run(measure(Path(folder)))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
