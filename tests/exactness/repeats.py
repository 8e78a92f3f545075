"""Whether a training that is repeated, or stopped and resumed, comes to the same bits."""

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
TABLE = """
## Repeated and resumed

Trained twice, and stopped after the first of {} steps and resumed in new trainers; compared by the sha256 of weights
and Adam's moments at the end.

| row | ranks | same seed twice | resumed |
|---|---|---|---|
"""


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """A layout that is trained, trained again, and resumed."""

    name: str
    layout: dict[str, Any] = field(default_factory=dict)  # of the TrainerSpec
    ci: bool = False  # measured by `make test` too


REPEATS = (
    Repeat(name="one rank"),
    Repeat(name="TP2 + SP", layout={"tp": 2, "sp": True}),
    Repeat(name="PP2", layout={"pp": 2}),
    Repeat(name="DP2 + distributed optimizer", layout={"dp": 2, "distributed_optimizer": True}),
    Repeat(
        name="TP2 × DP2 + distributed optimizer, bfloat16",
        layout={"tp": 2, "dp": 2, "distributed_optimizer": True, "bf16": True},
        ci=True,
    ),
)


def jobs(repeats: Sequence[Repeat], folder: Path) -> list[ranks.Job]:
    """What trains them, with a model of their own, into `folder`."""
    reference.make_model("qwen2", folder / "repeated")
    found = []
    for number, repeat in enumerate(repeats):
        spec = ranks.make_spec(str(folder / "repeated"), **repeat.layout)
        sizes = {name: size for name, size in repeat.layout.items() if name in ("tp", "pp", "dp")}
        first = folder / f"repeat_{number}" / "first"
        for out, start in (
            (first, None),
            (first.with_name("again"), None),
            (first.with_name("resumed"), first),
        ):
            found.append(
                ranks.Job(
                    function=_train, arguments={"spec": spec, "out": out, "start": start}, **sizes
                )
            )
    return found


def same(repeats: Sequence[Repeat], folder: Path) -> list[tuple[bool, bool]]:
    """Of each row, whether the second training and the resumed one ended with the first one's bits."""
    rows = []
    for number, repeat in enumerate(repeats):
        digests = {}
        for out in sorted((folder / f"repeat_{number}").iterdir()):
            files = [json.loads(path.read_text()) for path in sorted(out.glob("digests_*.json"))]
            assert len(files) == ranks.make_spec("", **repeat.layout).ranks
            digests[out.name] = files
        rows.append((digests["again"] == digests["first"], digests["resumed"] == digests["first"]))
    return rows


def table(repeats: Sequence[Repeat], rows: Sequence[tuple[bool, bool]]) -> str:
    """The page's section."""
    lines = [
        f"| {repeat.name} | {ranks.make_spec('', **repeat.layout).ranks} | "
        + " | ".join("identical" if equal else "different" for equal in row)
        + " |\n"
        for repeat, row in zip(repeats, rows, strict=True)
    ]
    return TABLE.format(STEPS) + "".join(lines)


def _train(rank: int, spec: TrainerSpec, out: Path, start: Path | None) -> None:
    """All steps, or those after the first from where `start` saved it; every rank writes its files' digests."""
    batches = pack(reference.make_samples(), 16)
    trainer = MegatronTrainer(spec)
    if start is not None:
        trainer.restore(start / "checkpoint")
    for step in range(0 if start is None else 1, STEPS):
        trainer.update(batches)
        if step == 0:
            ranks.save(trainer, out / "checkpoint")
    trainer.save(out / "end")
    digests = trainer.written()
    (out / f"digests_{rank}.json").write_text(json.dumps(digests))
    torch.distributed.barrier()
