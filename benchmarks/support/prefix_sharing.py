"""One update with what sequences share computed once, against every sequence whole, in the same trainer."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.training import cpu_seconds, make_model, start_trainer
from mcore_mas.credit.samples import Sample
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack, tokens_saved


def compare(
    name: str, samples: Sequence[Sample], *, vocab: int, max_tokens: int, goal: float
) -> None:
    """Time both and print the result line."""
    compare_all([(name, samples, goal)], vocab=vocab, max_tokens=max_tokens)


def compare_all(
    traces: Sequence[tuple[str, Sequence[Sample], float]],
    *,
    vocab: int,
    max_tokens: int,
    hidden: int = 384,
    layers: int = 4,
) -> None:
    """The same for several traces, (name, samples, goal), on one model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), vocab=vocab, hidden=hidden, layers=layers)
        trainer = start_trainer(Path(folder), Objective())
        for name, samples, goal in traces:
            ratio = _ratio(trainer, samples, max_tokens, repeats)
            print(
                f"name={name} ratio={ratio:.2f} goal={goal:.2f} reference=whole_sequences n={repeats}"
            )


def _ratio(
    trainer: MegatronTrainer, samples: Sequence[Sample], max_tokens: int, repeats: int
) -> float:
    """CPU seconds of an update on whole sequences over those on the same as trees."""
    began = time.process_time()
    shared = pack(samples, max_tokens)
    packing = time.process_time() - began
    linear = pack(samples, max_tokens, share=False)
    tokens = [sum(len(batch.token_ids) for batch in batches) for batches in (shared, linear)]
    print(
        f"{len(samples)} samples, {tokens[0]} tokens in {len(shared)} micro-batches instead of {tokens[1]} in "
        f"{len(linear)}: {tokens_saved(shared):.1%} of the tokens saved; packed in {packing:.3f} s"
    )
    trainer.update(pack(samples[:1], max_tokens))  # warm
    best = cpu_seconds(
        {"shared": lambda: trainer.update(shared), "whole": lambda: trainer.update(linear)}, repeats
    )
    return best["whole"] / best["shared"]
