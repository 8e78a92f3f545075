"""CPU time of a step on sequences of 32 to 512 tokens: packed by the Megatron trainer, against padded for Hugging Face.

The lengths are uniform. The reference pads the whole batch to its longest sequence, in micro-batches
of as many rows as are fastest for Hugging Face. Three other lines compare with log-uniform lengths
(many short replies, few long ones), with each micro-batch padded to its own longest sequence, and
with sequences that are also sorted by length, which needs the least padding. The first two of them
are measured on a quarter of the sequences.
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

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.process import alternate_cpu_times
from benchmarks.support.result import print_result
from benchmarks.support.training import PlainStep, make_model, make_sample, start_trainer
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack

_SEQUENCES = 32
_SHORTEST = 32
_LONGEST = 512
_VOCAB = 4096
_MICROBATCH_TOKENS = 1024  # limit of a packed micro-batch
_MICROBATCH_ROWS = 2  # rows of a padded micro-batch
_GOAL = 2.0


def draw_sequences(*, count: int, log_uniform: bool) -> list[Tensor]:
    """Return the token ids of sequences with uniform or log-uniform lengths."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(count, generator=generator)
    if log_uniform:
        lengths = _SHORTEST * (_LONGEST / _SHORTEST) ** uniform
    else:
        lengths = _SHORTEST + (_LONGEST - _SHORTEST) * uniform
    return [
        torch.randint(0, _VOCAB, (length,), generator=generator)
        for length in lengths.round().int().tolist()
    ]


def pad(rows: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pad rows to their longest; return token ids and mask of each micro-batch."""
    ids = pad_sequence(list(rows), batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    id_batches = torch.split(ids, _MICROBATCH_ROWS)
    mask_batches = torch.split(mask, _MICROBATCH_ROWS)
    return list(zip(id_batches, mask_batches, strict=True))


def speedup(
    trainer: MegatronTrainer,
    plain_step: PlainStep,
    rows: Sequence[Tensor],
    repeats: int,
    *,
    pad_microbatches: bool = False,
) -> float:
    """Return the CPU time of the padded step, divided by that of the packed one.

    Args:
        trainer: takes the packed step.
        plain_step: takes the padded step.
        rows: token ids of the sequences.
        repeats: measurements of each.
        pad_microbatches: True: pad each micro-batch to its own longest sequence.
    """
    samples = [
        make_sample(row[:1].tolist(), row[1:].tolist(), number) for number, row in enumerate(rows)
    ]
    packed = pack(samples, _MICROBATCH_TOKENS)
    group_size = _MICROBATCH_ROWS if pad_microbatches else len(rows)
    padded = []
    for start in range(0, len(rows), group_size):
        padded += pad(rows[start : start + group_size])
    best = alternate_cpu_times(
        {"packed": lambda: trainer.update(packed), "padded": lambda: plain_step(padded)}, repeats
    )
    padded_tokens = sum(ids.numel() for ids, _ in padded)
    tokens = sum(map(len, rows))
    print(f"  {len(rows)} sequences, {padded_tokens / tokens:.2f} padded tokens per token")
    return best["padded"] / best["packed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    repeats = parser.parse_args().repeats
    rows = draw_sequences(count=_SEQUENCES, log_uniform=False)
    few_rows = rows[: _SEQUENCES // 4]
    log_uniform_rows = draw_sequences(count=_SEQUENCES // 4, log_uniform=True)
    with tempfile.TemporaryDirectory() as folder:
        plain_step = PlainStep(make_model(Path(folder), vocab=_VOCAB, hidden=384, layers=4))
        trainer = start_trainer(Path(folder), Objective(loss="cross_entropy"))
        ratio = speedup(trainer, plain_step, log_uniform_rows, 1)
        print(f"log-uniform lengths: {ratio:.2f}")
        ratio = speedup(trainer, plain_step, few_rows, 1, pad_microbatches=True)
        print(f"each micro-batch padded to its own longest sequence: {ratio:.2f}")
        sorted_rows = sorted(rows, key=len)
        ratio = speedup(trainer, plain_step, sorted_rows, 1, pad_microbatches=True)
        print(f"also sorted by length: {ratio:.2f}")
        ratio = speedup(trainer, plain_step, rows, repeats)
    print_result(
        "ragged_step", ratio, goal=_GOAL, reference="hf_one_padded_batch_sdpa", repeats=repeats
    )


if __name__ == "__main__":
    main()
