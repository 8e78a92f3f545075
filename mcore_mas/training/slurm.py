"""A job of Slurm: stop signals for the training alone, its place in the queue again, a Ray over its machines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mcore_mas.rollout.base.processes import free_port, start_group, stop_group
from mcore_mas.training.stopping import STOP_SIGNALS, Stopped, TrainingError

_PATIENCE_S = 600.0  # longer than what Slurm gives a job between a signal and its end
_JOIN_S = 300.0  # in which all machines of a job join its Ray


def slurm_job() -> str | None:
    """The number of the job that this process is in, None outside Slurm."""
    return os.environ.get("SLURM_JOB_ID")


@contextmanager
def queued_again(folder: Path, saved: str = "step_*") -> Iterator[None]:
    """Have a stage that is told to stop saved and queued again, in a job of Slurm; elsewhere this does nothing.

    Slurm sends its signals to all processes of a job's steps, and Ray's own end at SIGTERM, with them the ranks that
    are to save. So both signals are blocked before any child is started, children inherit that, and the stage lets
    them in when it can listen: what comes while models are loaded is not lost.

    A job that has saved something asks for its place in the queue. One that has not waits for what Slurm has in mind,
    which queues a preempted job itself and ends one whose time is up: else too short a limit would be tried for ever.

    Args:
        folder: what has the stage's checkpoints, or its trajectories.
        saved: what one of them is called.

    Raises:
        Stopped: Slurm does not queue this job again.
    """
    job = slurm_job()
    if job is None:
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    before = set(folder.glob(saved))
    try:
        yield
    except Stopped as stopped:
        if set(folder.glob(saved)) - before:
            command = ["scontrol", "requeue", job]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode and "completing" not in done.stderr:  # that one is queued again by somebody else
                raise Stopped(f"{stopped}; Slurm does not queue it again: {done.stderr.strip()}") from stopped
        print(f"{stopped}; waiting for Slurm to end this job", flush=True)
        time.sleep(_PATIENCE_S)
        raise


@contextmanager
def ray_over(nodes: int, cpus: int, log: Path) -> Iterator[str | None]:
    """A Ray over the machines of this job for the block; gives its address, None on one machine.

    It is started by `srun`, in the working folder of this process, which is on the first machine.

    Args:
        nodes: machines of the job.
        cpus: processors of each that Ray is told of; GPUs it counts itself.
        log: file for what Ray says.

    Raises:
        TrainingError: the machines have not all joined within five minutes.
    """
    if nodes == 1:
        yield None
        return
    os.environ["RAY_AUTH_MODE"] = "token"  # the head makes one in the home folder, which the machines share
    import ray

    here = ray.util.get_node_ip_address()
    address = f"{here}:{free_port(here)}"
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    start += [f"--num-cpus={cpus}"]
    head = [*start, "--head", f"--node-ip-address={here}", f"--port={address.rpartition(':')[2]}"]
    others = ["srun", "--overlap", "--relative=1", f"--nodes={nodes - 1}", f"--ntasks={nodes - 1}"]
    others += ["--ntasks-per-node=1", f"--cpus-per-task={cpus}", *start, f"--address={address}"]
    with ExitStack() as stack:
        for command, joined in (([*head, "--include-dashboard=false"], 1), (others, nodes)):
            stack.callback(stop_group, start_group(command, log=log))
            _wait_for_machines(address, joined, log)
        yield address


def _wait_for_machines(address: str, nodes: int, log: Path) -> None:
    import ray

    deadline, joined = time.monotonic() + _JOIN_S, 0
    while joined < nodes:
        if time.monotonic() > deadline:
            raise TrainingError(f"{joined} of {nodes} machines joined Ray at {address} in {_JOIN_S:.0f} s; see {log}")
        try:
            ray.init(address=address, log_to_driver=False)
            joined = sum(node["Alive"] for node in ray.nodes())
        except ConnectionError:  # the head is not up yet
            joined = 0
        ray.shutdown()
        time.sleep(1)
