"""Slurm job of this process: its id, its machines, and requeueing after a stop signal."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mcore_mas.runtime.stop_signal import STOP_SIGNALS, Stopped

# Seconds that are left to a job when it is warned of its time limit. The profile asks for 300, and
# Slurm may be 60 early.
_WARNED_S = 360

# Longer than the time that Slurm leaves a job between a signal and its end.
_WAIT_FOR_END_S = 600.0

_SINFO_S = 20.0  # deadline of sinfo; a pipeline starts without its answer


def slurm_job_id() -> str | None:
    """Return the id of the job that this process is in; None outside Slurm."""
    return os.environ.get("SLURM_JOB_ID")


def job_machines() -> str:
    """Return the machines of this job as Slurm lists them; outside Slurm this machine's name."""
    return os.environ.get("SLURM_JOB_NODELIST") or socket.gethostname()


def largest_node_mb(partition: str | None = None) -> int | None:
    """Ask Slurm for the memory in MB of its largest machine; None if Slurm does not tell.

    Args:
        partition: count the machines of this partition only.
    """
    command = ["sinfo", "--noheader", "--Node", "--format", "%m"]
    if partition:
        command += ["--partition", partition]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SINFO_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(number) for number in re.findall(r"\d+", answer)]
    # Slurm says 1 MB of a machine whose memory its configuration does not give.
    return max((size for size in sizes if size > 1), default=None)


@contextmanager
def requeue_when_stopped(folder: Path, saved: str = "step_*") -> Iterator[None]:
    """Let Slurm queue this job again if the stage in the block is told to stop.

    Outside Slurm this does nothing.

    Slurm sends its signals to all processes of a job's steps, and Ray's processes end at SIGTERM,
    and with them the ranks that must save. The signals are therefore blocked for this process and,
    by inheritance, for its children, until the stage listens to them. Signals that arrive while
    models are loaded are not lost either.

    A job is queued again if it has saved something, or has most of its time left. Otherwise its
    time limit is too short, and it would be tried forever. A job that was cancelled is not queued
    again, nor is one that was stopped by Ctrl-C: it is an interactive job, which may have other work.

    Args:
        folder: folder in which the stage saves.
        saved: pattern of the files or folders that it saves there.

    Raises:
        Stopped: the stage was told to stop. The message says why the job is not queued again.
    """
    job = slurm_job_id()
    if job is None:
        yield
        return

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    saved_before = set(folder.glob(saved))
    try:
        yield
    except Stopped as stopped:
        if str(stopped).startswith("stopped by SIGINT"):
            raise
        if shutil.which("squeue") is None:  # in a container
            raise Stopped(
                f"{stopped}; not queued again, as Slurm's squeue and scontrol are not here"
            ) from stopped

        status = _job_status(job)
        if status.is_cancelled:
            raise
        has_saved = bool(set(folder.glob(saved)) - saved_before)
        if not has_saved and not status.has_most_time_left:
            raise Stopped(
                f"{stopped}; not queued again, as this job's time (runtime) did not suffice"
            ) from stopped

        problem = _requeue(job)
        if problem:
            raise Stopped(f"{stopped}; Slurm does not queue it again: {problem}") from stopped
        print(f"{stopped}; waiting for Slurm to end this job", flush=True)
        time.sleep(_WAIT_FOR_END_S)
        raise


@dataclass(frozen=True, slots=True)
class _JobStatus:
    """Status of a job.

    Attributes:
        is_cancelled: True if somebody cancels the job.
        has_most_time_left: True if more time is left than was used, and more than Slurm leaves after
            its warning signal (_WARNED_S).
    """

    is_cancelled: bool
    has_most_time_left: bool


def _job_status(job: str) -> _JobStatus:
    """Ask squeue for the status of a job; without an answer, assume that it has time left."""
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%M %L %T %r"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    if not answer.split():
        return _JobStatus(is_cancelled=False, has_most_time_left=True)

    used_time, time_left, *state_and_reason = answer.split()
    has_most_time_left = time_left == "UNLIMITED" or _seconds(time_left) > max(
        _seconds(used_time), _WARNED_S
    )
    return _JobStatus(
        # The job is not running, and Slurm gives no reason for its end.
        is_cancelled=state_and_reason == ["COMPLETING", "None"],
        has_most_time_left=has_most_time_left,
    )


def _requeue(job: str) -> str:
    """Ask Slurm to queue a job again; return its refusal, or ""."""
    command = ["scontrol", "requeue", job]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    # A job that is "completing" was already queued again by another process.
    if result.returncode == 0 or "completing" in result.stderr:
        return ""
    return result.stderr.strip() or f"scontrol ended with status {result.returncode}"


def _seconds(clock: str) -> int:
    """Convert a duration of squeue, such as 3:04 or 1-02:03:04, to seconds; other texts are 0."""
    numbers = [int(number) for number in re.findall(r"\d+", clock)]
    units = (1, 60, 3600, 86400)
    return sum(number * unit for number, unit in zip(reversed(numbers), units, strict=False))
