"""Time of an update with shared prefixes, against the same update with every sequence stored whole."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.process import alternate_cpu_times
from benchmarks.support.result import print_result
from benchmarks.support.training import make_model, start_trainer
from mcore_mas.credit.samples import Sample
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack, saved_token_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Samples of one benchmark, and its goal: the smallest accepted ratio of the CPU times."""

    name: str
    samples: Sequence[Sample]
    goal: float


def compare(
    *traces: Trace, vocab: int, max_tokens: int, hidden: int = 384, layers: int = 4
) -> None:
    """Measure both updates of each trace on one model, and print the result lines.

    Args:
        traces: the benchmarks.
        vocab: size of the model's vocabulary.
        max_tokens: limit of a micro-batch.
        hidden: hidden size of the model.
        layers: number of layers of the model.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), vocab=vocab, hidden=hidden, layers=layers)
        trainer = start_trainer(Path(folder), Objective())
        for trace in traces:
            ratio = _speedup(trainer, trace.samples, max_tokens, repeats)
            print_result(
                trace.name, ratio, goal=trace.goal, reference="whole_sequences", repeats=repeats
            )


def _speedup(
    trainer: MegatronTrainer, samples: Sequence[Sample], max_tokens: int, repeats: int
) -> float:
    """Return the CPU time of an update with whole sequences, divided by that with shared prefixes."""
    began = time.process_time()
    shared = pack(samples, max_tokens)
    packing_s = time.process_time() - began
    whole = pack(samples, max_tokens, share=False)
    shared_tokens = sum(len(batch.token_ids) for batch in shared)
    whole_tokens = sum(len(batch.token_ids) for batch in whole)
    print(
        f"{len(samples)} samples, {shared_tokens} tokens in {len(shared)} micro-batches instead of "
        f"{whole_tokens} in {len(whole)}: {saved_token_share(shared):.1%} of the tokens saved; packed in "
        f"{packing_s:.3f} s"
    )
    trainer.update(pack(samples[:1], max_tokens))  # allocates the optimizer state
    best = alternate_cpu_times(
        {"shared": lambda: trainer.update(shared), "whole": lambda: trainer.update(whole)}, repeats
    )
    return best["whole"] / best["shared"]
