"""One training step of the Megatron trainer against plain torch on Hugging Face: same model and micro-batches."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from benchmarks.support.training import (
    PlainStep,
    cpu_seconds,
    make_model,
    make_sample,
    start_trainer,
)
from mcore_mas.equations.losses import Objective
from mcore_mas.packing.pack import pack

_MICROBATCHES, _SEQUENCES, _LENGTH, _VOCAB = 2, 4, 256, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    ids = torch.randint(
        0, _VOCAB, (_MICROBATCHES, _SEQUENCES, _LENGTH), generator=torch.Generator().manual_seed(0)
    )
    samples = [
        make_sample(row[:1], row[1:], number)
        for number, row in enumerate(ids.flatten(0, 1).tolist())
    ]
    batches = pack(samples, _SEQUENCES * _LENGTH, share=False)
    assert [len(batch.labels) for batch in batches] == [_SEQUENCES * (_LENGTH - 1)] * _MICROBATCHES
    with tempfile.TemporaryDirectory() as folder:
        plain = PlainStep(make_model(Path(folder), vocab=_VOCAB, hidden=384, layers=4))
        trainer = start_trainer(Path(folder), Objective(loss="cross_entropy"))
        best = cpu_seconds(
            {
                "megatron": lambda: trainer.update(batches),
                "plain": lambda: plain([(row, None) for row in ids]),
            },
            repeats,
        )
    print(
        f"name=megatron_step ratio={best['plain'] / best['megatron']:.2f} goal=0.95 reference=hf_sdpa n={repeats}"
    )


if __name__ == "__main__":
    main()
