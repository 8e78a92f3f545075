"""Weight sync into SGLang servers that pause for it: by CUDA IPC on their own GPUs, or over a process group."""

import base64
import io
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch
import torch.distributed as dist
import torch.multiprocessing  # teaches ForkingPickler how tensors travel
from torch import Tensor

from mcore_mas.rollout.base.errors import EngineError
from mcore_mas.rollout.models.tensors import WeightStream, buckets, tensor_shapes
from mcore_mas.rollout.sync import Stored, WeightSender
from mcore_mas.rollout.sync.digests import digest_of, digested

_TIMEOUT_S = 600.0


class _Push(WeightSender):
    """What both ways have in common: the servers, the session around an update, and the books.

    Rank 0 alone speaks to the servers. What fails there fails on every rank, at the same tensor of the stream: a rank
    that went on would gather with nobody, or with the next update.
    """

    _answers: Sequence[Future[None]] = ()  # to what was sent last and is not waited for yet

    def _open(self) -> None:
        route = self._route
        self._urls = route.place.split()
        self._tp = int(route.options.get("tp", 1))
        self._manifest = tensor_shapes(self._route.model)
        headers = {"Authorization": f"Bearer {route.options['key']}"} if route.options.get("key") else {}
        self._http = httpx.Client(headers=headers, trust_env=False, timeout=_TIMEOUT_S)
        self._pool = ThreadPoolExecutor(max_workers=len(self._urls) + 1)

    def _write(self, weights: WeightStream, version: int, state: Mapping[str, Any]) -> Stored:
        """Push bucket by bucket; a failure leaves servers with a mixture, and says so."""
        digest = digest_of(self._route, (self._rank, len(self._exchange(None))))
        size, limit = 0, int(self._route.options.get("bucket_bytes", PUSHED_BUCKET_BYTES))
        with self._session():
            for bucket in buckets(digested(weights, self._manifest, digest), limit):
                size += sum(tensor.nbytes for _, tensor in bucket)
                self._bucket(bucket, version)
        sums = {name: said for part in self._exchange(digest.finish()) for name, said in part.items()}
        return self._route.place, sums, size

    def _bucket(self, bucket: list[tuple[str, Tensor]], version: int) -> None:
        raise NotImplementedError

    @contextmanager
    def _session(self) -> Iterator[None]:
        """SGLang 0.5.23 takes tensors only between `begin_` and `end_weight_update`, which 0.5.17 does not have.

        A session is ended after a failure too, or the server would refuse the next one.
        """
        try:
            self._together(self._begin)
            yield
            self._together(self._end)
        except BaseException:
            if self._leads:
                wait(self._answers)
                with suppress(EngineError):  # the failure itself is what matters
                    self._ask_for("/end_weight_update")
            raise

    def _begin(self) -> None:
        try:
            self._ask_for("/begin_weight_update")
        except EngineError:  # a trainer that died has left its session open
            with suppress(EngineError):
                self._ask_for("/end_weight_update")
            self._ask_for("/begin_weight_update")

    def _end(self) -> None:
        _all_of(self._answers)
        self._ask_for("/end_weight_update")
        # while all pause: nothing was computed by half of the weights, and nothing old is cached
        _all_of(self._post("/flush_cache", [None] * len(self._urls)))

    def _ask_for(self, path: str) -> None:
        if self._route.options.get("sessions", True):
            _all_of(self._post(path, [{}] * len(self._urls)))

    def _together(self, act: Callable[[], None]) -> None:
        """Have rank 0 act; every rank waits for it, and raises what it raises."""
        problem = ""
        if self._leads:
            try:
                act()
            except EngineError as error:
                problem = str(error)
        problem = self._exchange(problem)[0]
        if problem:
            raise EngineError(problem)

    def _post(self, path: str, bodies: Sequence[Mapping[str, Any] | None]) -> list[Future[None]]:
        """Send each server its body, side by side."""
        return [self._pool.submit(self._one, url + path, body) for url, body in zip(self._urls, bodies, strict=True)]

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

    SGLang's format is a pickle, made here of a CUDA IPC handle and of names; nothing of the kind is read here. While
    the servers load one bucket the next is gathered. SGLang answers when its copies are queued, not when they are done:
    a bucket is kept until it is answered, and after that torch keeps its memory until the server, whose stream it waits
    for, has let go of it.
    """

    _kept: Tensor | None = None

    def _write(self, weights: WeightStream, version: int, state: Mapping[str, Any]) -> Stored:
        """As `_Push`; afterwards this rank holds no bucket."""
        try:
            return super()._write(weights, version, state)
        finally:
            self._kept, self._answers = None, ()
            if torch.cuda.is_available():
                torch.cuda.ipc_collect()  # or what servers have let go of stays taken until the next time

    def _bucket(self, bucket: list[tuple[str, Tensor]], version: int) -> None:
        flat, metadata = flatten(bucket)
        if flat.is_cuda:
            torch.cuda.synchronize()  # the servers' streams do not wait for this one
        handles = self._exchange(serialize({"flattened_tensor": _Shared(flat), "metadata": metadata}))
        groups = [handles[first : first + self._tp] for first in range(0, len(self._urls) * self._tp, self._tp)]
        if any(len(group) < self._tp for group in groups):
            raise EngineError(
                f"transport 'tensor' needs a trainer rank on every GPU of the engine: {len(self._urls)} servers of "
                f"{self._tp} GPUs, {len(handles)} ranks; use transport distributed or disk"
            )
        fields = {"load_format": "flattened_bucket", "weight_version": str(version), "flush_cache": False}
        bodies = [{"serialized_named_tensors": group, **fields} for group in groups]
        self._together(lambda: self._next(bodies))
        self._kept = flat

    def _next(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        _all_of(self._answers)
        self._answers = self._post("/update_weights_from_tensor", bodies)


class GroupSender(_Push):
    """Rank 0 broadcasts to every rank of every server over a group of their own; for servers on other GPUs."""

    _name = ""
    _group: dist.ProcessGroup | None = None

    def _begin(self) -> None:
        if self._group is None:
            self._group = self._join()
        super()._begin()

    def _join(self) -> dist.ProcessGroup:
        """Meet the servers at a port of the address that they see this machine at; all of them must come at once."""
        world = 1 + self._tp * len(self._urls)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._name = f"mcore_mas-{uuid.uuid4().hex[:12]}"  # one that no trainer has left in the servers
        own = _address_towards(self._urls[0])
        listener = socket.create_server((own, 0))
        port = listener.getsockname()[1]
        fields = {"master_address": own, "master_port": port, "world_size": world}
        fields |= {"group_name": self._name, "backend": backend}
        bodies = [{**fields, "rank_offset": 1 + self._tp * number} for number in range(len(self._urls))]
        joined = self._post("/init_weights_update_group", bodies)
        here = self._pool.submit(_group_of, listener, world, backend, self._name)
        _first_failure_of([*joined, here])
        return here.result()

    def _bucket(self, bucket: list[tuple[str, Tensor]], version: int) -> None:
        self._together(lambda: self._broadcast(bucket, version))

    def _broadcast(self, bucket: list[tuple[str, Tensor]], version: int) -> None:
        flat, metadata = flatten(bucket)
        body = {
            "names": [entry.name for entry in metadata],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in metadata],
            "shapes": [list(entry.shape) for entry in metadata],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "weight_version": str(version),
            "flush_cache": False,
        }
        posts = self._post("/update_weights_from_distributed", [body] * len(self._urls))
        try:
            sent = dist.broadcast(flat, group=self._group, group_src=0, async_op=True)
            _first_failure_of(posts)  # a server that refuses or dies does not receive: what was sent may never end
            sent.wait()
        except (EngineError, RuntimeError) as error:  # the latter from gloo, when a server has died
            self._leave()
            raise error if isinstance(error, EngineError) else EngineError(f"SGLang: broadcast: {error}") from error

    def _leave(self) -> None:
        """Give up a group in which not all have taken part; the next update meets in a new one."""
        group, self._group = self._group, None
        if torch.cuda.is_available():
            dist.distributed_c10d._abort_process_group(group)  # NCCL would wait for what was sent


def _all_of(posts: Iterable[Future[None]]) -> None:
    """Wait for all, then raise what the first of those that failed has raised."""
    for failed in [post.exception() for post in posts]:
        if failed is not None:
            raise failed


def _first_failure_of(posts: Sequence[Future[Any]]) -> None:
    """Wait for all, unless one fails; raise what it has raised."""
    done, _ = wait(posts, return_when=FIRST_EXCEPTION)
    _all_of(post for post in posts if post in done)


class _Shared:
    """A tensor that is unpickled as a view of this process's memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> Any:
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = reduce_tensor(self._tensor)
        if self._tensor.is_cuda:
            # (class, size, stride, offset, storage class, dtype, device, handle, ...): processes number the GPUs that
            # they see, so SGLang takes a GPU's own name in place of its number (utils/patch_torch.py)
            arguments = (*arguments[:6], _name_of(self._tensor.device), *arguments[7:])
        return rebuild, arguments


