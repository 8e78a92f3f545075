"""The Ray that a run computes on, and the job of Slurm that it is in.

Ray: its own on this machine, or one of several nodes that runs already. Slurm: stop signals for the training alone, its
place in the queue again, a Ray over its machines.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_mas.rollout.base.processes import ProcessLost, free_port, start_group, stop_group
from mcore_mas.training.joblog import STOP_SIGNALS, Stopped, TrainingError
from mcore_mas.training.ray_cleanup import reaped, sweep, tidy

# glibc's tunables (malloc(3), mallopt(3)), read when a process starts. By default it maps every large tensor and unmaps
# it when it is freed, so that a third of an update's time on a CPU is page faults. With these, a process keeps what it
# frees, in one arena (others end at 64 MiB). The price is resident memory; benchmarks/page_reuse.py prints both.
KEEP_PAGES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),  # bytes; larger tensors are mapped still
    "MALLOC_TRIM_THRESHOLD_": str(32 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    # libgomp's threads wait for each other by spinning, by default for some milliseconds: an update of two threads on a
    # busy machine took seven times the CPU time of one. After so many turns, some 20 us, they sleep.
    "GOMP_SPINCOUNT": "10000",
}
_MOST_CORES = 8
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container, by the kernel's cgroup v2
_LOOK_S = 1.0  # between two looks at which nodes are alive
_DOOR_S = 10.0  # that the head's machine may take to accept a connection
_ANSWER_S = 120.0  # that a node may take to start a process and look at a file


class ClusterError(RuntimeError):
    """A Ray that runs already cannot be used: one line that says what, where, what to do."""


class NodeLost(ProcessLost):
    """Nodes that a run's trainers were on are gone."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Node:
    """A machine of a Ray cluster."""

    address: str
    id: str  # Ray's
    gpus: int
    cpus: int
    pool: str | None = None  # its label of this name


