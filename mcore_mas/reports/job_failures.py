"""Causes of failures in the logs of jobs, which `mcore_mas.runtime.joblog` writes."""

from pathlib import Path

CAUSE_PREFIX = "error: "  # begins the last line of a failed job's log, with the cause
_MAX_CAUSE_BYTES = 20_000  # number of bytes that are read of the end of a log
_STOPPED = ("stopped by ", "ended by a second Ctrl-C")  # beginnings of causes that are no failures


def failure_cause(log: Path) -> str:
    """Return the cause of the failure that ended the newest start of a job, or "" if there is none.

    The log of a job that runs, has ended well, or was stopped has no such cause.
    """
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _MAX_CAUSE_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    last_line = text.rstrip().rpartition("\n")[2]
    if not last_line.startswith(CAUSE_PREFIX):
        return ""
    cause = last_line.removeprefix(CAUSE_PREFIX)
    return "" if cause.startswith(_STOPPED) else cause
