"""Who waits for whom in a file of trajectories: who works for how many of them, at each moment."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_mas.rollout.records.files import RecordError

WAITING = "done, waiting for the slowest"
_MOMENTS = 60
_TIMES = ("started_s", "took_s")
_COLUMNS = [
    "task_id",
    *(
        f"{kind}.list.element.{name}"
        for kind, who in (("turns", "agent"), ("tools", "tool"))
        for name in (who, *_TIMES)
    ),
]


def who_works(path: Path) -> dict[str, Any]:
    """For how many trajectories each agent and tool is at work, and how many are done while others are not.

    Returns:
        {} where no times are recorded; else `seconds` of all, `lines` (by who: a list of [second, number]), and of the
        `slowest` trajectory its index, its `task` and by how many seconds it was `behind` half of them.

    Raises:
        RecordError: it is no file of trajectories.
    """
    try:
        rows = pq.ParquetFile(path, memory_map=True).read(columns=_COLUMNS).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{path}: not a readable parquet file ({' '.join(str(error).split())})") from error
    spans: list[tuple[str, float, float]] = []
    ends: dict[int, float] = {}
    for index, row in enumerate(rows):
        calls = [(turn["agent"], turn) for turn in row["turns"]] + [(f"tool {t['tool']}", t) for t in row["tools"]]
        own = [(who, call["started_s"], call["started_s"] + call["took_s"]) for who, call in calls if call["started_s"]]
        spans += own
        ends |= {index: max(end for *_, end in own)} if own else {}
    if not spans:
        return {}
    began, ended = min(start for _, start, _ in spans), max(ends.values())
    spans += [(WAITING, end, ended) for end in ends.values()]
    width = max((ended - began) / _MOMENTS, 1e-6)
    lines: dict[str, list[float]] = defaultdict(lambda: [0.0] * _MOMENTS)
    for who, start, end in spans:
        first, last = ((at - began) / width for at in (start, end))
        for moment in range(int(first), min(_MOMENTS - 1, int(last)) + 1):
            lines[who][moment] += max(0.0, min(last, moment + 1) - max(first, moment))
    slowest = max(ends, key=ends.__getitem__)
    return {
        "seconds": ended - began,
        "lines": {who: [[(n + 0.5) * width, number] for n, number in enumerate(own)] for who, own in lines.items()},
        "slowest": slowest,
        "task": rows[slowest]["task_id"],
        "behind": ended - median(ends.values()),
    }
