"""Throughput of one batch with the rows of four agents, each with its adapter, against a batch of each merged model."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.support.result import print_result
from benchmarks.support.training import make_model
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.models.adapter_weights import AdapterShape, AdapterWeights
from rollout.models.architecture import read_architecture
from rollout.models.layout import Projection
from rollout.models.named_buffers import META_STORAGE
from rollout.models.tensors import read_tensors
from rollout.records.trajectory import Completion, Sampling

AGENTS = 4
HIDDEN = 640
LAYERS = 12
VOCAB = 16384
PROMPT_TOKENS = 32
REPLY_TOKENS = 24
ROWS_PER_AGENT = (1, 2, 4, 8, 16)
ENGINE_ROWS = 64  # for each agent
ADAPTER = AdapterShape(rank=16, scale=2.0, targets=get_args(Projection))
GOAL = 2.0


def make_engines(folder: str) -> tuple[EmbeddedEngine, list[EmbeddedEngine]]:
    """Return an engine with all agents' adapters, and for each agent an engine of its merged model."""
    architecture = read_architecture(folder)
    max_tokens = PROMPT_TOKENS + REPLY_TOKENS
    elements = AdapterWeights(architecture, ADAPTER, META_STORAGE).elements
    mixed = CachedDecoder(architecture, max_tokens, adapters=[ADAPTER] * AGENTS)
    mixed.load(read_tensors(folder))
    assert mixed.adapters is not None
    merged = []
    for number in range(1, AGENTS + 1):
        generator = torch.Generator().manual_seed(number)
        weights = AdapterWeights(architecture, ADAPTER, torch.empty(elements))
        tensors = {
            name: torch.randn(buffer.shape, generator=generator) * 0.05
            for name, buffer in weights.buffers.items()
        }
        weights.fill(iter(tensors.items()))
        mixed.adapters.put(number, weights)

        decoder = CachedDecoder(architecture, max_tokens)
        decoder.load(merged_weights(folder, tensors))
        merged.append(EmbeddedEngine(decoder, rows=ENGINE_ROWS))
    return EmbeddedEngine(mixed, rows=ENGINE_ROWS * AGENTS), merged


def merged_weights(folder: str, adapter: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's weights with an adapter added to them."""
    for name, weight in read_tensors(folder):
        prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        a = adapter.get(f"{prefix}A.weight")
        b = adapter.get(f"{prefix}B.weight")
        if a is None or b is None:
            yield name, weight
        else:
            yield name, weight + ADAPTER.scale * b @ a


def generate(
    engines: Sequence[EmbeddedEngine], rows: int, seed: int
) -> tuple[float, dict[int, Completion]]:
    """Generate `rows` replies of each agent.

    Args:
        engines: one engine for all agents, or one for each agent; they work one after the other.
        rows: replies of an agent.
        seed: seed of prompts and sampling.

    Returns:
        CPU seconds of decoding and sampling, without the prefill; and the replies by agent and row.
    """
    began = time.process_time()
    prefill_s = 0.0
    replies: dict[int, Completion] = {}
    has_adapters = len(engines) == 1
    for number, engine in enumerate(engines):
        prefill_before = engine.stats.prefill_s
        agents = list(range(AGENTS)) if has_adapters else [number]
        for agent in agents:
            for row in range(rows):
                key = agent * rows + row
                offset = seed * 7919 + key * 31
                prompt = [1 + (offset + i * 17) % (VOCAB - 1) for i in range(PROMPT_TOKENS)]
                sampling = Sampling(max_tokens=REPLY_TOKENS, seed=seed * 1000 + key)
                engine.submit(key, prompt, sampling, adapter=1 + agent if has_adapters else 0)
        while engine.has_work:
            for key, completion in engine.step():
                assert isinstance(completion, Completion)
                replies[key] = completion
        prefill_s += engine.stats.prefill_s - prefill_before
    return time.process_time() - began - prefill_s, replies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4, help="rows per agent of the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), vocab=VOCAB, hidden=HIDDEN, layers=LAYERS)
        mixed, merged = make_engines(folder)

    speedups: dict[int, float] = {}  # by rows per agent
    for rows in sorted({*ROWS_PER_AGENT, options.rows}):
        ratios = []
        for repeat in range(options.repeats + 1):
            mixed_s, mixed_replies = generate([mixed], rows, repeat)
            merged_s, merged_replies = generate(merged, rows, repeat)
            ratios.append(merged_s / mixed_s)
        speedups[rows] = statistics.median(ratios[1:])  # the first repeat warms up
        equal = sum(
            reply.token_ids == merged_replies[key].token_ids for key, reply in mixed_replies.items()
        )
        tokens = AGENTS * rows * REPLY_TOKENS
        print(
            f"{rows} rows of each of {AGENTS} agents: mixed {tokens / mixed_s:.0f} tokens per CPU "
            f"second, separate {tokens / merged_s:.0f}, {speedups[rows]:.2f} times; {equal} of "
            f"{len(mixed_replies)} replies have the same tokens"
        )
    print_result(
        "mixed_adapters",
        speedups[options.rows],
        goal=GOAL,
        reference="merged_models_in_turn",
        repeats=options.repeats,
    )


if __name__ == "__main__":
    main()
