"""Measure every row and write docs/exactness.md: `make exactness`."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mcore_mas.megatron.spec import destroy_process_groups, init_process_groups
from tests.exactness.agreement import agreement_section
from tests.exactness.formulas import CASES, VALUE_CASES
from tests.exactness.objectives import (
    OBJECTIVE_ROWS,
    measure_objectives,
    objective_jobs,
    objectives_section,
)
from tests.exactness.repeats import (
    REPEATED_ROWS,
    compare_repeats,
    repeat_jobs,
    repeats_section,
)
from tests.exactness.rows import ROWS, Row
from tests.exactness.training import STEPS, Measurement, measure_rows, train_rows
from tests.support.precision import EPS, FACTOR, Errors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exactness.md"
HEAD = f"""# Exactness

`make exactness` writes this page, and `make test-slow` asserts a part of it. Each row trains a tiny model with Megatron
in float32 for {STEPS} optimizer steps, and compares it with a reference: a plain Hugging Face model with the same
initial weights and samples, trained with plain torch in float64, one sequence at a time, with AdamW and gradient
clipping at norm 1. Norms and routers of the reference are in float64 too. The numbers are the largest relative
errors over all steps. In each row, the loaded weights must be exported bit for bit before the first step, and all
ranks must report the same metrics.

The bound of an error is measured in the same run, so it holds on any machine. The plain model is also trained
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
the adapters are exported bit for bit too. In rows with balanced agents, `loss.balance` gives the two agents 3/4 and 1/4
of the norms.

Layers of Transformer Engine have no CPU kernels. Their rows are in `tests/exactness/transformer_engine.py`, with a
stand-in for the kernels, and tests hold them to the same bounds ([gpu.md](gpu.md#with-transformer-engine)).

| row | ranks | loss | norm | agent norms | gradients | parameters |
|---|---|---|---|---|---|---|
"""

PLAIN_ERRORS_HEADER = """
## Plain torch in float32

| model | samples | loss | norm | agent norms | gradients | parameters |
|---|---|---|---|---|---|---|
"""


def table_line(cells: Sequence[str], errors: Errors) -> str:
    """Return a line of a table: first cells, then errors."""
    figures = [f"{error:.1e}" for error in asdict(errors).values()]
    return f"| {' | '.join([*cells, *figures])} |\n"


def plain_errors_section(rows: Sequence[Row], measurements: Sequence[Measurement]) -> str:
    """Return the section with the errors of plain float32 on each task."""
    errors_of_task = {
        row.task: measurement.plain_errors
        for row, measurement in zip(rows, measurements, strict=True)
    }
    text = PLAIN_ERRORS_HEADER
    for (model, is_deep, is_balanced), errors in errors_of_task.items():
        samples = "depth 3" if is_deep else "flat"
        cells = [model.replace("_", " "), f"{samples}, balanced" if is_balanced else samples]
        text += table_line(cells, errors)
    return text


def main() -> int:
    """Measure, print and write; return 1 if a row is too far from the reference or not repeatable."""
    cases = (*CASES, *VALUE_CASES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        other_jobs = [
            *repeat_jobs(REPEATED_ROWS, folder),
            *objective_jobs(OBJECTIVE_ROWS, cases, folder),
        ]
        train_rows(ROWS, folder, other_jobs)
        measurements = measure_rows(ROWS, folder)
        objective_measurements = measure_objectives(OBJECTIVE_ROWS, cases, folder)
        repeats = compare_repeats(REPEATED_ROWS, folder)

    text = ""
    for row, measurement in zip(ROWS, measurements, strict=True):
        text += table_line([row.name, str(row.ranks)], measurement.errors)
    text += plain_errors_section(ROWS, measurements)
    text += objectives_section(objective_measurements)
    text += repeats_section(REPEATED_ROWS, repeats)
    init_process_groups(rank=0, threads=1)
    with tempfile.TemporaryDirectory() as name:
        text += agreement_section(Path(name))
    destroy_process_groups()
    print(text, end="")
    PAGE.write_text(HEAD + text)

    excessive = {
        row.name: measurement.excessive
        for row, measurement in zip(ROWS, measurements, strict=True)
        if measurement.excessive
    }
    for measurement in objective_measurements:
        if measurement.excessive:
            name = f"{measurement.case.name} in layout {measurement.row.name}"
            excessive[name] = measurement.excessive
    for name, errors in excessive.items():
        print(
            f"{name} is further from the reference than plain float32 allows: {errors}",
            file=sys.stderr,
        )
    different = [
        row.name
        for row, result in zip(REPEATED_ROWS, repeats, strict=True)
        if not (result.repeated and result.resumed)
    ]
    if different:
        print(f"not the same bits: {', '.join(different)}", file=sys.stderr)
    return 1 if excessive or different else 0


if __name__ == "__main__":
    sys.exit(main())
