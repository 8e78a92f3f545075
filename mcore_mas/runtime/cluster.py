"""The Ray that a run computes on: its own on this machine, or one of several nodes that runs already."""

import asyncio
import logging
import os
import re
import secrets
import socket
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private.services import canonicalize_bootstrap_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcore_mas.runtime.ray_cleanup import reaped, sweep, tidy
from rollout.base.processes import ProcessLost

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
_LOOK_S = 1.0  # between two looks at which nodes, and processes that start, are alive
_BEGUN = re.compile(r"Started worker process with pid (\d+)")  # in the log of Ray's node
_DOOR_S = 10.0  # that the head may take to accept a connection, and to say its first word
_SHOWN = 300  # characters of what a process said last
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(
    (0, 0, 0, 4, 0, 0, 0, 0, 0)
)  # RFC 9113, 3.4; Ray speaks gRPC
_ANSWER_S = (
    300.0  # that a node may take to start a process and look at a file; a busy one takes minutes
)


class ClusterError(RuntimeError):
    """A Ray that runs already cannot be used, or none starts here: one line that says what, where, what to do."""


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
    granted = (
        _MOST_CORES if quota == "max" else int(quota) // int(period)
    )  # microseconds of each period
    return max(1, min(_MOST_CORES, granted, len(os.sched_getaffinity(0))))


@contextmanager
def running_ray(
    cpus: int,
    object_store_mb: int,
    *,
    gpus: int = 0,
    keep_pages: bool = False,
    logs: Path | None = None,
) -> Iterator[Path]:
    """A Ray of this run's own, without a dashboard, for the block; it ends with this process. The folder of its logs.

    Args:
        logs: folder that becomes what its processes have logged, unless all goes well.
        keep_pages: its processes keep the memory that they free, unless this process's environment says otherwise.

    Raises:
        ClusterError: it does not start.
    """
    if keep_pages:
        for name, value in KEEP_PAGES.items():
            os.environ.setdefault(name, value)

    # read by Ray when it starts: a run neither joins another's cluster nor reports its use
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.pop(
        "RAY_AUTH_MODE", None
    )  # then Ray asks for its token, which `disabled` would leave out
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (by default Ray's workers give way to all else)
    # by default 60, which a busy machine takes; `failed_starts` sees sooner which have ended
    os.environ.setdefault("RAY_worker_register_timeout_seconds", "300")
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112  (`ray.init` waits for ever if one ends)
    private_token()
    context = _started(cpus, gpus, object_store_mb)
    session = Path(context.address_info["session_dir"])
    with reaped(session, logs):
        try:
            yield session / "logs"
        finally:
            ray.shutdown()


def private_token() -> None:
    """Make Ray's token, which lets whoever reads it run code as this user, if there is none; it is this user's alone.

    Ray would make it readable by all, and another one in each of two jobs that start at once.
    """
    token = Path.home() / ".ray" / "auth_token"
    token.parent.mkdir(mode=0o700, exist_ok=True)
    if not token.is_file():
        made = token.with_name(
            f".auth_token.{secrets.token_hex(8)}"
        )  # machines share homes, and numbers of processes
        made.touch(0o600)
        made.write_text(secrets.token_hex(32))
        with suppress(FileExistsError):  # another process was first
            os.link(made, token)
        made.unlink()
    if token.stat().st_uid == os.getuid():
        token.chmod(0o600)


def _private_folder() -> Path:
    """A folder of this user's alone: every process of Ray's opens those that it makes to everybody."""
    default = Path(get_default_ray_temp_dir()).resolve()
    own = default.with_name(f"{default.name}-{os.getuid()}")
    own.mkdir(0o700, parents=True, exist_ok=True)
    if own.lstat().st_uid != os.getuid() or own.is_symlink():
        raise ClusterError(
            f"cluster.address: local: {own} is not this user's; set RAY_TMPDIR to a folder that is"
        )
    own.chmod(0o700)
    return own


def _started(cpus: int, gpus: int, object_store_mb: int) -> Any:
    folder, ours = (
        _private_folder() / "ray",
        f"session_*_{os.getpid()}",
    )  # Ray ends their names with its process
    before = set(folder.glob(ours))
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
                _temp_dir=str(folder),
            )
        except (
            Exception
        ) as error:  # Ray has no type for a machine too busy to start it within its fixed 30 s
            ray.shutdown()
            for session in {*folder.glob(ours)} - before:
                sweep(session)
                tidy(session, None, keep=False)
            slow = "timed out during startup" in str(error)
            if slow and not last:
                continue
            tried = "in three tries of 30 s; end other work on it, and start this again"
            why = tried if slow else f"({' '.join(str(error).split())[:300]})"
            raise ClusterError(
                f"cluster.address: local: no Ray starts on this machine {why}"
            ) from error
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
    client = address.startswith("ray://")
    hook = {"worker_process_setup_hook": _in_folder(str(Path.cwd()))}
    joining: dict[str, Any] = {
        "runtime_env": hook,
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    try:
        place = address if client else canonicalize_bootstrap_address(address) or ""
        host, _, port = place.removeprefix("ray://").rpartition(":")
        with socket.create_connection(
            (host, int(port)), timeout=_DOOR_S
        ) as door:  # `ray.init` would try for minutes
            if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
                door.sendall(_HELLO)
                if door.recv(4)[3:] != b"\4":  # a frame of settings
                    raise ConnectionError("something else than Ray answers")
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
    return str(ray.get_runtime_context().get_node_id())


def _check_files(nodes: Collection[Node], file: Path) -> None:
    """Have every node read `file`."""
    look = ray.remote(num_cpus=0, max_retries=0)(_text)
    seen = {
        node: look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
        ).remote(str(file))
        for node in nodes
    }
    for node, found in seen.items():
        try:
            text = ray.get(found, timeout=_ANSWER_S)
        except ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[-1][:200]
            raise ClusterError(
                f"cluster.address: node {node.address} cannot run this project ({why})"
            ) from error
        if text != file.read_text():
            raise ClusterError(
                f"cluster.address: node {node.address} does not see {file}; all nodes need one file system with the "
                "results, the models and the data in it"
            )


