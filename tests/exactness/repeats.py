"""Trainings that are repeated, or stopped and resumed, compared bit by bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from tests.support import ranks, reference

STEPS = 3
HEADER = """
## Repeated and resumed

Each row is trained twice. Another training is stopped after the first of {} steps and resumed in new trainers. The
table compares the sha256 of the weights and of Adam's moments at the end.

| row | ranks | same seed twice | resumed |
|---|---|---|---|
"""


@dataclass(frozen=True, kw_only=True)
class RepeatedRow:
    """Layout that is trained, trained again, and resumed.

    Attributes:
        name: in the table.
        layout: fields of the `TrainerSpec`.
        tested: True if the tests measure it too.
    """

    name: str
    layout: dict[str, Any] = field(default_factory=dict)
    tested: bool = False

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return ranks.make_spec("", **self.layout).ranks


@dataclass(frozen=True, kw_only=True)
class RepeatResult:
    """Comparison of a row's trainings with the first one.

    Attributes:
        repeated: True if the second training ended with the same bits.
        resumed: True if the resumed training ended with the same bits.
    """

    repeated: bool
    resumed: bool


REPEATED_ROWS = (
    RepeatedRow(name="one rank"),
    RepeatedRow(name="TP2 + SP", layout={"tp": 2, "sp": True}),
    RepeatedRow(name="PP2", layout={"pp": 2}),
    RepeatedRow(
        name="DP2 + distributed optimizer", layout={"dp": 2, "distributed_optimizer": True}
    ),
    RepeatedRow(
        name="TP2 × DP2 + distributed optimizer, bfloat16",
        layout={"tp": 2, "dp": 2, "distributed_optimizer": True, "bf16": True},
        tested=True,
    ),
)


def repeat_jobs(rows: Sequence[RepeatedRow], folder: Path) -> list[ranks.Job]:
    """Write the rows' model to `folder`, and return the jobs that train rows there."""
    reference.make_model("qwen2", folder / "repeated")
    jobs = []
    for number, row in enumerate(rows):
        spec = ranks.make_spec(str(folder / "repeated"), **row.layout)
        sizes = {name: size for name, size in row.layout.items() if name in ("tp", "pp", "dp")}
        row_folder = folder / f"repeat_{number}"
        first = row_folder / "first"
        for out, resumed_from in (
            (first, None),
            (row_folder / "again", None),
            (row_folder / "resumed", first),
        ):
            arguments = {"spec": spec, "out": out, "resumed_from": resumed_from}
            jobs.append(ranks.Job(function=_train, arguments=arguments, **sizes))
    return jobs


def compare_repeats(rows: Sequence[RepeatedRow], folder: Path) -> list[RepeatResult]:
    """Compare the trainings of each row, which the jobs have written to `folder`."""
    results = []
    for number, row in enumerate(rows):
        row_folder = folder / f"repeat_{number}"
        digests = {}
        for name in ("first", "again", "resumed"):
            files = sorted((row_folder / name).glob("digests_*.json"))
            assert len(files) == row.ranks
            digests[name] = [json.loads(file.read_text()) for file in files]
        results.append(
            RepeatResult(
                repeated=digests["again"] == digests["first"],
                resumed=digests["resumed"] == digests["first"],
            )
        )
    return results


def repeats_section(rows: Sequence[RepeatedRow], results: Sequence[RepeatResult]) -> str:
    """Return the section of docs/exactness.md."""
    text = HEADER.format(STEPS)
    for row, result in zip(rows, results, strict=True):
        cells = [
            row.name,
            str(row.ranks),
            "identical" if result.repeated else "different",
            "identical" if result.resumed else "different",
        ]
        text += f"| {' | '.join(cells)} |\n"
    return text


def _train(rank: int, spec: TrainerSpec, out: Path, resumed_from: Path | None) -> None:
    """Train all steps, or the steps after the first if resumed; every rank writes its files' digests."""
    batches = pack(reference.make_samples(), 16)
    trainer = MegatronTrainer(spec)
    first_step = 0
    if resumed_from is not None:
        trainer.restore(resumed_from / "checkpoint")
        first_step = 1
    for step in range(first_step, STEPS):
        trainer.update(batches)
        if step == 0:
            ranks.save(trainer, out / "checkpoint")
    trainer.save(out / "end")
    digests = trainer.wait_written()
    (out / f"digests_{rank}.json").write_text(json.dumps(digests))
    torch.distributed.barrier()
