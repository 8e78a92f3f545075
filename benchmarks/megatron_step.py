"""CPU time of a step of the Megatron trainer, against plain PyTorch on the same micro-batches."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.process import alternate_cpu_times
from benchmarks.support.result import print_result
from benchmarks.support.training import PlainStep, make_model, make_sample, start_trainer
from mcore_mas.equations.losses import Objective
from mcore_mas.packing.pack import pack

_MICROBATCHES = 2
_SEQUENCES = 4  # number of sequences of a micro-batch
_LENGTH = 256
_VOCAB = 4096
_GOAL = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats

    shape = (_MICROBATCHES, _SEQUENCES, _LENGTH)
    ids = torch.randint(0, _VOCAB, shape, generator=torch.Generator().manual_seed(0))
    samples = [
        make_sample(row[:1], row[1:], number)
        for number, row in enumerate(ids.flatten(0, 1).tolist())
    ]
    batches = pack(samples, _SEQUENCES * _LENGTH, share=False)
    assert [len(batch.labels) for batch in batches] == [_SEQUENCES * (_LENGTH - 1)] * _MICROBATCHES
    unpadded = [(microbatch_ids, None) for microbatch_ids in ids]
    with tempfile.TemporaryDirectory() as folder:
        plain_step = PlainStep(make_model(Path(folder), vocab=_VOCAB, hidden=384, layers=4))
        trainer = start_trainer(Path(folder), Objective(loss="cross_entropy"))
        best = alternate_cpu_times(
            {"megatron": lambda: trainer.update(batches), "plain": lambda: plain_step(unpadded)},
            repeats,
        )
    ratio = best["plain"] / best["megatron"]
    print_result("megatron_step", ratio, goal=_GOAL, reference="hf_sdpa", repeats=repeats)


if __name__ == "__main__":
    main()
