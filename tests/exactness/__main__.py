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

`make exactness` writes this page, and `make test` asserts a part of it. Each row trains a tiny model with Megatron
in float32 for {STEPS} optimizer steps, and compares it with a reference: a plain Hugging Face model with the same
initial weights and samples, trained with plain torch in float64, one sequence at a time, with AdamW and gradient
clipping at norm 1. Norms and routers of the reference are in float64 too. The numbers are the largest relative
errors over all steps. In each row, the loaded weights must be exported bit for bit before the first step, and all
ranks must report the same metrics.

The bound of an error is measured in the same run, so that it holds on any machine. The plain model is also trained
in float32 three times, with other orders of the sums over samples and inside linear layers. An error may be
{FACTOR} times the largest error of these runs, which the second table lists. Errors smaller than one rounding count
as {EPS:.1e}.

- *loss*, *norm*, *agent norms*: errors of the update's loss, of the norm of the whole gradient, and of the norms of
  each agent's gradient.
- *gradients*: largest error of a gradient tensor after clipping, |g − ĝ|₂ / |ĝ|₂. For a tensor whose norm is less
  than 1% of the whole norm, the denominator is this 1%, because the true gradient of a key bias is 0.
- *parameters*: largest error of a parameter tensor after a step, |p − p̂|∞ / |p̂|∞.

The samples are prompts of two agents with replies of different lengths, some of which share a prompt, and a
dialogue with untrained tokens. In rows of depth 3, they are turns whose sequences share prefixes at two levels.
Among them are a turn that continues another one, a reply of one token, and equal samples. Common prefixes are
stored once, unless a row says otherwise. Micro-batches have up to 16 tokens, or 64 at depth 3, and there are as
many as the layout can use. Rows with one rank or with context parallelism alone have one micro-batch, unless a row
says otherwise. Models are Qwen2 with tied embeddings unless a row names another one. LoRA trains random adapters of
rank 3, of all projections unless a row names some. Its *parameters* are the merged weights and the adapters, and
the adapters are exported bit for bit too.

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
