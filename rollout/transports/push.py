"""Weights pushed into SGLang servers that pause for them: by CUDA IPC on their own GPUs, or over a process group."""

from __future__ import annotations

import base64
import io
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

import httpx
import torch
import torch.distributed as dist
import torch.multiprocessing  # teaches ForkingPickler how tensors travel
from torch import Tensor

from rollout.engines.protocol import EngineError
from rollout.transports.blocks import Rows
from rollout.transports.bucket import BUCKET_BYTES, buckets, flatten
from rollout.transports.digest import Digest, digest_of
from rollout.transports.handover import Handover, Route
from rollout.transports.manifest import complete, read_manifest

_TIMEOUT_S = 600.0


class _Push:
    """What both ways have in common: the servers, the session around an update, and the books."""

    def __init__(self, route: Route, *, rank: int, exchange: Callable[[Any], list[Any]]) -> None:
        self._route = route
        self._leads = rank == 0
        self._exchange = exchange
        self._urls = route.place.split()
        self._manifest = read_manifest(route.model)
        headers = {"Authorization": f"Bearer {route.options['key']}"} if route.options.get("key") else {}
        self._http = httpx.Client(headers=headers, trust_env=False, timeout=_TIMEOUT_S)
        self._pool = ThreadPoolExecutor(max_workers=len(self._urls))

    def send(self, weights: Iterable[tuple[str, Rows]], version: int, state: Mapping[str, Any]) -> Handover:
        """Push bucket by bucket (see `Sender`); a failure leaves servers with a mixture, and says so."""
        began = time.perf_counter()
        digest = digest_of(self._route)
        written = 0
        limit = int(self._route.options.get("bucket_bytes", BUCKET_BYTES))
        with self._session():
            for bucket in buckets(_cast(complete(weights, self._manifest), self._route, digest, self._leads), limit):
                written += sum(tensor.nbytes for _, tensor in bucket)
                self._bucket(bucket, version)
        return Handover(
            version=version,
            transport=self._route.transport,
            place=self._route.place,
            checksums=digest.finish(),
            bytes=written,
            seconds=time.perf_counter() - began,
        )

    def _bucket(self, bucket: list[tuple[str, Tensor]], version: int) -> None:
        raise NotImplementedError

    @contextmanager
    def _session(self) -> Iterator[None]:
        """SGLang 0.5.23 takes tensors only between `begin_` and `end_weight_update`, which 0.5.17 does not have.

        A session is ended after a failure too, or the server would refuse the next one.
        """
        around = self._leads and self._route.options.get("sessions", True)
        try:
            if around:
                self._posts("/begin_weight_update", {})
            yield
        except BaseException:
            if around:
                with suppress(EngineError):  # the failure itself is what matters
                    self._posts("/end_weight_update", {})
            raise
        if around:
            self._posts("/end_weight_update", {})
        if self._leads:  # while all pause: nothing was computed by half of the weights, and nothing old is cached
            self._posts("/flush_cache", None)

    def _posts(self, path: str, body: Mapping[str, Any] | None) -> None:
        for waiting in self._post(path, body):
            waiting.result()

    def _post(self, path: str, body: Mapping[str, Any] | None) -> list[Future[None]]:
        return [self._pool.submit(self._one, url + path, body) for url in self._urls]

    def _one(self, url: str, body: Mapping[str, Any] | None) -> None:
        try:
            reply = self._http.post(url, json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"SGLang at {url}: {error or type(error).__name__}") from error
        said = reply.json() if "json" in reply.headers.get("content-type", "") else {}
        if reply.status_code != 200 or said.get("success") is False:
            words = " ".join(str(said.get("message") or reply.text).split())[:300]
            raise EngineError(f"SGLang at {url}: status {reply.status_code}: {words}")


