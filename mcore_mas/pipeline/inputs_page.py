"""Page on the inputs of a suite: where they come from, and which tasks leak between splits."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_mas.pipeline.hub import AcquireError
from mcore_mas.reports.page_templates import render_page
from rollout.base.files import write_text
from rollout.base.json_files import read_json
from rollout.config.data import DataConfig
from rollout.config.tasks import make_tasks
from rollout.tasks.leaks import find_leaks
from rollout.tasks.splits import SPLITS

# Data section and seed, by run.
DataOfRuns = Mapping[str, tuple[Mapping[str, Any], int]]


def report_inputs(
    receipts: Sequence[Path], runs: DataOfRuns, out: Path, *, by_hand: Sequence[str] = ()
) -> None:
    """Write a page on the acquired inputs of a suite.

    Args:
        receipts: files that `acquire` wrote.
        runs: all runs of the suite.
        by_hand: lines on missing inputs that the user has to put in place; if there are any, no page is
            written.

    Raises:
        AcquireError: the user has to put inputs in place.
    """
    if by_hand:
        missing = "; ".join(line.strip() for line in by_hand)
        raise AcquireError(
            "all other inputs are in place; put these in place by hand, and start the command again: "
            f"{missing}"
        )
    contents = [read_json(path) for path in receipts]
    page = render_page(
        "inputs.md.jinja",
        receipts=[{**content, "size": _size(content)} for content in contents],
        leaks=_leak_lines(runs),
    )
    write_text(out, page)


def _size(receipt: Mapping[str, Any]) -> int | str:
    """Return the bytes of an input, "" if they are unknown."""
    if receipt.get("bytes"):
        return int(receipt["bytes"])
    return sum(file["bytes"] for file in receipt["files"].values()) or ""


def _leak_lines(runs: DataOfRuns) -> list[str]:
    """Describe the tasks that are in two splits; runs with equal data are described once."""
    runs_by_data: dict[str, list[str]] = {}
    for run, (data, seed) in runs.items():
        if not data.get("generator"):
            key = json.dumps((data, seed), sort_keys=True, default=str)
            runs_by_data.setdefault(key, []).append(run)

    lines = []
    for key, names in runs_by_data.items():
        data, seed = json.loads(key)
        tasks = make_tasks(DataConfig.model_validate(data), seed)
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        for leak in find_leaks({split: tasks[split] for split in SPLITS}, threshold=None):
            if leak.matches and leak.kind != "tests":
                lines.append(
                    f"{names[0]}{others}: {len(leak.matches)} of {leak.tasks} {leak.split} tasks "
                    f"are in {leak.earlier}, by {leak.kind}"
                )
    return lines