def _name_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def serialize(payload: object) -> str:
    """What SGLang's `MultiprocessingSerializer.serialize(payload, output_str=True)` gives."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(payload)
    return base64.b64encode(buffer.getvalue()).decode()


def _address_towards(url: str) -> str:
    """This machine's address on the way to the server at `url`; no packet is sent."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "", parts.port or 80))
        return str(probe.getsockname()[0])


def _group_of(listener: socket.socket, world: int, backend: str, name: str) -> dist.ProcessGroup:
    """The group that the servers join as `init_custom_process_group` of SGLang has it, beside the trainer's own."""
    from torch.distributed.distributed_c10d import GroupName, PrefixStore, _new_process_group_helper, _world

    timeout = timedelta(seconds=_TIMEOUT_S)
    address, port = listener.getsockname()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, world, is_master=True, timeout=timeout, master_listen_fd=listener.detach()
    )
    group, _ = _new_process_group_helper(
        world, 0, [], dist.Backend(backend), PrefixStore(name, store), group_name=GroupName(name), timeout=timeout
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    made: dist.ProcessGroup = group
    return made


PUSHED_BUCKET_BYTES = 2 << 30  # over CUDA IPC two of them are there at a time


def flatten(tensors: Iterable[tuple[str, Tensor]]) -> tuple[Tensor, list[Any]]:
    """The tensors' bytes one after the other, uint8, and for each what `FlattenedTensorMetadata` says of it.

    Wider types come first: a view as a type must start at a multiple of its size. SGLang reads the metadata by
    attribute (`_update_weights_from_flattened_bucket` in model_runner_components/weight_updater.py, 0.5.23), and a
    `SimpleNamespace` is among what it unpickles, so its own class is not needed here.
    """
    ordered = sorted(tensors, key=lambda entry: -entry[1].element_size())
    flat = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for _, tensor in ordered])
    ends = accumulate(tensor.nbytes for _, tensor in ordered)
    return flat, [
        SimpleNamespace(name=name, shape=x.shape, dtype=x.dtype, start_idx=end - x.nbytes, end_idx=end, numel=x.nbytes)
        for (name, x), end in zip(ordered, ends, strict=True)
    ]
