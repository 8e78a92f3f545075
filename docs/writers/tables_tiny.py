"""The page docs/tables_tiny.md: which papers' tables `make tables-tiny` made, and one of them beside it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from docs.writers import DOCS, rendered
from mcore_mas.reports.paper_tables import PaperTable, table_names
from mcore_mas.reports.tables import markdown_table
from rollout.base.json_files import read_json_lines

OUTCOMES = DOCS / "tables_tiny.md"
SAMPLE = DOCS / "tables_drmas_1_tiny.md"


def pages(results: Path = DOCS.parent / "results" / "tiny") -> dict[Path, str]:
    """The page about the results folder of such a run; and Dr.MAS' Table 1 as that made it, head and all, if it did."""
    table = results / "tables" / "drmas_1.md"
    note = "Copied by `python -m docs.writers tables_tiny` from results/tiny/tables/drmas_1.md, as the run left it."
    sample = (
        {SAMPLE: f"{table.read_text(encoding='utf-8').rstrip()}\n\n{note}\n"}
        if table.is_file()
        else {}
    )
    return {OUTCOMES: _outcomes(results), **sample}


def _outcomes(results: Path) -> str:
    tables = [PaperTable.load(name) for name in table_names()]
    rows = {name: _experiment(results / name) for table in tables for name in table.experiments}
    made = {table.name: _made(results / "tables" / f"{table.name}.json") for table in tables}
    jobs = [job for file in sorted(results.rglob("benchmarks/*.jsonl")) for job in _jobs(file)[-1:]]
    ended = [row for row in rows.values() if row["outcome"].startswith("ran")]
    latest = max((mark for mark in made.values() if mark), default=(0.0, "none"))
    return rendered(
        "tables_tiny",
        made=sum(mark is not None for mark in made.values()),
        ended=len(ended),
        day=datetime.fromtimestamp(latest[0], UTC).date(),
        commit=latest[1],
        jobs=jobs,
        tables=markdown_table(pd.DataFrame([_table(table, made, rows) for table in tables])),
        count=len(tables),
        rows=markdown_table(
            pd.DataFrame({"experiment": f"`{name}`", **row} for name, row in rows.items()).fillna(
                ""
            )
        ),
        experiments=len(rows),
    )


def _table(
    table: PaperTable, made: dict[str, Any], rows: dict[str, dict[str, str]]
) -> dict[str, str]:
    ran = sum(rows[name]["outcome"].startswith("ran") for name in table.experiments)
    return {
        "table": f"`table_{table.name}`",
        "of": table.title,
        "made": "yes" if made[table.name] else "no",
        "experiments run": f"{ran} of {len(table.experiments)}",
    }


def _made(path: Path) -> tuple[float, str] | None:
    """When a table was made, in Unix time, and at which commit."""
    return (
        (path.stat().st_mtime, json.loads(path.read_text(encoding="utf-8"))["commit"])
        if path.is_file()
        else None
    )


def _experiment(run: Path) -> dict[str, str]:
    evaluated = sorted(path.stem for path in (run / "evaluation").glob("*.json"))
    done = (run / "train" / "done.json").is_file()
    untrained = evaluated and not (run / "train").exists()  # some tables have no more of it
    ran = "ran" if done else "ran untrained" if untrained else ""
    outcome = (evaluated and ran) or _failure(run) or ("unfinished" if run.is_dir() else "not run")
    updates = Counter[str]()
    for step in _jobs(run / "train" / "metrics.jsonl"):
        found = {key: re.fullmatch(r"policy/(.+)/updates", key) for key in step}
        updates.update({match[1]: int(step[key]) for key, match in found.items() if match})
    return {
        "outcome": outcome,
        "updates": ", ".join(f"{policy} {count}" for policy, count in updates.items()),
        "train, s": _seconds(run, ["train"]),
        "evaluated": ", ".join(evaluated),
        "evaluate, s": _seconds(run, [f"evaluate_{state}" for state in evaluated]),
    }


def _seconds(run: Path, jobs: Sequence[str]) -> str:
    found = [job["s"] for name in jobs for job in _jobs(run / "benchmarks" / f"{name}.jsonl")[-1:]]
    return f"{sum(found):.0f}" if found else ""


def _failure(run: Path) -> str:
    """The cause that the log of a failed job ends with."""
    for log in sorted((run / "logs").glob("*.log"), key=lambda file: file.stat().st_mtime):
        last = log.read_text(encoding="utf-8").rstrip().rpartition("\n")[2]
        if last.startswith("error: "):
            return f"failed, {log.stem}: {last.removeprefix('error: ')}"
    return ""


def _jobs(path: Path) -> list[dict[str, Any]]:
    return read_json_lines(path)[0] if path.is_file() else []
