"""Weight sync into SGLang servers that pause for it: by CUDA IPC on their own GPUs, or over a process group."""

import base64
import io
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from operator import itemgetter
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch
import torch.distributed as dist
import torch.multiprocessing  # teaches ForkingPickler how tensors travel
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.models.tensors import WeightStream, buckets, complete, tensor_shapes, whole
from rollout.sync import Stored, WeightSender
from rollout.sync.digests import digest_of, digested, sum_of
from rollout.sync.sglang_layout import VOCABULARY, SGLangLayout, held_by, kind_of, of_rank

_TIMEOUT_S = 600.0
_FULL = (
    "flattened_bucket"  # SGLang's load_format for full tensors, of which its ranks take their parts
)


class _Push(WeightSender):
    """What both ways have in common: the servers, the session around an update, and the books.

    Rank 0 alone speaks to the servers. What fails there fails on every rank, at the same tensor of the stream: a rank
    that went on would gather with nobody, or with the next update.
    """

    _answers: Sequence[Future[None]] = ()  # to what was sent last and is not waited for yet
    _kept: Any = None  # that, as long as servers may read it

    def _open(self) -> None:
        route = self._route
        self._urls = route.place.split()
        self._tp = int(route.options.get("tp", 1))
        self._manifest = tensor_shapes(self._route.model)
        headers = (
            {"Authorization": f"Bearer {route.options['key']}"} if route.options.get("key") else {}
        )
        self._http = httpx.Client(headers=headers, trust_env=False, timeout=_TIMEOUT_S)
        self._pool = ThreadPoolExecutor(max_workers=len(self._urls) + 1)

    def _write(self, weights: WeightStream, version: int, state: Mapping[str, Any]) -> Stored:
        """Push bucket by bucket; a failure leaves servers with a mixture, and says so."""
        size, limit = 0, int(self._route.options.get("bucket_bytes", PUSHED_BUCKET_BYTES))
        sums: dict[str, str] = {}
        try:
            with self._session():
                for bucket in buckets(self._entries(weights, sums), limit, itemgetter(0)):
                    form = bucket[0][0][0]
                    size += sum(tensor.nbytes for _, tensor in bucket) * (
                        self._tp if form == "direct" else 1
                    )
                    self._bucket([(name, tensor) for (_, name), tensor in bucket], form, version)
        finally:  # nothing is under way any more, and this rank holds no bucket
            self._answers, self._kept = (), None
            if torch.cuda.is_available():
                torch.cuda.ipc_collect()  # or what servers have let go of stays taken until the next time
        sums = {name: said for part in self._exchange(sums) for name, said in part.items()}
        return self._route.place, sums, size

    def _entries(
        self, weights: WeightStream, sums: dict[str, str]
    ) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """((SGLang's load_format, name), tensor) of what is sent; `sums` gets this rank's part of the checksums."""
        digest = digest_of(self._route, (self._rank, len(self._exchange(None))))
        for name, tensor in digested(weights, self._manifest, digest):
            yield (_FULL, name), tensor
        sums |= digest.finish()

    def _bucket(self, bucket: list[tuple[str, Tensor]], form: str, version: int) -> None:
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
                with suppress(EngineError):  # the failure itself is what matters
                    self._settle()
                with suppress(EngineError):
                    self._ask_for("/end_weight_update")
            raise

    def _begin(self) -> None:
        try:
            self._ask_for("/begin_weight_update")
        except EngineError:  # a trainer that died has left its session open
            with suppress(EngineError):
                self._ask_for("/end_weight_update")
            self._ask_for("/begin_weight_update")

    def _settle(self) -> None:
        """Wait until the servers have what was sent last."""
        _done(self._answers)

    def _end(self) -> None:
        self._settle()
        self._ask_for("/end_weight_update")
        # while all pause: nothing was computed by half of the weights, and nothing old is cached
        _done(self._post("/flush_cache", [None] * len(self._urls)))

    def _ask_for(self, path: str) -> None:
        if self._route.options.get("sessions", True):
            _done(self._post(path, [{}] * len(self._urls)))

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
        return [
            self._pool.submit(self._one, url + path, body)
            for url, body in zip(self._urls, bodies, strict=True)
        ]

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

    A rank sends what the engine's rank has of a tensor, in its layout, where the engine was seen to hold that kind of
    tensor so (`direct`); where trainer and engine are cut alike, nothing is gathered for it (`shares`). Of all else the
    full tensors are sent.

    SGLang's format is a pickle, made here of CUDA IPC handles and of names; nothing of the kind is read here. While
    the servers load one bucket the next is gathered. SGLang answers when its copies are queued, not when they are done:
    a bucket is kept until it is answered, and after that torch keeps its memory until the server, whose stream it waits
    for, has let go of it.
    """

    def _open(self) -> None:
        super()._open()
        self._direct, self._held = (
            self._route.options.get("direct", ()),
            self._route.options.get("held", {}),
        )

    def _layout(self) -> SGLangLayout:
        return SGLangLayout(**self._held, ranks=[self._rank % self._tp])

    def shares(self, ranks: int) -> frozenset[str]:
        """All that is sent directly, if the engine is cut over as many ranks; but experts, which trainers share out."""
        if not self._direct or ranks != self._tp or self._held["kv_heads"] % ranks:
            return frozenset()
        rows, vocab = self._layout().vocab_rows, self._held["vocab"]
        # Megatron's vocabulary is padded to be cut evenly, SGLang's to more than that; no rank is to have nothing of it
        alike = rows == -(-vocab // ranks) and rows * (ranks - 1) < vocab
        names = (
            name for name in self._manifest if self._sent_directly(name) and ".experts." not in name
        )
        return frozenset(name for name in names if alike or name not in VOCABULARY)

    def _sent_directly(self, name: str) -> bool:
        return kind_of(held_by(name)) in self._direct

    def _entries(
        self, weights: WeightStream, sums: dict[str, str]
    ) -> Iterator[tuple[tuple[str, str], Tensor]]:
        if not self._direct:
            yield from super()._entries(weights, sums)
            return
        layout, gpu = self._layout(), bool(self._held["gpu"])

        def sent(
            done: Iterable[tuple[str, Iterable[Tensor]]],
        ) -> Iterator[tuple[tuple[str, str], Tensor]]:
            for held, shards in done:
                (shard,) = shards
                sums[of_rank(held, self._rank % self._tp, self._tp)] = sum_of(shard, gpu=gpu)
                yield (
                    ("direct", held),
                    shard.contiguous(),
                )  # of columns: a copy, so that the others are kept no longer

        full = {
            name: torch.empty(self._manifest[name], device="meta") for name in self.shares(self._tp)
        }
        shares = {name: layout.shares(name, tensor)[0].shape for name, tensor in full.items()}
        for name, rows in complete(weights, self._manifest, shares):
            tensor = whole(rows).detach()
            if self._sent_directly(name):
                yield from sent(
                    layout.add(
                        name, tensor, share=tuple(tensor.shape) != tuple(self._manifest[name])
                    )
                )
            else:
                yield (_FULL, name), tensor
        yield from sent(layout.finish())

    def _bucket(self, bucket: list[tuple[str, Tensor]], form: str, version: int) -> None:
        ranks, flat, own = len(self._urls) * self._tp, None, ""
        if self._rank < ranks:  # torch never frees what is shared and opened by nobody
            flat, metadata = flatten(bucket)
            if flat.is_cuda:
                torch.cuda.synchronize()  # the servers' streams do not wait for this one
            own = serialize(payload_of(form, flat, metadata))
        handles = self._exchange(own)
        groups = [handles[first : first + self._tp] for first in range(0, ranks, self._tp)]
        if any(len(group) < self._tp for group in groups):
            raise EngineError(
                f"transport 'tensor' needs a trainer rank on every GPU of the engine: {len(self._urls)} servers of "
                f"{self._tp} GPUs, {len(handles)} ranks; use transport distributed or disk"
            )
        fields = {"load_format": form, "weight_version": str(version), "flush_cache": False}
        bodies = [{"serialized_named_tensors": group, **fields} for group in groups]
        self._together(lambda: self._next(bodies))
        self._kept = flat

    def _next(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        self._settle()
        self._answers = self._post("/update_weights_from_tensor", bodies)


class GroupSender(_Push):
    """Rank 0 broadcasts to every rank of every server over a group of their own; for servers on other GPUs.

    While the servers receive and load one bucket the next is gathered.
    """

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
        self._name = (
            f"mcore_mas-{uuid.uuid4().hex[:12]}"  # one that no trainer has left in the servers
        )
        own = _address_towards(self._urls[0])
        listener = socket.create_server((own, 0))
        port = listener.getsockname()[1]
        fields = {"master_address": own, "master_port": port, "world_size": world}
        fields |= {"group_name": self._name, "backend": backend}
        bodies = [
            {**fields, "rank_offset": 1 + self._tp * number} for number in range(len(self._urls))
        ]
        joined = self._post("/init_weights_update_group", bodies)
        here = self._pool.submit(_group_of, listener, world, backend, self._name)
        _done([*joined, here], FIRST_EXCEPTION)
        return here.result()

    def _bucket(self, bucket: list[tuple[str, Tensor]], form: str, version: int) -> None:
        self._together(lambda: self._broadcast(bucket, form, version))

    def _broadcast(self, bucket: list[tuple[str, Tensor]], form: str, version: int) -> None:
        flat, metadata = flatten(bucket)
        body = {
            "names": [entry.name for entry in metadata],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in metadata],
            "shapes": [list(entry.shape) for entry in metadata],
            "group_name": self._name,
            "load_format": form,
            "weight_version": str(version),
            "flush_cache": False,
        }
        self._settle()
        self._answers = self._post("/update_weights_from_distributed", [body] * len(self._urls))
        with self._left_if_it_fails():
            self._kept = dist.broadcast(flat, group=self._group, group_src=0, async_op=True), flat

    def _settle(self) -> None:
        (answers, self._answers), (sent, self._kept) = (self._answers, ()), (self._kept, None)
        with self._left_if_it_fails():
            _done(
                answers, FIRST_EXCEPTION
            )  # a server that refuses or dies does not receive: what was sent may never end
            if sent:
                sent[0].wait()

    @contextmanager
    def _left_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except (EngineError, RuntimeError) as error:  # the latter from gloo, when a server has died
            self._leave()
            raise (
                error
                if isinstance(error, EngineError)
                else EngineError(f"SGLang: broadcast: {error}")
            ) from error

    def _leave(self) -> None:
        """Give up a group in which not all have taken part; the next update meets in a new one."""
        group, self._group = self._group, None
        if torch.cuda.is_available():
            dist.distributed_c10d._abort_process_group(group)  # NCCL would wait for what was sent


def _done(posts: Sequence[Future[Any]], until: str = ALL_COMPLETED) -> None:
    """Wait for all, or `until` one fails, and raise what the first that has failed has raised."""
    done, _ = wait(posts, return_when=until)
    for post in posts:
        if post in done:
            post.result()


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


def payload_of(
    form: str, flat: Tensor, metadata: Sequence[Any], shared: Callable[[Tensor], object] = _Shared
) -> object:
    """What SGLang unpickles for a `load_format`, of what `flatten` made: all of it, or a view of each tensor."""
    if form == _FULL:
        return {"flattened_tensor": shared(flat), "metadata": metadata}
    return [
        (x.name, shared(flat[x.start_idx : x.end_idx].view(x.dtype).view(x.shape)))
        for x in metadata
    ]


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
    from torch.distributed.distributed_c10d import (
        GroupName,
        PrefixStore,
        _new_process_group_helper,
        _world,
    )

    timeout = timedelta(seconds=_TIMEOUT_S)
    address, port = listener.getsockname()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, world, is_master=True, timeout=timeout, master_listen_fd=listener.detach()
    )
    group, _ = _new_process_group_helper(
        world,
        0,
        [],
        dist.Backend(backend),
        PrefixStore(name, store),
        group_name=GroupName(name),
        timeout=timeout,
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
    flat = torch.cat(
        [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for _, tensor in ordered]
    )
    ends = accumulate(tensor.nbytes for _, tensor in ordered)
    return flat, [
        SimpleNamespace(
            name=name,
            shape=x.shape,
            dtype=x.dtype,
            start_idx=end - x.nbytes,
            end_idx=end,
            numel=x.nbytes,
        )
        for (name, x), end in zip(ordered, ends, strict=True)
    ]
