"""One training step on a ragged batch, 32 to 512 tokens: packed by the Megatron trainer, and padded for Hugging Face.

Lengths are drawn uniformly and sequences come as drawn: one batch, padded to its longest sequence, in micro-batches of
as many rows as are fastest for Hugging Face. Three lines say more: how it is with lengths drawn log-uniformly, as
replies are many short ones and few long, where each micro-batch is padded to its own longest sequence, and where
sequences are sorted by length before that, which takes Hugging Face the least padding that there is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack

_SEQUENCES, _SHORTEST, _LONGEST, _VOCAB = 32, 32, 512, 4096
_TOKENS, _ROWS = 1024, 2  # of a micro-batch: packed tokens, padded sequences


def draw(*, sequences: int, log: bool) -> list[Tensor]:
    """Token ids of sequences whose lengths, or their logarithms, are uniform."""
    generator = torch.Generator().manual_seed(0)
    part = torch.rand(sequences, generator=generator)
    lengths = (
        _SHORTEST * (_LONGEST / _SHORTEST) ** part
        if log
        else _SHORTEST + (_LONGEST - _SHORTEST) * part
    )
    return [
        torch.randint(0, _VOCAB, (length,), generator=generator)
        for length in lengths.round().int().tolist()
    ]


def pad(rows: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """One padded batch of token ids and its mask, in micro-batches."""
    ids = pad_sequence(list(rows), batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return list(zip(torch.split(ids, _ROWS), torch.split(mask, _ROWS), strict=True))


def compare(
    trainer: MegatronTrainer,
    plain: PlainStep,
    rows: Sequence[Tensor],
    repeats: int,
    *,
    apart: bool = False,
) -> float:
    """Padded over packed CPU time; with `apart`, each micro-batch is padded by itself."""
    samples = [
        make_sample(row[:1].tolist(), row[1:].tolist(), number) for number, row in enumerate(rows)
    ]
    packed = pack(samples, _TOKENS)
    groups = [rows[i : i + _ROWS] for i in range(0, len(rows), _ROWS)] if apart else [rows]
    padded = [batch for group in groups for batch in pad(group)]
    tokens = sum(ids.numel() for ids, _ in padded), sum(map(len, rows))
    best = cpu_seconds(
        {"packed": lambda: trainer.update(packed), "padded": lambda: plain(padded)}, repeats
    )
    print(f"  {len(rows)} sequences, padding makes {tokens[0] / tokens[1]:.2f} tokens of one")
    return best["padded"] / best["packed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    repeats = parser.parse_args().repeats
    rows = draw(sequences=_SEQUENCES, log=False)
    with tempfile.TemporaryDirectory() as folder:
        plain = PlainStep(make_model(Path(folder), vocab=_VOCAB, hidden=384, layers=4))
        trainer = start_trainer(Path(folder), Objective(loss="cross_entropy"))
        ratio = compare(trainer, plain, draw(sequences=_SEQUENCES // 4, log=True), 1)
        print(f"lengths drawn log-uniformly: {ratio:.2f}")
        ratio = compare(trainer, plain, rows[: _SEQUENCES // 4], 1, apart=True)
        print(f"each micro-batch padded to its own longest sequence: {ratio:.2f}")
        ratio = compare(trainer, plain, sorted(rows, key=len), 1, apart=True)
        print(f"and sorted by length: {ratio:.2f}")
        ratio = compare(trainer, plain, rows, repeats)
    print(
        f"name=ragged_step ratio={ratio:.2f} goal=2.00 reference=hf_one_padded_batch_sdpa n={repeats}"
    )


if __name__ == "__main__":
    main()
