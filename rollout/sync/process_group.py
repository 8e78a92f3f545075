"""Weight sync into SGLang servers over a process group that rank 0 forms with all their ranks."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.sync.push import LOAD_FORMAT, REQUEST_TIMEOUT_S, PushSender, flatten, wait_for
from rollout.sync.transport import SyncRoute

# Name of the group on the servers, and SGLang's answer if there is no group to destroy.
_GROUP_NAME = "mcore_mas"
_NO_GROUP = "does not exist"
# Numbers of the groups that this process forms, for all of its senders: torch takes a name once.
_group_numbers = count()


class DistributedSender(PushSender):
    """Sender in which rank 0 broadcasts buckets to every rank of every server, by NCCL or gloo.

    The servers are on other GPUs than the trainer. The next bucket is gathered while the servers
    receive and load one.
    """

    def __init__(self, route: SyncRoute, **ranks: Any) -> None:
        super().__init__(route, **ranks)
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._abandoned: list[str] = []  # names of groups of which servers may still be members

    def begin(self) -> None:
        """Form the group if there is none, then begin; see `PushSender.begin`."""
        if self._group is None:
            self._group = self._form_group()
        super().begin()

    def send_bucket(self, bucket: Sequence[tuple[str, Tensor]], version: int) -> None:
        """Broadcast a bucket; see `PushSender.send_bucket`."""
        self.on_rank_0(partial(self._broadcast, bucket, version))

    def settle(self) -> None:
        """Wait until the servers have received and loaded the last bucket."""
        responses = self._responses
        in_flight = self._in_flight
        self._responses = ()
        self._in_flight = None
        with self._leave_group_on_failure():
            # The responses come first: if a server refuses or dies, the broadcast may never end.
            wait_for(responses, FIRST_EXCEPTION)
            if in_flight is not None:
                work, _ = in_flight
                work.wait()

    def close(self) -> None:
        """Leave the group, and destroy it on the servers that are still there; see `WeightSender.close`."""
        self._leave_group()
        self._destroy_abandoned_groups()

    def _form_group(self) -> dist.ProcessGroup:
        """Form the process group with all server ranks, which connect to a free port of this machine."""
        tp = self.route.servers.tp
        world_size = 1 + tp * len(self.urls)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._destroy_abandoned_groups()
        self._group_name = self._unused_group_name()
        listener = socket.create_server((_address_towards(self.urls[0]), 0))
        address, port = listener.getsockname()
        bodies = [
            {
                "master_address": address,
                "master_port": port,
                "rank_offset": 1 + tp * number,
                "world_size": world_size,
                "group_name": self._group_name,
                "backend": backend,
            }
            for number in range(len(self.urls))
        ]
        # Both sides block until all have joined.
        joined = self.post("/init_weights_update_group", bodies)
        own_member = self._pool.submit(_join_group, listener, world_size, backend, self._group_name)
        try:
            wait_for([*joined, own_member], FIRST_EXCEPTION)
        except BaseException:
            self._abandoned.append(self._group_name)
            raise
        return own_member.result()

    def _unused_group_name(self) -> str:
        """Return an unused name for a new group.

        The name ends in the next number. If servers still have a group of this name, from an earlier
        trainer, it is destroyed; if that fails, the name gets a random suffix.
        """
        name = f"{_GROUP_NAME}-{next(_group_numbers)}"
        if self._destroy_group(name):
            return name
        return f"{name}-{uuid.uuid4().hex[:12]}"

    def _destroy_abandoned_groups(self) -> None:
        """Destroy the groups that this sender has abandoned; keep the names of those that remain."""
        self._abandoned = [name for name in self._abandoned if not self._destroy_group(name)]

    def _destroy_group(self, name: str) -> bool:
        """Destroy a group on all servers; return False if one of them may still be a member.

        Servers keep a group, with its communicator, until it is destroyed.
        """
        answers = self.post(
            "/destroy_weights_update_group", [{"group_name": name}] * len(self.urls)
        )
        errors = [answer.exception() for answer in answers]
        return all(error is None or _NO_GROUP in str(error) for error in errors)

    def _broadcast(self, bucket: Sequence[tuple[str, Tensor]], version: int) -> None:
        """Start the broadcast of a bucket once the servers have loaded the one before."""
        flat, metadata = flatten(bucket)
        body = {
            "names": [entry.name for entry in metadata],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in metadata],
            "shapes": [list(entry.shape) for entry in metadata],
            "group_name": self._group_name,
            "load_format": LOAD_FORMAT,
            "weight_version": str(version),
            "flush_cache": False,
        }
        self.settle()
        self._responses = self.post("/update_weights_from_distributed", [body] * len(self.urls))
        with self._leave_group_on_failure():
            work = dist.broadcast(flat, group=self._group, group_src=0, async_op=True)
            self._in_flight = work, flat

    @contextmanager
    def _leave_group_on_failure(self) -> Iterator[None]:
        """Leave the group if the block fails, and raise its error as an EngineError."""
        try:
            yield
        except EngineError:
            self._leave_group()
            raise
        except RuntimeError as error:  # gloo raises it if a server has died
            self._leave_group()
            raise EngineError(f"SGLang: broadcast: {error}") from error

    def _leave_group(self) -> None:
        """Abandon the group, if there is one; the next update forms a new one.

        Servers are told only then, because they may still wait for a broadcast.
        """
        group, self._group = self._group, None
        if group is None:
            return
        self._abandoned.append(self._group_name)
        if torch.cuda.is_available():
            # NCCL would otherwise wait for the broadcast that is under way.
            dist.distributed_c10d._abort_process_group(group)


def _address_towards(url: str) -> str:
    """Return this machine's address on the route to the server at `url`; nothing is sent."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "", parts.port or 80))
        return str(probe.getsockname()[0])


def _join_group(
    listener: socket.socket, world_size: int, backend: str, name: str
) -> dist.ProcessGroup:
    """Join as rank 0 the group that SGLang's `init_custom_process_group` makes.

    torch's public `init_process_group` cannot be used: it makes the default group, which is the
    trainer's own.
    """
    from torch.distributed.distributed_c10d import (
        GroupName,
        PrefixStore,
        _new_process_group_helper,
        _world,
    )

    timeout = timedelta(seconds=REQUEST_TIMEOUT_S)
    address, port = listener.getsockname()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )
    group, _ = _new_process_group_helper(
        world_size,
        0,
        [],
        dist.Backend(backend),
        PrefixStore(name, store),
        group_name=GroupName(name),
        timeout=timeout,
    )
    assert isinstance(group, dist.ProcessGroup)  # this process is a member
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