class TensorSender(_Push):
    """Trainer rank r shares its bucket with the engine's rank r on the same GPU, as `MultiprocessingSerializer` would.

    SGLang's format is a pickle, made here of a CUDA IPC handle and of names; nothing of the kind is read here. A bucket
    is kept until the next one is answered: SGLang answers when its copies are queued, not when they are done.
    """

    def __init__(self, route: Route, *, rank: int, exchange: Callable[[Any], list[Any]]) -> None:
        super().__init__(route, rank=rank, exchange=exchange)
        self._device = rank % int(route.options.get("tp", 1))  # as the server numbers the GPUs it sees
        self._kept: list[Tensor] = []

    def _bucket(self, bucket: list[tuple[str, Tensor]], version: int) -> None:
        flat, metadata = flatten(bucket)
        if flat.is_cuda:
            torch.cuda.synchronize()  # the servers' streams do not wait for this one
        handles = self._exchange(serialize({"flattened_tensor": _Shared(flat, self._device), "metadata": metadata}))
        if self._leads:
            tp = int(self._route.options.get("tp", 1))
            groups = [handles[first : first + tp] for first in range(0, len(self._urls) * tp, tp)]
            if any(len(group) < tp for group in groups):
                raise EngineError(
                    f"transport 'tensor' needs a trainer rank on every GPU of the engine: {len(self._urls)} servers of "
                    f"{tp} GPUs, {len(handles)} ranks; use transport distributed or disk"
                )
            fields = {"load_format": "flattened_bucket", "weight_version": str(version), "flush_cache": False}
            posts = [
                self._pool.submit(
                    self._one, url + "/update_weights_from_tensor", {"serialized_named_tensors": group, **fields}
                )
                for url, group in zip(self._urls, groups, strict=True)
            ]
            for post in posts:
                post.result()
        self._exchange(None)  # nobody lets go of memory that a server may still be reading
        self._kept = [flat]


class GroupSender(_Push):
    """Rank 0 broadcasts to every rank of every server over a group of their own; for servers on other GPUs."""

    def __init__(self, route: Route, *, rank: int, exchange: Callable[[Any], list[Any]]) -> None:
        super().__init__(route, rank=rank, exchange=exchange)
        self._name = ""
        self._group = self._join() if rank == 0 else None

    def _join(self) -> dist.ProcessGroup:
        tp = int(self._route.options.get("tp", 1))
        world = 1 + tp * len(self._urls)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        address = "127.0.0.1"
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        self._name = f"mcore_mas-{port}"  # one that no earlier trainer has left in the servers
        fields = {"master_address": address, "master_port": port, "world_size": world}
        fields |= {"group_name": self._name, "backend": backend}
        posts = [
            self._pool.submit(self._one, url + "/init_weights_update_group", {**fields, "rank_offset": 1 + tp * number})
            for number, url in enumerate(self._urls)
        ]
        group = _group_of(address, port, world, backend, self._name)
        for post in posts:
            post.result()
        return group

    def _bucket(self, bucket: list[tuple[str, Tensor]], version: int) -> None:
        if not self._leads:
            return
        flat, metadata = flatten(bucket)
        posts = self._post(
            "/update_weights_from_distributed",
            {
                "names": [entry.name for entry in metadata],
                "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in metadata],
                "shapes": [list(entry.shape) for entry in metadata],
                "group_name": self._name,
                "load_format": "flattened_bucket",
                "weight_version": str(version),
                "flush_cache": False,
            },
        )
        dist.broadcast(flat, group=self._group, group_src=0)
        for post in posts:
            post.result()


class _Shared:
    """A tensor that is unpickled as a view of this process's memory, on the GPU that the reader calls `device`."""

    def __init__(self, tensor: Tensor, device: int) -> None:
        self._tensor, self._device = tensor, device

    def __reduce__(self) -> Any:
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = reduce_tensor(self._tensor)
        if self._tensor.is_cuda:  # (class, size, stride, offset, storage class, dtype, device, handle, ...)
            arguments = (*arguments[:6], self._device, *arguments[7:])
        return rebuild, arguments


def serialize(payload: object) -> str:
    """What SGLang's `MultiprocessingSerializer.serialize(payload, output_str=True)` gives."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(payload)
    return base64.b64encode(buffer.getvalue()).decode()


def _cast(
    weights: Iterable[tuple[str, Tensor]], route: Route, digest: Digest, leads: bool
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        if leads:
            digest.add(name, tensor.detach())
        yield name, tensor.detach()


def _group_of(address: str, port: int, world: int, backend: str, name: str) -> dist.ProcessGroup:
    """The group that the servers join as `init_custom_process_group` of SGLang has it, beside the trainer's own."""
    from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

    timeout = timedelta(seconds=_TIMEOUT_S)
    store, _, _ = next(dist.rendezvous(f"tcp://{address}:{port}", 0, world, timeout=timeout))
    group, _ = _new_process_group_helper(
        world, 0, [], dist.Backend(backend), PrefixStore(name, store), group_name=name, timeout=timeout
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    made: dist.ProcessGroup = group
    return made
