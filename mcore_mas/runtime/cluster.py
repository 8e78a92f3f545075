"""Existing Ray cluster of several nodes: connect to it, list its nodes, detect lost nodes."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcore_mas.runtime.errors import ClusterError
from mcore_mas.runtime.local_ray import no_implicit_ray, remove_ray_excepthook
from mcore_mas.runtime.stop_signal import preserved_sigterm_handler
from rollout.base.restarts import ProcessLost

# Seconds in which the head must accept a connection.
_CONNECT_S = 10.0

# Seconds in which a node must start a process and read a file; a busy node takes minutes.
_CHECK_S = 300.0

# Seconds between two checks of which nodes are alive.
_POLL_S = 1.0


class NodeLost(ProcessLost):
    """Loss of nodes that a run's trainers were on."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Node:
    """A machine of a Ray cluster."""

    address: str
    id: str  # Ray's
    gpus: int
    cpus: int
    pool: str | None = None  # the value of its label `pool`
    is_driver: bool = False  # this process is on it


@contextmanager
def joined_ray(address: str, file: Path) -> Iterator[list[Node]]:
    """Join the Ray at `address` for this block, and yield its nodes.

    Processes that the run starts in it end with the block. They work in the working folder of this
    process, so that a path means the same everywhere.

    Args:
        address: `host:port` of the head, or "auto" for the Ray that this machine is a node of.
        file: a file that this process has written; every node must see it.

    Raises:
        ClusterError: no Ray answers there, or a node cannot start a process or does not see the file.
    """
    remove_ray_excepthook()
    try:
        _check_reachable(address)
        with preserved_sigterm_handler():
            ray.init(
                address=address,
                namespace="mcore-mas",
                runtime_env={"worker_process_setup_hook": _setup_hook(str(Path.cwd()))},
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
    except Exception as error:  # Ray raises errors of many types
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ClusterError(
            f"cluster.address: {address}: this machine cannot join a Ray there ({reason}); start one with "
            "`ray start` on every node, this one too, or use cluster.address: local"
        ) from error

    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        print(
            f"warning: cluster.address: the Ray at {address} asks for no token, so whoever reaches it runs programs "
            "as you; start it as docs/cluster.md says",
            file=sys.stderr,
            flush=True,
        )
    with no_implicit_ray():
        try:
            nodes = alive_nodes()
            _check_files(nodes, file.resolve())
            yield nodes
        finally:
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Connect to a head, because `ray.init` would try for minutes to reach one that is not there."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_CONNECT_S):
        pass


def _setup_hook(folder: str) -> Callable[[], None]:
    """Return the setup hook of Ray's workers, which changes to `folder`.

    Relative paths then mean the same in all workers. In a checkout that is not installed, this package
    can be imported only from there.
    """

    def change_folder() -> None:
        import contextlib
        import os

        with contextlib.suppress(OSError):  # `_check_files` reports a node without the folder
            os.chdir(folder)

    return change_folder


def alive_nodes() -> list[Node]:
    """Return the nodes of the Ray that this process has joined, sorted by address."""
    driver = ray.get_runtime_context().get_node_id()
    return sorted(
        Node(
            address=str(node["NodeManagerAddress"]),
            id=str(node["NodeID"]),
            gpus=int(node["Resources"].get("GPU", 0)),
            cpus=int(node["Resources"].get("CPU", 0)),
            pool=node["Labels"].get("pool"),
            is_driver=node["NodeID"] == driver,
        )
        for node in ray.nodes()
        if node["Alive"]
    )


def _check_files(nodes: Collection[Node], file: Path) -> None:
    """Raise ClusterError unless every node reads the same text in `file`."""
    read = ray.remote(num_cpus=0, max_retries=0)(_read_text)
    results = {}
    for node in nodes:
        on_node = NodeAffinitySchedulingStrategy(node.id, soft=False)
        results[node] = read.options(scheduling_strategy=on_node).remote(str(file))

    expected = file.read_text()
    for node, result in results.items():
        try:
            text = ray.get(result, timeout=_CHECK_S)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1][:200]
            raise ClusterError(
                f"cluster.address: node {node.address} cannot run this project ({reason})"
            ) from error
        if text != expected:
            raise ClusterError(
                f"cluster.address: node {node.address} does not see {file}; all nodes need one file system with the "
                "results, the models and the data in it"
            )


def _read_text(path: str) -> str | None:
    with suppress(OSError):
        return Path(path).read_text()
    return None


async def watch_nodes(node_ids: Collection[str]) -> NoReturn:
    """Watch nodes until this is cancelled.

    Raises:
        NodeLost: one of them is gone; the message has its address.
    """
    addresses = {node.id: node.address for node in await asyncio.to_thread(alive_nodes)}
    while True:
        alive = {node.id for node in await asyncio.to_thread(alive_nodes)}
        lost = set(node_ids) - alive
        if lost:
            names = sorted(addresses.get(node, node) for node in lost)
            raise NodeLost(f"lost node {', '.join(names)}")
        await asyncio.sleep(_POLL_S)
