"""Measure every row and write docs/exactness.md: `make exactness`."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mcore_mas.megatron.spec import destroy_process_groups, init_process_groups
from tests.exactness import agreement, objectives
from tests.exactness.formulas import CASES, VALUE_CASES
from tests.exactness.objectives import PLACES
from tests.exactness.repeats import REPEATS, jobs, same, table
from tests.exactness.rows import ROWS, Row
from tests.exactness.training import STEPS, Measured, measure, run
from tests.support.precision import EPS, FACTOR, Errors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exactness.md"
HEAD = f"""# Exactness

`make exactness` writes this page, and `make test` asserts part of it. Every row trains a tiny model in float32 for
{STEPS} optimizer steps with Megatron. It trains a plain Hugging Face model beside it, from the same weights, on the
same samples: under plain torch, one sequence at a time, with AdamW and clipping at 1. That one is in float64, norms
and routers too. The numbers are the largest relative errors over all steps. In every row, the weights that were
loaded must come back bit for bit before the first step. All ranks must report the same metrics.

The bound comes from the same run, not from one machine. The plain model is trained in float32 too, with sums in three
orders: of the samples, and inside the linear layers. Each number may be off by {FACTOR} times its own largest error
there. An error of less than one rounding counts as {EPS:.1e}. The second table has these errors.

- *loss*, *norm*, *agent norms*: of the update's loss, of the whole gradient, of each agent's own gradient.
- *gradients*: of one tensor, |g − ĝ|₂ / |ĝ|₂, clipped. A tensor with less than 1% of the whole norm is measured against
  that 1%, as the true gradient of a key bias is 0.
- *parameters*: of one tensor after the step, |p − p̂|∞ / |p̂|∞.

The samples are two agents' prompts with ragged replies, some sharing a prompt, and a dialogue with untrained tokens.
In rows of depth 3 they are turns whose sequences share two stretches, one below the other. Among these are a turn
that goes on from another, a reply of one token, and twins. Unless a row says otherwise, what they begin with in
common is stored once. Micro-batches hold about 16 tokens, or 64 at depth 3 and more where context parallelism is
alone. There are as many as the layout can use. Models are Qwen2 with tied embeddings unless named. LoRA trains random
adapters of rank 3, of all projections unless some are named. Its *parameters* are the merged weights and the
adapters. The adapters come back bit for bit.

| row | ranks | loss | norm | agent norms | gradients | parameters |
|---|---|---|---|---|---|---|
"""


OWN = """
## Plain torch in float32

| model | samples | loss | norm | agent norms | gradients | parameters |
|---|---|---|---|---|---|---|
"""


def line(first: str, second: object, errors: Errors) -> str:
    """One line of a table."""
    return (
        f"| {first} | {second} | "
        + " | ".join(f"{number:.1e}" for number in asdict(errors).values())
        + " |\n"
    )


def own(rows: Sequence[Row], measured: Sequence[Measured]) -> str:
    """The section with plain float32's own errors, task by task."""
    tasks = {row.task: found.own for row, found in zip(rows, measured, strict=True)}
    return OWN + "".join(
        line(model.replace("_", " "), "depth 3" if deep else "flat", errors)
        for (model, deep), errors in tasks.items()
    )


def main() -> int:
    """Measure, print and write; 1 if a row is too far from the reference."""
    with tempfile.TemporaryDirectory() as folder:
        others = jobs(REPEATS, Path(folder)) + objectives.jobs(
            PLACES, (*CASES, *VALUE_CASES), Path(folder)
        )
        run(ROWS, Path(folder), others)
        measured = measure(ROWS, Path(folder))
        updates = objectives.measure(PLACES, (*CASES, *VALUE_CASES), Path(folder))
        repeated = same(REPEATS, Path(folder))
    rows = "".join(
        line(row.name, row.ranks, found.errors) for row, found in zip(ROWS, measured, strict=True)
    )
    init_process_groups(rank=0, threads=1)
    with tempfile.TemporaryDirectory() as folder:
        rows += own(ROWS, measured) + objectives.section(updates)
        rows += table(REPEATS, repeated) + agreement.section(Path(folder))
    destroy_process_groups()
    print(rows, end="")
    PAGE.write_text(HEAD + rows)
    far = {
        row.name: found.beyond for row, found in zip(ROWS, measured, strict=True) if found.beyond
    }
    far |= {
        f"{found.case.name} under {found.place.name}": found.beyond
        for found in updates
        if found.beyond
    }
    for name, beyond in far.items():
        print(
            f"{name} is further from the reference than plain float32 allows: {beyond}",
            file=sys.stderr,
        )
    different = [repeat.name for repeat, row in zip(REPEATS, repeated, strict=True) if not all(row)]
    if different:
        print(f"not the same bits: {', '.join(different)}", file=sys.stderr)
    return 1 if far or different else 0


if __name__ == "__main__":
    sys.exit(main())
