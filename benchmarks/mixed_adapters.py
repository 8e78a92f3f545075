"""Tokens per CPU second of one batch of four agents' rows, each with its adapter, over a batch for each agent's own."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

import torch
from torch import Tensor

from benchmarks.support.training import make_model
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.models.architecture import read_architecture
from rollout.models.fused_weights import AdapterShape, AdapterWeights
from rollout.models.layout import Projection
from rollout.models.tensors import read_tensors
from rollout.records.trajectory import Completion, Sampling

AGENTS, HIDDEN, LAYERS, VOCAB, PROMPT, REPLY = 4, 640, 12, 16384, 32, 24
SHAPE = AdapterShape(rank=16, scale=2.0, targets=get_args(Projection))


def make_engines(folder: str) -> tuple[EmbeddedEngine, list[EmbeddedEngine]]:
    """One engine with all agents' adapters, and for each agent one of its merged model, which is what there was."""
    shape = read_architecture(folder)
    mixed = CachedDecoder(shape, PROMPT + REPLY, adapters=[SHAPE] * AGENTS)
    mixed.load(read_tensors(folder))
    assert mixed.adapters is not None
    merged = []
    for number in range(1, AGENTS + 1):
        generator = torch.Generator().manual_seed(number)
        weights = AdapterWeights(shape, SHAPE, torch.empty(_elements(folder)))
        tensors = {
            n: torch.randn(s, generator=generator) * 0.05 for n, (s, _) in weights.places.items()
        }
        weights.fill((name, tensor) for name, tensor in tensors.items())
        mixed.adapters.put(number, weights)
        decoder = CachedDecoder(shape, PROMPT + REPLY)
        decoder.load(_merged(folder, tensors))
        merged.append(EmbeddedEngine(decoder, rows=64))
    return EmbeddedEngine(mixed, rows=64 * AGENTS), merged


def _elements(folder: str) -> int:
    shape = read_architecture(folder)
    return AdapterWeights(shape, SHAPE, torch.empty(0, device="meta")).elements


def _merged(folder: str, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, weight in read_tensors(folder):
        peft = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        a, b = tensors.get(f"{peft}A.weight"), tensors.get(f"{peft}B.weight")
        yield name, weight if a is None or b is None else weight + SHAPE.scale * b @ a


def run(engines: list[EmbeddedEngine], rows: int, seed: int) -> tuple[float, dict[int, Completion]]:
    """CPU seconds of decoding and sampling, and the replies by agent and row; engines take turns."""
    began, prefill, done = time.process_time(), 0.0, dict[int, Completion]()
    for number, engine in enumerate(engines):
        before = engine.stats.prefill_s
        for agent in range(AGENTS) if len(engines) == 1 else [number]:
            for row in range(rows):
                key = agent * rows + row
                prompt = [
                    1 + (seed * 7919 + key * 31 + i * 17) % (VOCAB - 1) for i in range(PROMPT)
                ]
                sampling = Sampling(max_tokens=REPLY, seed=seed * 1000 + key)
                engine.submit(key, prompt, sampling, adapter=1 + agent if len(engines) == 1 else 0)
        while engine.has_work:
            for key, one in engine.step():
                assert isinstance(one, Completion)
                done[key] = one
        prefill += engine.stats.prefill_s - before
    return time.process_time() - began - prefill, done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--rows", type=int, default=4, help="of each agent, in the ratio of the last line"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), vocab=VOCAB, hidden=HIDDEN, layers=LAYERS)
        mixed, merged = make_engines(folder)
    found: dict[int, float] = {}
    for rows in sorted({1, 2, 4, 8, 16, options.rows}):
        ratios = []
        for repeat in range(options.repeats + 1):  # the first is not counted
            (together, one), (apart, other) = run([mixed], rows, repeat), run(merged, rows, repeat)
            same = sum(one[key].token_ids == other[key].token_ids for key in one)
            ratios.append(apart / together)
        found[rows] = statistics.median(ratios[1:])
        tokens = AGENTS * rows * REPLY
        print(
            f"{rows} rows of each of {AGENTS} agents: mixed {tokens / together:.0f} tokens per CPU second, separate "
            f"{tokens / apart:.0f}, {found[rows]:.2f} times; {same} of {len(one)} replies have the same tokens"
        )
    print(
        f"name=mixed_adapters ratio={found[options.rows]:.2f} goal=2.00 reference=merged_models_in_turn "
        f"n={options.repeats}"
    )


if __name__ == "__main__":
    main()
