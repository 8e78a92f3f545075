"""Writer of the README's results: a row for each experiment, from tables of scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from docs.writers import ROOT
from mcore_mas.reports.paper_tables import TableError
from mcore_mas.reports.tables import markdown_table, result_rows

BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"
_NOTE = (
    "Scores on held-out tasks in %, before (base) and after training (trained); avg@4 is the mean "
    "score of 4 trajectories of a task. The gain is in points, paired by task, with its 95 % interval over "
    "tasks."
)


def pages(*tables: Path, readme: Path = ROOT / "README.md") -> dict[Path, str]:
    """Return the README with the results of `tables` between its two markers; rows of other tables stay.

    Raises:
        TableError: the page has not exactly one block, or a table is not as `make_table` writes it.
    """
    if not tables or not readme.is_file():
        missing = "no table of scores" if not tables else f"{readme}: no such file"
        raise TableError(f"{missing}; name tables, and a page with a line {BEGIN} and a line {END}")
    text = readme.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    old_block, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in tail:
        raise TableError(
            f"{readme}: expected one {BEGIN} and, after it, one {END}; put each on a line of its own"
        )
    return {readme: f"{head}{BEGIN}\n{results_block(tables, old_block)}\n{END}{tail}"}


def results_block(tables: Sequence[Path], old_block: str = "") -> str:
    """Return a Markdown table with a row per experiment, and a note that explains its columns.

    Args:
        tables: CSV files of scores, in the order of their rows.
        old_block: an earlier block; its rows of other tables follow.
    """
    rows: list[dict[str, object]] = []
    for table in tables:
        rows.extend({"suite": table.stem, **row} for row in result_rows(table))
    new_suites = {table.stem for table in tables}
    for earlier in _rows_of(old_block):
        if earlier.get("suite") and earlier["suite"] not in new_suites:
            rows.append(dict(earlier))

    block = pd.DataFrame(rows)
    if block["suite"].nunique() == 1:
        block = block.drop(columns="suite")
    return f"{markdown_table(block)}\n\n{_NOTE}"


def _rows_of(markdown: str) -> list[dict[str, str]]:
    """Parse the rows of a Markdown table, as text by column."""
    lines = [line.strip("|").split("|") for line in markdown.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(cells[0], row, strict=False)) for row in cells[2:]]