def _text(path: str) -> str | None:
    with suppress(OSError):
        return Path(path).read_text()
    return None


async def failed_starts(logs: Path) -> None:
    """Watch a Ray that logs to the folder `logs`, until this is cancelled, for processes that end as they start.

    Ray itself looks after `worker_register_timeout_seconds`, and starts no other before.

    Raises:
        ClusterError: one has ended before Ray knew it; what it said last.
    """
    starting, rest = set[str](), ""
    with (logs / "raylet.out").open(errors="replace") as file:
        while True:
            *lines, rest = (rest + file.read()).split("\n")
            starting.update(pid for line in lines for pid in _BEGUN.findall(line))
            for pid in list(starting):
                ended, said = (
                    not psutil.pid_exists(int(pid)),
                    (logs / "raylet.err").read_text(errors="replace"),
                )
                # Ray knows it, or was out of patience with it, ended it and starts another
                if (
                    any(logs.glob(f"python-core-*_{pid}.log"))
                    or f"process({pid}) have not registered" in said
                ):
                    starting.remove(pid)
                elif ended:
                    words = [
                        line for line in said.splitlines() if line.strip() and line[0] != "["
                    ]  # not Ray's own
                    last = (
                        words[-1]
                        if words
                        else "it said nothing; the kernel ends processes where memory is full"
                    )
                    raise ClusterError(
                        f"process {pid} of Ray ended as it started: {last.strip()[:_SHOWN]}"
                    )
            await asyncio.sleep(_LOOK_S)


async def lost_nodes(used: Collection[str]) -> None:
    """Watch the nodes with the ids `used`, until this is cancelled.

    Raises:
        NodeLost: one of them is gone; its address.
    """
    known = {node.id: node.address for node in await asyncio.to_thread(alive_nodes)}
    while not (gone := set(used) - {node.id for node in await asyncio.to_thread(alive_nodes)}):
        await asyncio.sleep(_LOOK_S)
    raise NodeLost(f"lost node {', '.join(sorted(known.get(node, node) for node in gone))}")
