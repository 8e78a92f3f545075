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
_WORST = ("failure", "error", "passed", "skipped")  # of the cases of a test, the one that counts
_HEAD = """# Faults and their tests

Each row is a fault, what must happen, and the test that plays it. The tests need no GPU and are part of
the normal test suite. *Chaos* is `make chaos`: it injects at least 20 random faults into one training
run (in Ray, a rank, an engine, and a retriever behind a proxy that corrupts answers), three times with
other draws. The run must end with the same weights, optimizer state, metrics and trajectories as an
undisturbed one, compared by SHA-256, and leave no process, shared memory, control group or folder
behind.

*Seconds* are the duration of a test, or the time from a fault of the chaos until the run continued. The rows are in
[reliability.yaml](reliability.yaml). [checkpoints.md](checkpoints.md) explains what a user can rely on.

"""


def read(paths: list[str]) -> dict[str, Any]:
    """Results by test and by fault of the chaos: what came of it, and after how many seconds."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    found |= (
        {"chaos": {"seeds": [], "recovered_s": {}}}
        if any(path.endswith(".json") for path in paths)
        else {}
    )
    of = f"{time.strftime('%Y-%m-%d')} {code_commit()[:10]}"
    for path in paths:
        if path.endswith(".json"):
            own, chaos = json.loads(Path(path).read_text(encoding="utf-8")), found["chaos"]
            chaos |= {"faults": own["faults"], "seeds": chaos["seeds"] + own["seeds"]}
            for name, seconds in own["recovered_s"].items():
                chaos["recovered_s"].setdefault(name, []).extend(seconds)
            continue
        here: dict[str, Any] = {}
        for case in ElementTree.parse(path).iter("testcase"):
            name = f"{str(case.get('classname')).replace('.', '/')}.py::{str(case.get('name')).partition('[')[0]}"
            bad = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
            if bad == ["skipped"] and name in found["tests"]:
                continue  # what was found where it can run, such as on Slurm
            before = here.get(name, {})
            took = round(float(case.get("time", 0)) + before.get("s", 0.0), 1)
            result = min(
                bad[0] if bad else "passed", before.get("result", "skipped"), key=_WORST.index
            )
            here[name] = {"result": result, "s": took, "of": of}
        found["tests"] |= here
    return found


def render(rows: Mapping[str, list[dict[str, Any]]], results: Mapping[str, Any]) -> str:
    """The table of faults."""
    lines = ["| fault | expected | test | result | seconds |", "|---|---|---|---|---|"]
    for section, faults in rows.items():
        lines.append(f"| **{section}** | | | | |")
        for row in faults:
            names = [f"`{test}`" for test in row.get("tests", ())]
            names += [f"chaos: {', '.join(row['chaos'])}"] if "chaos" in row else []
            names += [f"not tested: {row['untested']}"] if "untested" in row else []
            outcome, seconds = zip(*_results(row, results), strict=True)
            shown = "; ".join(dict.fromkeys(outcome))
            most = (
                [f"{max(s for s in seconds if s is not None):.1f}"]
                if any(s is not None for s in seconds)
                else [""]
            )
            lines.append(
                f"| {row['fault']} | {row['expected']} | {', '.join(names)} | {shown} | {most[0]} |"
            )
    of = sorted(found["of"] for found in results["tests"].values() if "of" in found)
    when = [f"\nResults of {of[0]} to {of[-1]}, by date and commit."] if of else []
    return "\n".join(lines + when)


def _results(
    row: Mapping[str, Any], results: Mapping[str, Any]
) -> Iterator[tuple[str, float | None]]:
    """What came of a row's tests, and seconds: of a test all it took, of the chaos until the run went on."""
    for test in row.get("tests", ()):
        found = results["tests"].get(test, {"result": "not run", "s": None})
        yield found["result"], found["s"]
    for fault in row.get("chaos", ()):
        recovered = results["chaos"].get("recovered_s", {})
        times = (
            [s for own in recovered.values() for s in own]
            if fault == "all"
            else recovered.get(fault, [])
        )
        yield ("same bits" if times else "not run"), max(times, default=None)
    if "untested" in row:
        yield "", None


def pages() -> dict[Path, str]:
    """Return the text of the page."""
    rows = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {PAGE: f"{_HEAD}{render(rows, results)}\n"}


def tests() -> list[str]:
    """The tests that the table names."""
    rows = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    return list(
        dict.fromkeys(
            test for faults in rows.values() for row in faults for test in row.get("tests", ())
        )
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        sys.exit(print(*tests()))
    RESULTS.write_text(
        json.dumps(read(sys.argv[1:]), indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
