"""The log of a job: everything that it and its children print, and the cause of a failure as its last line."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mcore_mas.reports.job_failures import CAUSE_PREFIX
from mcore_mas.runtime.error_description import describe_error
from mcore_mas.runtime.slurm import slurm_job_id
from mcore_mas.runtime.stop_signal import (
    Stopped,
    ignore_stop_signals,
    raise_on_stop_signals,
    set_ending,
)
from mcore_mas.runtime.user_terminal import keep_terminal
from rollout.base.ownership import FolderError, is_owned
from rollout.base.processes import die_with_parent
from rollout.base.text import escape_logs, escape_text

STARTED_AGAIN = "----- started again -----\n"  # separates the starts of a job in its log


@contextmanager
def logged(path: Path | str) -> Iterator[None]:
    """Redirect stdout and stderr, also those of child processes, to the file `path` until the process ends.

    An exception in the block ends the process with status 1, and a second Ctrl-C with status 130. The
    last line of the log is then `error: …` with the cause, after the traceback of an error. `Stopped`
    has no traceback: SIGTERM, SIGINT and SIGUSR1 raise it where nothing else handles them. When the
    process that started this one is killed, this one ends too.
    """
    die_with_parent()
    escape_logs()
    raise_on_stop_signals(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    # In a Slurm job, stderr is the job's log file, which need not repeat messages of this log.
    keep_terminal(files=slurm_job_id() is None)
    _redirect_output(Path(path))
    set_ending(CAUSE_PREFIX, status=1)
    try:
        yield
    except Stopped as stop:
        ignore_stop_signals()
        print(f"{CAUSE_PREFIX}{describe_error(stop)}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        print(escape_text(traceback.format_exc()), end="", file=sys.stderr)
        print(f"{CAUSE_PREFIX}{describe_error(error)}", file=sys.stderr)
        sys.exit(1)
    ignore_stop_signals()  # the work is done


@contextmanager
def logged_cause(run: Path) -> Iterator[None]:
    """Append the cause of an error in this block to a run's log, for trainings outside of the pipeline.

    Their output stays on the terminal. If the log exists, a line in it separates this start from the
    earlier ones, unless another process owns the run and may be writing this log. A `FolderError`, such
    as of a run that another process owns, is no failure of the run, so its cause is not written.

    Args:
        run: folder of the run.
    """
    path = run / "logs" / "train.log"
    with suppress(OSError):
        if path.is_file() and path.stat().st_size and not is_owned(run / "train"):
            _append(path, STARTED_AGAIN)
    try:
        yield
    except FolderError:
        raise
    except Exception as error:
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            _append(path, f"{CAUSE_PREFIX}{describe_error(error)}\n")
        raise


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as log:
        log.write(text)


def _redirect_output(path: Path) -> None:
    """Redirect file descriptors 1 and 2 to the end of a log, after the output of the job's earlier starts.

    Snakemake removes the log of a job before it starts the job again. The log therefore has a second
    name, a hard link, from which it is restored.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    second_name = path.with_name(f".{path.name}.kept")
    # This fails if the log still exists or has no second name, or if there are no hard links here.
    with suppress(OSError):
        os.link(second_name, path)

    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if os.fstat(log).st_size:
        os.write(log, STARTED_AGAIN.encode())
    with suppress(OSError):
        # In a copy of the folder, the second name is another file.
        second_name.unlink(missing_ok=True)
        os.link(path, second_name)

    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(log, descriptor)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    os.close(log)
