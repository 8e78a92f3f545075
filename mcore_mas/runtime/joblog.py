"""A job: its log, with the cause of a failure as the last line, and the signals that end it early.

The log has all that the job and its children print. Signals are heard from the first line of a process on.
"""

import asyncio
import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

from mcore_mas import PACKAGES
from rollout.base.processes import die_with_parent, say
from rollout.base.task_group import cancel_tasks
from rollout.base.text import show_logs, shown_line, shown_text

CAUSE = "error: "
_AGAIN = "----- started again -----\n"
_terminal: TextIO | None = None


@contextmanager
def logged(path: Path | str) -> Iterator[None]:
    """Send file descriptors 1 and 2 to the file `path`, also those of child processes, until the process ends.

    An exception ends the process with status 1 after its traceback, if it is an error, and one line, `error: <cause>`,
    are in the log, and so do SIGTERM, SIGINT and SIGUSR1 where nobody else listens to them.
    When the process that started this one is killed, this one ends too.
    """
    global _terminal
    die_with_parent()
    show_logs()
    stop_at_start(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = path.with_name(
        f".{path.name}.kept"
    )  # another name of the log, which Snakemake removes before each start
    with suppress(OSError):  # of a file system without such links
        os.link(kept, path)
    if os.isatty(2):
        _terminal = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace", buffering=1)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if os.fstat(log).st_size:
        os.write(log, _AGAIN.encode())
    with suppress(OSError):
        kept.unlink(missing_ok=True)  # in a copy of the folder it is another file
        os.link(path, kept)
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(log, descriptor)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    os.close(log)
    try:
        yield
    except KeyboardInterrupt:
        print(
            f"{CAUSE}ended by a second Ctrl-C; the same command goes on from what is saved",
            file=sys.stderr,
        )
        sys.exit(130)
    except Exception as error:
        trace = "" if isinstance(error, Stopped) else shown_text(traceback.format_exc())
        print(f"{trace}{CAUSE}{cause(error)}", file=sys.stderr)
        sys.exit(1)


def terminal() -> TextIO | None:
    """The terminal that a person watches, also when this process writes to a log; None when there is none."""
    if _terminal is not None:
        return _terminal
    return sys.stderr if sys.stderr.isatty() else None


def cause(error: BaseException) -> str:
    """One line that says what went wrong, in a process of Ray's too; the type only of errors that are others'."""
    while type(error).__module__ == "ray.exceptions" and isinstance(
        there := getattr(error, "cause", None), Exception
    ):
        error = there
    message = shown_line(" ".join(str(error).split()))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        message += "; make room, and run it again"
    own = type(error).__module__.partition(".")[0] in PACKAGES
    return message if own and message else f"{type(error).__name__}: {message}".rstrip(": ")


def success_message(results: Path | str, suite: str) -> str:
    """What to look at after a pipeline run that ended well."""
    pages = {
        "Report": Path(results) / "reports" / f"{suite}.html",
        "Table": Path(results) / "tables" / f"{suite}.md",
    }
    made = "   ".join(
        ["Done.", *(f"{name}: {path}" for name, path in pages.items() if path.is_file())]
    )
    usual = str(results) == "results"
    studio, ui = ("", "") if usual else (f" {results}", f" --store sqlite:///{results}/mlflow.db")
    return f"\n{made}\n`mcore-mas studio{studio}` opens curves and conversations, `mcore-mas ui{ui}` MLflow."


def failure_message(
    logs: Iterable[str], since: float, workflow_logs: Iterable[Path | str], lines: int = 15
) -> str:
    """What failed: one line for each cause, then the logs of the jobs it ended.

    A job that died without a word (killed, out of memory) is followed by what Slurm says of it, or else by the last
    `lines` lines of its log, unless Ctrl-C or SIGTERM has stopped the pipeline.

    Args:
        logs: of jobs that have not finished; those failed which wrote anything, or of which Slurm says so.
        since: seconds since the epoch at which the pipeline started.
        workflow_logs: Snakemake's own, for jobs that failed without writing.
    """
    said_by = [Path(log) for log in workflow_logs]
    events = [
        event for log in said_by for event in re.split(r"^ *\[.*\]", _text(log), flags=re.MULTILINE)
    ]
    stopped = any("Terminating processes on user request" in event for event in events)
    found: list[tuple[str, str, str | None]] = []
    for log in dict.fromkeys(logs):
        written = Path(log).is_file() and Path(log).stat().st_mtime >= since
        told = next(
            (said for event in reversed(events) if log in event and (said := _slurm_says(event))),
            None,
        )
        if written or told:
            found.append(
                (log, _why(Path(log), lines, told, written=written, stopped=stopped), told)
            )
    explained = {
        told for _, why, told in found if told != why
    }  # of a group, the log of one stage says why
    by_cause: dict[str, list[str]] = {}
    for log, why, told in found:
        if told != why or told not in explained:
            by_cause.setdefault(why, []).append(log)
    if not by_cause:
        return f"\n{CAUSE}no job wrote a log; see {', '.join(map(str, said_by))}"
    return "\n".join(f"\n{why}\n  logs: {', '.join(own)}" for why, own in by_cause.items())


def _slurm_says(event: str) -> str | None:
    """Why Slurm has not taken a job, or ended it, by what Snakemake's log says of the job's failure."""
    why = r"SLURM sbatch failed\. The error message was '(.*?)'\.$|submission failed with exception: (.*?)For further"
    if refused := re.search(why, event, re.MULTILINE | re.DOTALL):
        return f"{CAUSE}Slurm does not take the job: {' '.join((refused[1] or refused[2]).split())}"
    ended = re.search(r"SLURM-job '(\w+)' failed, SLURM status is: '(\w+)'", event)
    if ended is None:
        return None
    number, state = ended.groups()
    own = re.search(rf"[^\s,]*/{number}\.log", event)
    seen = bool(own and Path(own[0]).is_file())
    if own and not seen and state != "CANCELLED":  # as a job can be that never ran
        return f"{CAUSE}Slurm job {number}: {state}, and its log is not here; do all machines share this folder?"
    killed = (
        re.search(r"^slurmstepd[^:]*: error: (.*)", _text(Path(own[0])), re.MULTILINE)
        if own
        else None
    )
    why = f"{state}, {killed[1]}" if killed else state
    return f"{CAUSE}Slurm job {number}: {why}{f'; see {own[0]}' if own and seen else ''}"


def tell_of_failed_jobs() -> None:
    """Have Snakemake (9.27.1) and its executor for Slurm (2.8.0) tell of jobs that fail where they would be silent.

    Snakemake leaves out why a group of jobs failed. The executor waits for ever for a group that it cannot submit, and
    for a job of which sacct says `CANCELLED by 1000`.
    """
    executor: Any = sys.modules.get("snakemake_executor_plugin_slurm")
    ask: Any = getattr(executor, "query_job_status", None)

    async def states_of(command: str, logger: Any) -> Any:
        states, seconds = await ask(command, logger)
        return states and {job: state.partition(" ")[0] for job, state in states.items()}, seconds

    def log_error(group: Any, msg: str | None = None, **how: Any) -> None:
        for job in group.jobs:
            job.log_error(msg, **how)

    if ask is not None:
        executor.query_job_status = states_of
        group_job: Any = sys.modules["snakemake.jobs"].GroupJob
        group_job.log_error = log_error
        group_job.rule = property(lambda group: next(iter(group.jobs)).rule)


def _why(log: Path, lines: int, told: str | None, *, written: bool, stopped: bool) -> str:
    tail = _text(log).rpartition(_AGAIN)[2].rstrip().splitlines()[-lines:] if written else []
    causes = [line for line in tail if line.startswith(CAUSE)]
    if causes:
        return causes[-1]
    if told:
        return told
    if stopped:
        return f"{CAUSE}the pipeline was stopped; the same command goes on from what is saved"
    last = "\n".join(f"  | {shown_line(line)}" for line in tail) or "  | (empty)"
    return f"{CAUSE}the job ended without saying why (killed, or out of memory?); the end of its log:\n{last}"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


_T = TypeVar("_T")

# SIGURG can be sent to all of a job: others ignore it
STOP_SIGNALS = (signal.SIGTERM, signal.SIGURG, signal.SIGUSR1, signal.SIGINT)


class TrainingError(RuntimeError):
    """Training cannot go on: one line that says what, where, what to do."""


class Stopped(Exception):
    """A process ended early because it was told to, with all that was learned saved."""


def stop_at_start(*numbers: signal.Signals) -> None:
    """Have these signals, by default all of `STOP_SIGNALS`, raise `Stopped` until a `StopSignal` listens to them.

    Only the main thread hears signals; called from another one this does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        for number in numbers or STOP_SIGNALS:
            signal.signal(number, _stop)


_early: list[int] = []  # signals that came before anybody listened


def _stop(number: int, _: object) -> None:
    _early.append(number)  # what is raised in a finaliser goes no further
    raise Stopped(
        f"stopped by {signal.Signals(number).name}; the same command goes on from what is saved"
    )


class Abandoned(Exception):
    """What was under way is done again by the next start: the run was told to stop."""


class StopSignal:
    """One of `STOP_SIGNALS`: what can be done again is abandoned, all else is finished first.

    A second Ctrl-C ends the process where it stands.
    """

    def __init__(self, *, signals: bool = True) -> None:
        """Without `signals` only `tell` stops the run, and the process keeps its handlers."""
        self._told = asyncio.Event()
        self._signals = signals
        self._loop: asyncio.AbstractEventLoop | None = None  # in which it listens
        self.by = "its caller"  # who told it

    def tell(self, number: int | None = None) -> None:
        """Tell the run to stop, by the signal of this number or without one."""
        if number == signal.SIGINT and self.came:
            raise KeyboardInterrupt
        if number:
            self.by = signal.Signals(number).name
            told = f"{self.by}: stopping, once what was learned is saved; another Ctrl-C does not wait for that"
            for stream in {sys.stderr, terminal()} - {None} if not self.came else ():
                say(told, stream)
        self._told.set()

    def interrupt(self) -> None:
        """Tell the run to stop, from another thread than that of its event loop."""
        if self._loop is None:
            self.tell()
            return
        with suppress(RuntimeError):  # the loop is closed: it has ended
            self._loop.call_soon_threadsafe(self.tell)

    def listen(self) -> None:
        """Take all signals in the running event loop, also one that was held back until now."""
        self._loop = asyncio.get_running_loop()
        if not self._signals:
            return
        for number in STOP_SIGNALS:
            self._loop.add_signal_handler(number, self.tell, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if _early:
            self.tell(_early.pop())

    @property
    def came(self) -> bool:
        """Whether the run was told to stop."""
        return self._told.is_set()

    async def unless(self, work: Coroutine[Any, Any, _T], then: str = "") -> _T:
        """What `work` comes to.

        Raises:
            Abandoned: the run was told to stop first, and `work` has been cancelled.
            Stopped: so it was, and the process is to end: by whom it was stopped, and `then`.
        """
        working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(self._told.wait())
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Stopped(f"stopped by {self.by}{then}") if then else Abandoned
            return working.result()
        finally:
            await cancel_tasks([working, waiting])
