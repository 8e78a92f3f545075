"""CPU time and memory of processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

PEAK = ("VmHWM",)
UNMAPPED = ("RssAnon", "RssShmem")  # resident memory without the pages of mapped files


def memory_bytes(fields: tuple[str, ...] = PEAK) -> int:
    """Return the sum of fields of this process's /proc/self/status, in bytes.

    Unlike getrusage, VmHWM does not include the peak of the process that started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    sizes = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(sizes[field].split()[0]) for field in fields) << 10


def cpu_time(function: Callable[[], object], repeats: int = 1) -> float:
    """Return the smallest CPU time of several calls in this process, in seconds."""
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        function()
        best = min(best, time.process_time() - began)
    return best


def alternate_cpu_times(
    functions: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, float]:
    """Print and return the smallest CPU time of each function, in seconds, by name.

    The functions take turns, so that other load on the machine affects all of them.
    """
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(repeats):
        for name, function in functions.items():
            best[name] = min(best[name], cpu_time(function))
    print(", ".join(f"{name} {seconds:.2f} s" for name, seconds in best.items()))
    return best
