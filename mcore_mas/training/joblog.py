"""Log of one job: all that it and its children print, with the cause of a failure as the last line."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from mcore_mas.rollout.base.processes import die_with_parent
from mcore_mas.rollout.base.text import shown_line
from mcore_mas.training.stopping import stop_at_start

CAUSE = "error: "
_AGAIN = "----- started again -----\n"
_terminal: TextIO | None = None


@contextmanager
def logged(path: Path | str) -> Iterator[None]:
    """Send file descriptors 1 and 2 to the file `path`, also those of child processes, until the process ends.

    An exception ends the process with status 1 after its traceback and one line, `error: <cause>`, are in the log, and
    so do SIGTERM, SIGINT and SIGUSR1 where nobody else listens to them.
    When the process that started this one is killed, this one ends too.
    """
    global _terminal
    die_with_parent()
    stop_at_start(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.isatty(2):
        _terminal = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace", buffering=1)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if os.fstat(log).st_size:
        os.write(log, _AGAIN.encode())
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(log, descriptor)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    os.close(log)
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        print(CAUSE + cause(error), file=sys.stderr)
        sys.exit(1)


def terminal() -> TextIO | None:
    """The terminal that a person watches, also when this process writes to a log; None when there is none."""
    if _terminal is not None:
        return _terminal
    return sys.stderr if sys.stderr.isatty() else None


def cause(error: BaseException) -> str:
    """One line that says what went wrong; the type only where the message was not written by this project."""
    message = shown_line(" ".join(str(error).split()))
    own = type(error).__module__.partition(".")[0] == "mcore_mas"
    return message if own and message else f"{type(error).__name__}: {message}".rstrip(": ")


def success_message(results: Path | str, suite: str) -> str:
    """What to look at after a pipeline run that ended well."""
    pages = {"Report": Path(results) / "reports" / f"{suite}.html", "Table": Path(results) / "tables" / f"{suite}.md"}
    made = [f"{name}: {path}" for name, path in pages.items() if path.is_file()]
    store = "" if str(results) == "results" else f" STORE=sqlite:///{results}/mlflow.db"
    return f"\nDone. {'   '.join(made)}\n`make ui{store}` opens MLflow on every curve of every agent."


def failure_message(logs: Iterable[str], since: float, workflow_logs: Iterable[Path | str], lines: int = 15) -> str:
    """What failed: one line for each cause, then the logs of the jobs it ended.

    A job that died without a word (killed, out of memory) is followed by what Slurm says of it, or else by the last
    `lines` lines of its log.

    Args:
        logs: of jobs that have not finished; those failed which wrote anything, or of which Slurm says so.
        since: seconds since the epoch at which the pipeline started.
        workflow_logs: Snakemake's own, for jobs that failed without writing.
    """
    said_by = [Path(log) for log in workflow_logs]
    events = [event for log in said_by for event in re.split(r"^ *\[.*\]", _text(log), flags=re.MULTILINE)]
    by_cause: dict[str, list[str]] = {}
    for log in dict.fromkeys(logs):
        written = Path(log).is_file() and Path(log).stat().st_mtime >= since
        told = next((said for event in reversed(events) if log in event and (said := _slurm_says(event))), None)
        if written or told:
            by_cause.setdefault(_why(Path(log), lines, told, written=written), []).append(log)
    if not by_cause:
        return f"\n{CAUSE}no job wrote a log; see {', '.join(map(str, said_by))}"
    return "\n".join(f"\n{why}\n  logs: {', '.join(own)}" for why, own in by_cause.items())


def _slurm_says(event: str) -> str | None:
    """Why Slurm has not taken a job, or ended it, by what Snakemake's log says of the job's failure."""
    if refused := re.search(r"SLURM sbatch failed\. The error message was '(.*?)'\.$", event, re.MULTILINE | re.DOTALL):
        return f"{CAUSE}Slurm does not take the job: {' '.join(refused[1].split())}"
    ended = re.search(r"SLURM-job '(\w+)' failed, SLURM status is: '(\w+)'", event)
    if ended is None:
        return None
    own = re.search(rf"[^\s,]*/{ended[1]}\.log", event)
    if own and not Path(own[0]).is_file():
        return f"{CAUSE}Slurm job {ended[1]}: {ended[2]}, and its log is not here; do all machines share this folder?"
    killed = re.search(r"^slurmstepd[^:]*: error: (.*)", _text(Path(own[0])), re.MULTILINE) if own else None
    why = f"{ended[2]}, {killed[1]}" if killed else ended[2]
    return f"{CAUSE}Slurm job {ended[1]}: {why}{f'; see {own[0]}' if own else ''}"


def _why(log: Path, lines: int, told: str | None, *, written: bool) -> str:
    tail = _text(log).rpartition(_AGAIN)[2].rstrip().splitlines()[-lines:] if written else []
    causes = [line for line in tail if line.startswith(CAUSE)]
    if causes:
        return causes[-1]
    if told:
        return told
    last = "\n".join(f"  | {line}" for line in tail) or "  | (empty)"
    return f"{CAUSE}the job ended without saying why (killed, or out of memory?); the end of its log:\n{last}"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
