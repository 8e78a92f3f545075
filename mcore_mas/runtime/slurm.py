"""A job in Slurm: its number, its machines with one Ray over them, and its place in the queue when told to stop."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.stop_signal import STOP_SIGNALS, Stopped
from rollout.base.processes import free_port, start_group, stop_group

_CANCELLED = [
    "COMPLETING",
    "None",
]  # squeue of a job that somebody ends: it is not running, and Slurm has no reason
_WARNED_S = (
    360  # left to a job that hears of its limit: 300 by the profile, and Slurm may be 60 early
)
_PATIENCE_S = 600.0  # longer than what Slurm gives a job between a signal and its end
_JOIN_S = 300.0  # in which all machines of a job join its Ray


def slurm_job() -> str | None:
    """The number of the job that this process is in, None outside Slurm."""
    return os.environ.get("SLURM_JOB_ID")


def machines_here() -> str:
    """The machines of this job as Slurm lists them; outside Slurm this one's name."""
    return os.environ.get("SLURM_JOB_NODELIST") or socket.gethostname()


@contextmanager
def queued_again(folder: Path, saved: str = "step_*") -> Iterator[None]:
    """Have a stage that is told to stop saved and queued again, in a job of Slurm; elsewhere this does nothing.

    Slurm sends its signals to all processes of a job's steps, and Ray's own end at SIGTERM, with them the ranks that
    are to save. So both signals are blocked before any child is started, children inherit that, and the stage lets
    them in when it can listen: what comes while models are loaded is not lost.

    A job asks for its place in the queue if it has saved something, or has most of its time before it. Another one
    ends: else too short a limit would be tried for ever. One that is ended by `scancel` is left alone: Slurm would
    queue it again too, and whoever cancels wants its end; and so after Ctrl-C, in a job that has more than this in it.

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
        if str(stopped).startswith("stopped by SIGINT"):
            raise
        if shutil.which("squeue") is None:  # in a container
            raise Stopped(
                f"{stopped}; not queued again, as Slurm's squeue and scontrol are not here"
            ) from stopped
        asked = ["squeue", "--noheader", "--jobs", job, "--format", "%M %L %T %r"]
        said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
        used, left, *state = said.split() or ["", "UNLIMITED"]
        if state == _CANCELLED:
            raise
        ahead = left == "UNLIMITED" or max(_seconds(used), _WARNED_S) < _seconds(left)
        if not ahead and not set(folder.glob(saved)) - before:
            raise Stopped(
                f"{stopped}; not queued again, as this job's time (runtime) did not suffice"
            ) from stopped
        command = ["scontrol", "requeue", job]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if (
            done.returncode and "completing" not in done.stderr
        ):  # that one is queued again by somebody else
            raise Stopped(
                f"{stopped}; Slurm does not queue it again: {done.stderr.strip()}"
            ) from stopped
        print(f"{stopped}; waiting for Slurm to end this job", flush=True)
        time.sleep(_PATIENCE_S)
        raise


def _seconds(clock: str) -> int:
    """Of squeue's `3:04`, up to `1-02:03:04`."""
    numbers = reversed(re.findall(r"\d+", clock))
    return sum(
        int(number) * unit for number, unit in zip(numbers, (1, 60, 3600, 86400), strict=False)
    )


@contextmanager
def ray_over(nodes: int, cpus: int, log: Path) -> Iterator[str | None]:
    """A Ray over the machines of this job for the block; gives its address, None on one machine.

    It is started by `srun`, in the working folder of this process, which is on the first machine.

    Args:
        nodes: machines of the job.
        cpus: processors of each that Ray is told of; GPUs it counts itself.
        log: file for what Ray says.

    Raises:
        TrainingError: no token can be made, or the machines have not all joined within five minutes.
    """
    if nodes == 1:
        yield None
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    ray_command = [sys.executable, "-m", "ray.scripts.scripts"]
    import ray

    from mcore_mas.runtime.local_ray import make_private_token

    try:
        make_private_token()  # in the home folder, which the machines share
    except OSError as error:
        raise TrainingError(f"Ray's token cannot be made in ~/.ray: {error}") from error

    here = _address_here() or ray.util.get_node_ip_address()
    address = f"{here}:{free_port(here)}"
    start = [*ray_command, "start", "--block", "--disable-usage-stats", f"--num-cpus={cpus}"]
    head = [*start, "--head", f"--node-ip-address={here}", f"--port={address.rpartition(':')[2]}"]
    others = ["srun", "--overlap", "--relative=1", f"--nodes={nodes - 1}", f"--ntasks={nodes - 1}"]
    # this step's binding stands in the environment (SLURM_CPU_BIND), and another machine gave the job other processors
    others += [
        "--cpu-bind=none",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
        *start,
        f"--address={address}",
    ]
    with ExitStack() as stack:
        for command, joined in (([*head, "--include-dashboard=false"], 1), (others, nodes)):
            child = start_group(command, log=log)
            stack.callback(stop_group, child)
            _wait_for_machines(child, address, joined, log)
        yield address


def _address_here() -> str | None:
    """This machine's address in the network in which Slurm has the last machine of this job, None if it has none there.

    Ray's choice is the network of the default route, and loopback where there is no such route.
    """
    asked = ["scontrol", "--oneliner", "show", "node", machines_here()]
    with (
        suppress(OSError, IndexError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there,
    ):  # nothing is sent
        said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
        there.connect((re.findall(r" NodeAddr=(\S+)", said)[-1], 9))
        here: str = there.getsockname()[0]
        return None if here.startswith("127.") else here
    return None


def _wait_for_machines(child: subprocess.Popen[bytes], address: str, nodes: int, log: Path) -> None:
    import ray

    deadline, joined = time.monotonic() + _JOIN_S, 0
    while joined < nodes:
        if child.poll() is not None or time.monotonic() > deadline:
            why = (
                f" in {_JOIN_S:.0f} s"
                if child.returncode is None
                else ", and what starts them has ended"
            )
            raise TrainingError(
                f"{joined} of {nodes} machines joined Ray at {address}{why}; see {log}"
            )
        try:
            ray.init(address=address, log_to_driver=False)
            joined = sum(node["Alive"] for node in ray.nodes())
        except ConnectionError:  # the head is not up yet
            joined = 0
        ray.shutdown()
        time.sleep(1)
