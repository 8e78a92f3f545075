"""The table of faults: docs/reliability.yaml with the results of the last `make chaos`, docs/reliability.json.

`python -m tests.faults.page JUNIT.xml|CHAOS.json...` updates docs/reliability.json with the results in these files.
With `--list` it prints the tests that the table names. `python -m docs.writers faults` writes docs/faults.md.
"""

from __future__ import annotations

import json
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mcore_mas import code_commit

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "faults.md"
ROWS = DOCS / "reliability.yaml"
RESULTS = DOCS / "reliability.json"
_WORST_FIRST = ("failure", "error", "passed", "skipped")  # the result of a test is its worst case's
_HEAD = """# Faults and their tests

Each row is a fault, what must happen, and the test that plays it. The tests need no GPU and are part of
the normal test suite. *Chaos* is `make chaos`: it injects at least 20 random faults into one training
run (in Ray, a rank, an engine, and a retriever behind a proxy that corrupts answers), three times with
other random draws. The run must end with bitwise identical results and leave no process, shared memory,
control group or folder behind. *Bitwise identical results* are weights, optimizer state, metrics and
trajectories with the same SHA-256 as those of an undisturbed run.

*Seconds* are the duration of a test, or the time from a fault of the chaos until the run continued. The rows are in
[reliability.yaml](reliability.yaml). [checkpoints.md](checkpoints.md) explains what a user can rely on.

"""


def read(paths: list[str]) -> dict[str, Any]:
    """Return the recorded results, updated with those of JUnit and chaos files.

    A test that was skipped here keeps its recorded result, because it may need another machine, such as one with Slurm.
    """
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    chaos_files = [Path(path) for path in paths if path.endswith(".json")]
    junit_files = [Path(path) for path in paths if not path.endswith(".json")]
    if chaos_files:
        results["chaos"] = _chaos_results(chaos_files)
    for file in junit_files:
        for name, result in _junit_results(file).items():
            if result["result"] != "skipped" or name not in results["tests"]:
                results["tests"][name] = result
    return results


def _chaos_results(files: list[Path]) -> dict[str, Any]:
    """Merge the runs of the chaos: the seeds, the faults, and the seconds until the run continued."""
    seeds: list[int] = []
    recovered_s: dict[str, list[float]] = {}
    faults: Any = None
    for file in files:
        run = json.loads(file.read_text(encoding="utf-8"))
        faults = run["faults"]
        seeds += run["seeds"]
        for fault, seconds in run["recovered_s"].items():
            recovered_s.setdefault(fault, []).extend(seconds)
    return {"seeds": seeds, "recovered_s": recovered_s, "faults": faults}


def _junit_results(file: Path) -> dict[str, Any]:
    """Return the worst result of each test's cases, and their seconds in total."""
    date_and_commit = f"{time.strftime('%Y-%m-%d')} {code_commit()[:10]}"
    results: dict[str, Any] = {}
    for case in ElementTree.parse(file).iter("testcase"):
        module = str(case.get("classname")).replace(".", "/")
        function = str(case.get("name")).partition("[")[0]
        name = f"{module}.py::{function}"
        problems = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
        case_result = problems[0] if problems else "passed"
        earlier = results.get(name, {"result": "skipped", "s": 0.0})
        results[name] = {
            "result": min(case_result, earlier["result"], key=_WORST_FIRST.index),
            "s": round(float(case.get("time", 0)) + earlier["s"], 1),
            "of": date_and_commit,
        }
    return results


def render(sections: Mapping[str, list[dict[str, Any]]], results: Mapping[str, Any]) -> str:
    """Return the table of faults, and a line with the dates and commits of the results."""
    lines = ["| fault | expected | test | result | seconds |", "|---|---|---|---|---|"]
    for section, faults in sections.items():
        lines.append(f"| **{section}** | | | | |")
        lines.extend(_table_row(row, results) for row in faults)
    dates = sorted(result["of"] for result in results["tests"].values() if "of" in result)
    if dates:
        lines.append(f"\nResults of {dates[0]} to {dates[-1]}, by date and commit.")
    return "\n".join(lines)


def _table_row(row: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Return the row of a fault: its tests, their distinct results, and the longest time."""
    names = [f"`{test}`" for test in row.get("tests", ())]
    if "chaos" in row:
        names.append(f"chaos: {', '.join(row['chaos'])}")
    if "untested" in row:
        names.append(f"not tested: {row['untested']}")
    outcomes = []
    seconds = []
    for outcome, duration in _results(row, results):
        outcomes.append(outcome)
        if duration is not None:
            seconds.append(duration)
    shown = "; ".join(dict.fromkeys(outcomes))
    longest = f"{max(seconds):.1f}" if seconds else ""
    return f"| {row['fault']} | {row['expected']} | {', '.join(names)} | {shown} | {longest} |"


def _results(
    row: Mapping[str, Any], results: Mapping[str, Any]
) -> Iterator[tuple[str, float | None]]:
    """Yield each result of a row with its seconds.

    For a test they are its duration; for a fault of the chaos, the longest time until the run continued.
    """
    for test in row.get("tests", ()):
        recorded = results["tests"].get(test, {"result": "not run", "s": None})
        yield recorded["result"], recorded["s"]
    recovered = results["chaos"].get("recovered_s", {})
    for fault in row.get("chaos", ()):
        seconds = recovered.get(fault, [])
        if fault == "all":
            seconds = [second for values in recovered.values() for second in values]
        yield ("bitwise identical" if seconds else "not run"), max(seconds, default=None)
    if "untested" in row:
        yield "", None


def pages() -> dict[Path, str]:
    """Return the text of the page."""
    rows = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {PAGE: f"{_HEAD}{render(rows, results)}\n"}


def named_tests() -> list[str]:
    """Return the tests that the table names, each once."""
    sections = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    names: dict[str, None] = {}
    for faults in sections.values():
        for row in faults:
            names.update(dict.fromkeys(row.get("tests", ())))
    return list(names)


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        print(*named_tests())
    else:
        new_results = json.dumps(read(sys.argv[1:]), indent=1, sort_keys=True)
        RESULTS.write_text(f"{new_results}\n", encoding="utf-8")
