"""The README's table of results, written from tables of scores: `python -m mcore_mas.reports.readme TABLE.csv ...`."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_mas.reports.tables import GAIN, STATES
from rollout.base.files import write_text

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

_COLUMNS = ("experiment", "policy_state", "dataset", "metric", "value", "ci_low", "ci_high", "n", "seed_count")
_HEAD = ("experiment", "metric", "base", "trained", "gain", "95 % interval", "tasks", "seeds")
_NOTE = (
    "Scores in % of held-out tasks, base before and trained after reinforcement learning; the gain is paired by task, "
    "in points, with a 95 % bootstrap interval over tasks. Made by `python -m mcore_mas.reports.readme` from {tables}."
)

Row = Mapping[str, str]  # one line of a table, by column


class ReadmeError(ValueError):
    """The block cannot be written: one line that says what, where, expected, what to do."""


def update(readme: Path, tables: Sequence[Path]) -> None:
    """Replace what stands between the two markers of `readme` by the results in `tables`; rows of other tables stay.

    Raises:
        ReadmeError: the page has not exactly one block, or a table is not as `mcore_mas.reports.tables` writes it.
    """
    if not readme.is_file():
        raise ReadmeError(f"{readme}: no such file; expected a page with a line {BEGIN} and a line {END}")
    text = readme.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    before, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in tail:
        raise ReadmeError(f"{readme}: expected one {BEGIN} and, after it, one {END}; put each on a line of its own")
    write_text(readme, f"{head}{BEGIN}\n{block(tables, _kept(before, tables))}\n{END}{tail}")


def _kept(before: str, tables: Sequence[Path]) -> list[str]:
    """The rows that a block has of other tables, where its rows say their table."""
    lines = before.strip().splitlines()
    if not lines or not lines[0].startswith("| table |"):
        return []
    rows = [line for line in lines[2:] if line.startswith("|")]
    return [row for row in rows if row.split("|")[1].strip() not in {table.stem for table in tables}]


def block(tables: Sequence[Path], kept: Sequence[str] = ()) -> str:
    """One Markdown table with a row per experiment of `tables`, in their order, and a note that says what it shows.

    Rows that are `kept` come after them, as they are.
    """
    several = len(tables) > 1 or bool(kept)  # then a row says its table too: an experiment may stand in several
    head = ("table", *_HEAD) if several else _HEAD
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * (len(head) - 6)}{'---:|' * 6}"]
    for table in tables:
        for experiment, scores in _average_scores(table).items():
            cells = _cells(f"{table}, experiment {experiment}", scores)
            lines.append(f"| {' | '.join([table.stem, experiment, *cells] if several else [experiment, *cells])} |")
    lines += kept
    others = dict.fromkeys(f"{row.split('|')[1].strip()}.csv" for row in kept)
    names = ", ".join(f"`{name}`" for name in (*(table.name for table in tables), *others))
    return "\n".join([*lines, "", _NOTE.format(tables=names)])


def _cells(where: str, scores: Mapping[str, Row]) -> tuple[str, ...]:
    missing = [state for state in (*STATES, GAIN) if state not in scores]
    if missing:
        raise ReadmeError(
            f"{where}: no avg@k of {', '.join(missing)}; evaluate both policy states, then make the table"
        )
    base, trained, gain = (scores[state] for state in (*STATES, GAIN))
    try:
        return (
            gain["metric"],
            f"{100 * float(base['value']):.1f}",
            f"{100 * float(trained['value']):.1f}",
            f"{100 * float(gain['value']):+.1f}",
            f"[{100 * float(gain['ci_low']):+.1f}, {100 * float(gain['ci_high']):+.1f}]",
            str(int(gain["n"])),
            str(int(gain["seed_count"])),
        )
    except ValueError as error:
        raise ReadmeError(f"{where}: not a number ({error}); make the table again") from error


def _average_scores(table: Path) -> dict[str, dict[str, Row]]:
    """The avg@k rows over all data of each experiment, by policy state."""
    experiments: dict[str, list[Row]] = {}
    for row in _read(table):
        if row["metric"].startswith("avg@"):
            experiments.setdefault(row["experiment"], []).append(row)
    if not experiments:
        raise ReadmeError(f"{table}: no row of avg@k; make the table again")
    return {name: {row["policy_state"]: row for row in _over_all(rows)} for name, rows in experiments.items()}


def _over_all(rows: Sequence[Row]) -> list[Row]:
    """The rows of the data set "all"; an experiment with a single data source has only that one's."""
    return [row for row in rows if row["dataset"] == "all"] or list(rows)


def _read(table: Path) -> list[Row]:
    if not table.is_file():
        raise ReadmeError(f"{table}: no such file; expected a table of scores (run `snakemake {table}`)")
    with table.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ReadmeError(f"{table}: no column {', '.join(missing)}; expected {', '.join(_COLUMNS)}")
        return list(reader)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and rewrite the block."""
    parser = argparse.ArgumentParser(
        prog="python -m mcore_mas.reports.readme", description="The README's table of results."
    )
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv", help="results/tables/<suite>.csv")
    parser.add_argument("--readme", type=Path, default=README, help="the page with the block [default: README.md]")
    options = parser.parse_args(arguments)
    try:
        update(options.readme, options.tables)
    except ReadmeError as error:
        raise SystemExit(f"error: {error}") from None
    print(options.readme)


if __name__ == "__main__":
    main()
