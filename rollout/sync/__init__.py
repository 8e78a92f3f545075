"""Weight sync: how a trainer's weights reach an engine, as a route, an update, and senders by name.

Weights that lie in memory have a folder there, which is this user's alone (`memory_path`).
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rollout.base.options import imported
from rollout.base.ownership import FolderError, remove_path

if TYPE_CHECKING:
    from rollout.models.tensors import WeightStream


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRoute:
    """Where an engine wants its next weights and how; plain values, so that it travels anywhere."""

    transport: str  # name in SENDERS
    place: str  # file, folder or URLs: what the transport needs to find the engine
    model: str  # Hugging Face folder whose tensors the weights have
    # the same for every update; with `adapter`, its `AdapterShape`, it is this that is sent, and not the weights
    options: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)  # what differs from update to update


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Weights that lie where the engine wanted them."""

    version: int
    transport: str
    place: str  # the route's, or what was written for this version below it
    checksums: Mapping[
        str, str
    ]  # by the engine's names of its tensors; {} where nothing is compared
    bytes: int  # that were written
    seconds: float = 0.0  # that sending took


# where weights lie now, their checksums as the engine names them, and how many bytes were written
Stored = tuple[str, Mapping[str, str], int]


def alone(value: Any) -> list[Any]:
    """The exchange of a sender without fellow ranks."""
    return [value]


class WeightSender:
    """A trainer's side of a transport; every rank has one and makes the same calls."""

    def __init__(
        self, route: SyncRoute, *, rank: int = 0, exchange: Callable[[Any], list[Any]] = alone
    ) -> None:
        self._route, self._rank, self._leads, self._exchange = route, rank, rank == 0, exchange
        self._open()

    def _open(self) -> None:
        """Get ready to send over the route."""

    def shares(self, ranks: int) -> frozenset[str]:
        """Tensors of which each rank of a trainer that cuts them over so many may give its own share alone."""
        return frozenset()

    def send(self, weights: WeightStream, version: int, state: Mapping[str, Any]) -> WeightUpdate:
        """Drain a stream of full tensors, or of their blocks, into the route's place; `shares` may come as such.

        Raises:
            EngineError: a tensor is missing, unknown or of another shape, or the engine does not take it.
        """
        began = time.perf_counter()
        place, checksums, size = self._write(weights, version, state)
        return WeightUpdate(
            version=version,
            transport=self._route.transport,
            place=place,
            checksums=checksums,
            bytes=size,
            seconds=time.perf_counter() - began,
        )

    def _write(self, weights: WeightStream, version: int, state: Mapping[str, Any]) -> Stored:
        raise NotImplementedError


# Import paths: a sender loads only what it needs.
SENDERS = {
    "shared": "rollout.sync.shared:SharedSender",
    "disk": "rollout.sync.disk:FolderSender",
    "adapter": "rollout.sync.disk:AdapterSender",
    "changed": "rollout.sync.disk:FolderSender",
    "delta": "rollout.sync.disk:FolderSender",
    "tensor": "rollout.sync.push:TensorSender",
    "distributed": "rollout.sync.push:GroupSender",
}


def make_sender(
    route: SyncRoute, *, rank: int = 0, exchange: Callable[[Any], list[Any]] = alone
) -> WeightSender:
    """The trainer's side of `route` on one of its ranks; `exchange` gives every rank what each of them gave."""
    made: WeightSender = imported("transport", route.transport, SENDERS)(
        route, rank=rank, exchange=exchange
    )
    return made


MEMORY = Path("/dev/shm")  # noqa: S108  (a file system in memory, not a place for temporary files)


def memory_path() -> Path:
    """A path in shared memory that nobody uses, in a folder that only this user can read.

    What ended processes left behind there is removed first.

    Raises:
        FolderError: the folder is somebody else's.
    """
    folder = _own_memory()
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise FolderError(f"{folder}: not a folder that is this user's alone; have it removed")
    for left in folder.iterdir():
        owner = left.name.partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            remove_path(left)
    return folder / f"{os.getpid()}-{time.monotonic_ns()}"


def clear_memory(pid: int) -> None:
    """Remove what a process that has ended left in shared memory."""
    for left in _own_memory().glob(f"{pid}-*"):
        remove_path(left)


def _own_memory() -> Path:
    return MEMORY / f"mcore_mas-{os.getuid()}"
