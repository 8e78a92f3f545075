"""Writer of docs/tables_tiny.md: the papers' tables that `make tables-tiny` made, and one of them as an example."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
_NOTE = "Copied by `python -m docs.writers tables_tiny` from results/tiny/tables/drmas_1.md, as the run left it."


@dataclass(frozen=True, slots=True)
class _TableOrigin:
    """Unix time and commit at which a table was made."""

    time: float
    commit: str


def pages(results: Path = DOCS.parent / "results" / "tiny") -> dict[Path, str]:
    """Return the page about a results folder, and Table 1 of Dr. MAS if it was made there."""
    texts = {OUTCOMES: _outcomes(results)}
    table = results / "tables" / "drmas_1.md"
    if table.is_file():
        texts[SAMPLE] = f"{table.read_text(encoding='utf-8').rstrip()}\n\n{_NOTE}\n"
    return texts


def _outcomes(results: Path) -> str:
    tables = [PaperTable.load(name) for name in table_names()]
    rows: dict[str, dict[str, str]] = {}
    for table in tables:
        for name in table.experiments:
            rows[name] = _experiment_row(results / name)
    origins = {
        table.name: _table_origin(results / "tables" / f"{table.name}.json") for table in tables
    }
    finished = [row for row in rows.values() if row["outcome"].startswith("ran")]
    latest = _TableOrigin(0.0, "none")
    for origin in origins.values():
        if origin is not None and origin.time > latest.time:
            latest = origin

    jobs = []
    for file in sorted(results.rglob("benchmarks/*.jsonl")):
        jobs.extend(_json_lines(file)[-1:])
    experiment_rows = [{"experiment": f"`{name}`", **row} for name, row in rows.items()]
    return rendered(
        "tables_tiny",
        made=sum(origin is not None for origin in origins.values()),
        ended=len(finished),
        day=datetime.fromtimestamp(latest.time, UTC).date(),
        commit=latest.commit,
        jobs=jobs,
        tables=markdown_table(pd.DataFrame([_table_row(table, origins, rows) for table in tables])),
        count=len(tables),
        rows=markdown_table(pd.DataFrame(experiment_rows).fillna("")),
        experiments=len(rows),
    )


def _table_row(
    table: PaperTable, origins: dict[str, _TableOrigin | None], rows: dict[str, dict[str, str]]
) -> dict[str, str]:
    finished = sum(rows[name]["outcome"].startswith("ran") for name in table.experiments)
    return {
        "table": f"`table_{table.name}`",
        "of": table.title,
        "made": "yes" if origins[table.name] else "no",
        "experiments run": f"{finished} of {len(table.experiments)}",
    }


def _table_origin(path: Path) -> _TableOrigin | None:
    """Return when the table of this file was made, or None if it was not."""
    if not path.is_file():
        return None
    commit = json.loads(path.read_text(encoding="utf-8"))["commit"]
    return _TableOrigin(path.stat().st_mtime, commit)


def _experiment_row(run: Path) -> dict[str, str]:
    evaluated = sorted(path.stem for path in (run / "evaluation").glob("*.json"))
    updates = Counter[str]()
    for step in _json_lines(run / "train" / "metrics.jsonl"):
        for key, value in step.items():
            policy = re.fullmatch(r"policy/(.+)/updates", key)
            if policy is not None:
                updates[policy[1]] += int(value)
    return {
        "outcome": _outcome(run, evaluated),
        "updates": ", ".join(f"{policy} {count}" for policy, count in updates.items()),
        "train, s": _seconds(run, ["train"]),
        "evaluated": ", ".join(evaluated),
        "evaluate, s": _seconds(run, [f"evaluate_{state}" for state in evaluated]),
    }


def _outcome(run: Path, evaluated: Sequence[str]) -> str:
    """Describe how far a run came; some tables evaluate untrained teams only."""
    if evaluated and (run / "train" / "done.json").is_file():
        return "ran"
    if evaluated and not (run / "train").exists():
        return "ran untrained"
    return _failure(run) or ("unfinished" if run.is_dir() else "not run")


def _seconds(run: Path, jobs: Sequence[str]) -> str:
    """Return the seconds of the last attempts of these jobs in total, or "" if none ran."""
    seconds: list[float] = []
    for name in jobs:
        seconds.extend(job["s"] for job in _json_lines(run / "benchmarks" / f"{name}.jsonl")[-1:])
    return f"{sum(seconds):.0f}" if seconds else ""


def _failure(run: Path) -> str:
    """Return the error at the end of the log of a failed job, or ""."""
    for log in sorted((run / "logs").glob("*.log"), key=lambda file: file.stat().st_mtime):
        last_line = log.read_text(encoding="utf-8").rstrip().rpartition("\n")[2]
        if last_line.startswith("error: "):
            return f"failed, {log.stem}: {last_line.removeprefix('error: ')}"
    return ""


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return read_json_lines(path)[0] if path.is_file() else []
