"""Routes, updates and senders of weight sync; `make_sender` makes the sender of a route."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollout.base.lookup import lookup_import

if TYPE_CHECKING:
    from rollout.models.adapter_weights import AdapterShape
    from rollout.models.tensors import WeightStream

# Import paths, so that a process loads only the sender that it needs.
SENDERS = {
    "shared": "rollout.sync.shared:SharedSender",
    "disk": "rollout.sync.disk:FolderSender",
    "adapter": "rollout.sync.disk:AdapterSender",
    "tensor": "rollout.sync.cuda_ipc:TensorSender",
    "distributed": "rollout.sync.process_group:DistributedSender",
}

PUSHED_BUCKET_BYTES = 2 << 30  # of full tensors that are pushed; up to two buckets exist at a time

REMOVED_TRANSPORTS = {  # transports of version 0.1 and what replaces each
    "delta": "shared, or disk if trainer and engine are on different nodes",
    "changed": "disk",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Properties of the SGLang servers to which weights are pushed.

    Attributes:
        tp: tensor-parallel ranks of each server.
        key: API key of the servers.
        sessions: True if an update must be framed by `begin_weight_update` and `end_weight_update`.
        starts: number of server starts so far; a sender is not used again after a restart.
    """

    tp: int = 1
    key: str | None = field(default=None, repr=False)
    sessions: bool = True
    starts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRoute:
    """Destination of an engine's next weights, in plain values that can be sent to any process.

    Attributes:
        transport: key of `SENDERS`.
        target: file in shared memory, folder, or URLs of servers separated by spaces.
        model: Hugging Face folder with the tensors' names and shapes.
        adapter: shape of the adapter that is sent instead of the full weights.
        half: half of the shared buffers to write, 0 or 1, which alternates; None for other transports.
        checksums: True if transport `disk` must return checksums of the tensors in float32. Transport
            `shared` always does.
        servers: the servers at `target`, if these are URLs.
    """

    transport: str
    target: str
    model: str
    adapter: AdapterShape | None = None
    half: int | None = None
    checksums: bool = False
    servers: ServerOptions = ServerOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Weights that have been written to a route's target and wait to be used.

    Attributes:
        location: the route's target, or the folder below it that was written for this version.
        checksums: checksum by tensor name; empty if the engine compares none.
        bytes: size of the tensors; 0 on the other ranks of a transport in which rank 0 writes files.
        seconds: duration of the transfer.
    """

    version: int
    transport: str
    location: str
    checksums: Mapping[str, str]
    bytes: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """Result of `WeightSender.write`; the fields are those of `WeightUpdate`."""

    location: str
    bytes: int
    checksums: Mapping[str, str] = field(default_factory=dict)


def gather_from_one_rank(value: Any) -> list[Any]:
    """Return the values of all ranks of a trainer that has one rank."""
    return [value]


class WeightSender:
    """Trainer side of a transport. Every rank has one, and all ranks make the same calls."""

    def __init__(
        self,
        route: SyncRoute,
        *,
        rank: int = 0,
        all_gather: Callable[[Any], list[Any]] = gather_from_one_rank,
    ) -> None:
        """Prepare to send along `route`.

        Args:
            rank: this process's rank in the trainer.
            all_gather: returns the values that all ranks pass, in the order of the ranks.
        """
        self.route = route
        self.rank = rank
        self.all_gather = all_gather

    def send(self, weights: WeightStream, version: int, half: int | None = None) -> WeightUpdate:
        """Write a stream of full tensors to the route's target.

        Args:
            weights: names and tensors, gathered on all ranks.
            version: version of the weights.
            half: half of the shared buffers to write, for transport `shared`.

        Raises:
            EngineError: a tensor is missing, unknown or of another shape, or an engine refuses it.
        """
        began = time.perf_counter()
        written = self.write(weights, version, half)
        return WeightUpdate(
            version=version,
            transport=self.route.transport,
            location=written.location,
            checksums=written.checksums,
            bytes=written.bytes,
            seconds=time.perf_counter() - began,
        )

    @abstractmethod
    def write(self, weights: WeightStream, version: int, half: int | None) -> SentWeights:
        """Write the weights; see `send`."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what servers hold for this sender; for most kinds of sender they hold nothing.

        Called on every rank, after its last update.
        """


def make_sender(
    route: SyncRoute,
    *,
    rank: int = 0,
    all_gather: Callable[[Any], list[Any]] = gather_from_one_rank,
) -> WeightSender:
    """Return the sender of a route; see `WeightSender`."""
    sender_class = lookup_import("transport", route.transport, SENDERS)
    sender: WeightSender = sender_class(route, rank=rank, all_gather=all_gather)
    return sender
