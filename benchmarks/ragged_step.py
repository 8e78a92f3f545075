"""One training step on sequences of 32 to 512 tokens: packed by the Megatron trainer, and padded for Hugging Face.

Lengths are drawn log-uniformly, as replies are many short ones and few long; what packing gains is about what padding
wastes (of lengths drawn uniformly, 1.6). A micro-batch holds 1024 tokens of either; sequences come as drawn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout, installed or not

from benchmarks.support.training import PlainStep, cpu_seconds, make_model, make_sample, start_trainer
from mcore_mas.core.losses import Objective
from mcore_mas.packing import pack

_SEQUENCES, _SHORTEST, _LONGEST, _VOCAB, _TOKENS = 16, 32, 512, 4096, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    generator = torch.Generator().manual_seed(0)
    drawn = _SHORTEST * (_LONGEST / _SHORTEST) ** torch.rand(_SEQUENCES - 1, generator=generator)
    lengths = [*drawn.round().int().tolist(), _LONGEST]
    rows = [torch.randint(0, _VOCAB, (length,), generator=generator) for length in lengths]
    samples = [make_sample(row[:1].tolist(), row[1:].tolist(), number) for number, row in enumerate(rows)]
    packed = pack(samples, _TOKENS)
    padded = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    rows_at_once = _TOKENS // padded.shape[1]
    batches = list(zip(padded.split(rows_at_once), mask.split(rows_at_once), strict=True))
    print(f"padding makes {padded.numel() / sum(lengths):.2f} tokens of one")
    with tempfile.TemporaryDirectory() as folder:
        plain = PlainStep(make_model(Path(folder), vocab=_VOCAB, hidden=384, layers=4))
        trainer = start_trainer(Path(folder), Objective(loss="cross_entropy"))
        best = cpu_seconds({"packed": lambda: trainer.update(packed), "padded": lambda: plain(batches)}, repeats)
    print(
        f"name=ragged_step ratio={best['padded'] / best['packed']:.2f} goal=2.00 reference=hf_padded_sdpa n={repeats}"
    )


if __name__ == "__main__":
    main()