def cores_here() -> int:
    """Cores that this process may use: OMP_NUM_THREADS, as Snakemake sets it, or what its container grants, up to 8.

    Products of models that CPUs can train are too small to be cut more often.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given):
        return int(given)
    quota, period = _QUOTA.read_text().split() if _QUOTA.is_file() else ("max", "")
    granted = _MOST_CORES if quota == "max" else int(quota) // int(period)  # microseconds of each period
    return max(1, min(_MOST_CORES, granted, len(os.sched_getaffinity(0))))


@contextmanager
def running_ray(
    cpus: int, object_store_mb: int, *, gpus: int = 0, keep_pages: bool = False, logs: Path | None = None
) -> Iterator[None]:
    """A Ray of this run's own, without a dashboard, for the block; it ends with this process.

    Args:
        logs: folder that becomes what its processes have logged, unless all goes well.
        keep_pages: its processes keep the memory that they free, unless this process's environment says otherwise.
    """
    import ray

    if keep_pages:
        for name, value in KEEP_PAGES.items():
            os.environ.setdefault(name, value)

    # read by Ray when it starts: a run neither joins another's cluster nor reports its use
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.pop("RAY_AUTH_MODE", None)  # then Ray asks for its token, which `disabled` would leave out
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (by default Ray's workers give way to all else)
    _private_token()
    context = _started(cpus, gpus, object_store_mb)
    session = Path(context.address_info["session_dir"])
    session.chmod(0o700)  # Ray lets everybody in
    with reaped(session, logs):
        try:
            yield
        finally:
            ray.shutdown()


def _private_token() -> None:
    """Make Ray's token, which lets whoever reads it run code as this user, if there is none; it is this user's alone.

    Ray would make it readable by all.
    """
    token = Path.home() / ".ray" / "auth_token"
    token.parent.mkdir(mode=0o700, exist_ok=True)
    if not token.is_file():
        made = token.with_name(f".auth_token.{os.getpid()}")
        made.touch(0o600)
        made.write_text(secrets.token_hex(32))
        with suppress(FileExistsError):  # another process was first
            os.link(made, token)
        made.unlink()
    if token.stat().st_uid == os.getuid():
        token.chmod(0o600)


def _started(cpus: int, gpus: int, object_store_mb: int) -> Any:
    import ray
    from ray._common.utils import get_default_ray_temp_dir

    def sessions() -> set[Path]:
        """Of this process: Ray ends their names with its number."""
        return set(Path(get_default_ray_temp_dir()).resolve().glob(f"session_*_{os.getpid()}"))

    before = sessions()
    for last in (False, False, True):
        try:
            return ray.init(
                address="local",  # else a Ray that somebody started on this machine would be joined
                num_cpus=cpus,
                num_gpus=gpus,
                include_dashboard=False,
                object_store_memory=object_store_mb << 20,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
        except Exception as error:  # Ray has no type for a machine too busy to start it within its fixed 30 s
            ray.shutdown()
            for session in sessions() - before:
                sweep(session)
                tidy(session, None, keep=False)
            if last or "timed out during startup" not in str(error):
                raise
    raise AssertionError


@contextmanager
def joined_ray(address: str, file: Path) -> Iterator[list[Node]]:
    """The Ray at `address` for the block, and its nodes; what this process started there ends with the block.

    Its processes work in this process's working folder, so that a path means the same everywhere.

    Args:
        address: `host:port` of its head, "auto" for the one that this machine is a node of, or `ray://host:port` of
            the server of Ray's clients.
        file: one that this process has written; every node must see it.

    Raises:
        ClusterError: no Ray answers there, or a node does not see the files.
    """
    import ray
    from ray._private.services import canonicalize_bootstrap_address

    client = address.startswith("ray://")
    hook = {"worker_process_setup_hook": _in_folder(str(Path.cwd()))}
    joining: dict[str, Any] = {"runtime_env": hook, "logging_level": logging.ERROR, "log_to_driver": False}
    try:
        place = address if client else canonicalize_bootstrap_address(address) or ""
        host, _, port = place.removeprefix("ray://").rpartition(":")
        socket.create_connection((host, int(port)), timeout=_DOOR_S).close()  # `ray.init` would try for minutes
        ray.init(address=place, namespace="mcore-mas", **({} if client else joining))
    except Exception as error:  # Ray raises what its parts raise
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise ClusterError(
            f"cluster.address: {address}: this machine cannot join a Ray there ({why}); start one with `ray start` on "
            "every node, this one too, or use cluster.address: local"
        ) from error
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        said = "asks for no token, so whoever reaches it runs programs as you; start it as docs/nodes.md says"
        print(f"warning: cluster.address: the Ray at {address} {said}", file=sys.stderr, flush=True)
    try:
        nodes = alive_nodes()
        _check_files(nodes, file.resolve())
        yield nodes
    finally:
        ray.shutdown()


def _in_folder(folder: str) -> Any:
    def enter() -> None:  # sent to every process, which has none of our modules yet
        import contextlib
        import os

        with contextlib.suppress(OSError):  # told of in one line by `_check_files`
            os.chdir(folder)

    return enter


def alive_nodes() -> list[Node]:
    """The nodes of the Ray that this process has joined, by address."""
    import ray

    return sorted(
        Node(
            address=str(node["NodeManagerAddress"]),
            id=str(node["NodeID"]),
            gpus=int(node["Resources"].get("GPU", 0)),
            cpus=int(node["Resources"].get("CPU", 0)),
            pool=node["Labels"].get("pool"),
        )
        for node in ray.nodes()
        if node["Alive"]
    )


def node_here() -> str:
    """Ray's id of the node that this process is on."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _check_files(nodes: Collection[Node], file: Path) -> None:
    """Have every node read `file`.

    Raises:
        ClusterError: one does not see it as it is here, or does not answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(_text)
    seen = {
        node: look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(str(file))
        for node in nodes
    }
    for node, found in seen.items():
        try:
            text = ray.get(found, timeout=_ANSWER_S)
        except ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[-1][:200]
            raise ClusterError(f"cluster.address: node {node.address} cannot run this project ({why})") from error
        if text != file.read_text():
            raise ClusterError(
                f"cluster.address: node {node.address} does not see {file}; all nodes need one file system with the "
                "results, the models and the data in it"
            )


def _text(path: str) -> str | None:
    with suppress(OSError):
        return Path(path).read_text()
    return None


async def lost_nodes(used: Collection[str]) -> None:
    """Watch the nodes with the ids `used`, until this is cancelled.

    Raises:
        NodeLost: one of them is gone; its address.
    """
    known = {node.id: node.address for node in await asyncio.to_thread(alive_nodes)}
    while not (gone := set(used) - {node.id for node in await asyncio.to_thread(alive_nodes)}):
        await asyncio.sleep(_LOOK_S)
    raise NodeLost(f"lost node {', '.join(sorted(known.get(node, node) for node in gone))}")


_CANCELLED = ["COMPLETING", "None"]  # squeue of a job that somebody ends: it is not running, and Slurm has no reason
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
    queue it again too, and whoever cancels wants its end.

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
        asked = ["squeue", "--noheader", "--jobs", job, "--format", "%M %L %T %r"]
        said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
        used, left, *state = said.split() or ["", "UNLIMITED"]
        if state == _CANCELLED:
            raise
        ahead = left == "UNLIMITED" or _seconds(used) < _seconds(left)
        if not ahead and not set(folder.glob(saved)) - before:
            raise Stopped(f"{stopped}; not queued again, as this job's time (runtime) did not suffice") from stopped
        command = ["scontrol", "requeue", job]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode and "completing" not in done.stderr:  # that one is queued again by somebody else
            raise Stopped(f"{stopped}; Slurm does not queue it again: {done.stderr.strip()}") from stopped
        print(f"{stopped}; waiting for Slurm to end this job", flush=True)
        time.sleep(_PATIENCE_S)
        raise


def _seconds(clock: str) -> int:
    """Of squeue's `3:04`, up to `1-02:03:04`."""
    numbers = reversed(re.findall(r"\d+", clock))
    return sum(int(number) * unit for number, unit in zip(numbers, (1, 60, 3600, 86400), strict=False))


