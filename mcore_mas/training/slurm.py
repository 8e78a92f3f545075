"""A job of Slurm: signals that reach the training alone, and its place in the queue again once it has saved."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_mas.training.stopping import STOP_SIGNALS, Stopped

_PATIENCE_S = 600.0  # longer than what Slurm gives a job between a signal and its end


@contextmanager
def queued_again(checkpoints: Path) -> Iterator[None]:
    """Have a training that is told to stop saved and queued again, in a job of Slurm; elsewhere this does nothing.

    Slurm sends its signals to all processes of a job's steps, and Ray's own end at SIGTERM, with them the ranks that
    are to save. So both signals are blocked before any child is started, children inherit that, and the training lets
    them in when it can listen: what comes while models are loaded is not lost.

    A job that has taken a step asks for its place in the queue. One that has not waits for what Slurm has in mind,
    which queues a preempted job itself and ends one whose time is up: else too short a limit would be tried for ever.

    Args:
        checkpoints: folder of the run's.

    Raises:
        Stopped: Slurm does not queue this job again.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    before = _steps(checkpoints)
    try:
        yield
    except Stopped as stopped:
        if _steps(checkpoints) - before:
            command = ["scontrol", "requeue", job]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode and "completing" not in done.stderr:  # that one is queued again by somebody else
                raise Stopped(f"{stopped}; Slurm does not queue it again: {done.stderr.strip()}") from stopped
        print(f"{stopped}; waiting for Slurm to end this job", flush=True)
        time.sleep(_PATIENCE_S)
        raise


def _steps(checkpoints: Path) -> set[str]:
    return {folder.name for folder in checkpoints.glob("step_*")}