@contextmanager
def ray_over(nodes: int, cpus: int, log: Path) -> Iterator[str | None]:
    """A Ray over the machines of this job for the block; gives its address, None on one machine.

    It is started by `srun`, in the working folder of this process, which is on the first machine.

    Args:
        nodes: machines of the job.
        cpus: processors of each that Ray is told of; GPUs it counts itself.
        log: file for what Ray says.

    Raises:
        TrainingError: Ray makes no token, or the machines have not all joined within five minutes.
    """
    if nodes == 1:
        yield None
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    ray_command = [sys.executable, "-m", "ray.scripts.scripts"]
    token = [*ray_command, "get-auth-token", "--generate"]  # in the home folder, which the machines share
    done = subprocess.run(token, capture_output=True, text=True, check=False, umask=0o077)
    if done.returncode:
        raise TrainingError(f"Ray makes no token in ~/.ray: {done.stderr.strip()[-200:]}")
    import ray

    here = ray.util.get_node_ip_address()
    address = f"{here}:{free_port(here)}"
    start = [*ray_command, "start", "--block", "--disable-usage-stats", f"--num-cpus={cpus}"]
    head = [*start, "--head", f"--node-ip-address={here}", f"--port={address.rpartition(':')[2]}"]
    others = ["srun", "--overlap", "--relative=1", f"--nodes={nodes - 1}", f"--ntasks={nodes - 1}"]
    others += ["--ntasks-per-node=1", f"--cpus-per-task={cpus}", *start, f"--address={address}"]
    with ExitStack() as stack:
        for command, joined in (([*head, "--include-dashboard=false"], 1), (others, nodes)):
            child = start_group(command, log=log)
            stack.callback(stop_group, child)
            _wait_for_machines(child, address, joined, log)
        yield address


def _wait_for_machines(child: subprocess.Popen[bytes], address: str, nodes: int, log: Path) -> None:
    import ray

    deadline, joined = time.monotonic() + _JOIN_S, 0
    while joined < nodes:
        if child.poll() is not None or time.monotonic() > deadline:
            why = f" in {_JOIN_S:.0f} s" if child.returncode is None else ", and what starts them has ended"
            raise TrainingError(f"{joined} of {nodes} machines joined Ray at {address}{why}; see {log}")
        try:
            ray.init(address=address, log_to_driver=False)
            joined = sum(node["Alive"] for node in ray.nodes())
        except ConnectionError:  # the head is not up yet
            joined = 0
        ray.shutdown()
        time.sleep(1)
