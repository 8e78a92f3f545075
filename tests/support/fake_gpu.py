"""The trainer's GPU branch on a machine without one, metered: launches, waits of the host, copies, an estimated time.

torch says that there is CUDA, what is put there lies on its `meta` device, which has shapes and no numbers, and process
groups are torch's fake ones. Every operation is counted with its floating-point operations and bytes. An H200's time
for it is the largest of operations / 0.9 of what its kernel was seen to reach, bytes / (0.8 · 4.8 TB/s), and 2.5 µs; a
copy to or from the host takes bytes / (0.8 · 64 GB/s). Such a figure is a prediction: it is for comparing two versions
of the code.

Operations belong to a region: that of the module that is called, and backward that of the call that made the node.
Memory is page-locked where that was asked for. Streams have clocks, as CUDA's: what one has written another may read
once it waits for it, and memory that another uses must be recorded for it before it is freed.

    python -m tests.support.fake_gpu '{"model": "4b", "layout": "groups", "recompute": "selective"}' ...
"""

# Everything of torch is patched before Megatron is imported, so this is a program, and tests run it as one.
from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import sys
import tempfile
import time
import traceback
import weakref
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

META = torch.device("meta")
OTHER = "other"  # the region of what is in none
PEAK, MEMORY, LAUNCH = 0.9 * 790e12, 0.8 * 4.8e12, 2.5e-6  # operations and bytes a second, seconds
FLOAT32_PEAK = 0.9 * 55e12
TREE_PEAK = 380e12, 350e12  # Triton's flash attention on an H100, forward and backward
GROUPED_PEAK = 600e12, 450e12  # torch's grouped product on an H100, and Triton's of transposed rows
LINK = 0.8 * 64e9  # bytes a second between the device and the host
HOST_LAUNCH = 7e-6  # seconds that the host needs for one
ADVERTISED = 989e12  # what MFU is told of


class Still:
    """The handle of an exchange between ranks, of which nothing is under way."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: self


STREAMS: weakref.WeakSet[Stream] = weakref.WeakSet()


class Stream:
    """A stream of the device: how much it has been given, and how much of others' it comes after."""

    current: Stream  # what is launched goes there
    default: Stream
    cuda_stream = 0
    device = META

    def __init__(self, *_: Any, **__: Any) -> None:
        self.now = 0
        self.after: defaultdict[Stream, int] = defaultdict(int)
        STREAMS.add(self)

    def comes_after(self, other: Stream, then: int) -> bool:
        """Whether what `other` was given by `then` is done before what this one is given now."""
        return other is self or self.after[other] >= then

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        for stream, then in event.after.items():
            self.after[stream] = max(self.after[stream], then)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        METER.waits[place()] += 1
        for stream in STREAMS:  # whatever the host launches from now on
            stream.wait_stream(self)

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        self._outer, Stream.current = Stream.current, self
        return self

    def __exit__(self, *_: object) -> None:
        Stream.current = self._outer


class Event:
    """What a stream had been given, and came after, when this was recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.after: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or Stream.current
        self.after = {**stream.after, stream: stream.now}

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream.current).wait_event(self)

    def synchronize(self) -> None:
        METER.waits[place()] += 1
        for stream in STREAMS:
            stream.wait_event(self)

    def query(self) -> bool:
        return True


Stream.current = Stream.default = Stream()


def synchronize(*_: Any) -> None:
    """The host waits for the device, whatever its streams do."""
    METER.waits[place()] += 1
    for stream in list(STREAMS):
        for other in list(STREAMS):
            stream.wait_stream(other)


class Meter(TorchDispatchMode):
    """Counts what would run on a GPU, by region."""

    FREE = frozenset(
        [
            "view",
            "_unsafe_view",
            "reshape",
            "t",
            "transpose",
            "permute",
            "slice",
            "select",
            "unsqueeze",
            "squeeze",
            "expand",
            "split",
            "detach",
            "alias",
            "mT",
            "chunk",
            "split_with_sizes",
            "as_strided",
            "unbind",
            "unflatten",
            "flatten",
            "_reshape_alias",
            "view_as",
            "lift_fresh",
            "diagonal",
            "empty",
            "empty_like",
            "new_empty",
            "empty_strided",
            "new_empty_strided",
            "set_",
            "resize_",
            "is_same_size",
            "sym_size",
            "numpy_T",
        ]
    )

    def __init__(self) -> None:
        super().__init__()
        self.region = OTHER
        self.bytes = 0  # on the device now
        self._sizes: dict[int, int] = {}  # of each storage there
        self._pinned: set[int] = set()  # storages of page-locked memory
        self._sent: dict[
            int, torch.Tensor
        ] = {}  # what a storage on the device was sent, while it is there
        self._written: dict[
            int, tuple[Stream, int]
        ] = {}  # which stream wrote a storage last, and when
        self._users: defaultdict[int, set[Stream]] = defaultdict(
            set
        )  # of a storage there, of which the memory waits
        self._reused: defaultdict[int, set[Stream]] = defaultdict(set)  # only for these
        self.clear()

    def clear(self) -> None:
        """Begin to count anew."""
        self.peak = self.bytes  # most of them at a time
        self.launches: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.model_operations = (
            0.0  # those of products and attention, of the latter for pairs that see each other
        )
        self.waits: Counter[str] = Counter()  # the host waits for the device: where
        self.copies: Counter[str] = (
            Counter()
        )  # from memory that is not page-locked, or for which the host waits: where
        self.inline: Counter[str] = (
            Counter()
        )  # others to the device, on the stream that computes: where
        self.uploads = 0  # to it, from page-locked memory and beside what it computes
        self.crossed = Counter({"up": 0, "down": 0})  # bytes to the device and from it
        self.order: list[str] = []  # uploads, and micro-batches that begin to be computed
        self.races: Counter[str] = (
            Counter()
        )  # what another stream writes is read, or its memory freed: where
        self.mixed: Counter[str] = Counter()  # operations on tensors of two devices: where
        self._marks: list[tuple[int, str]] = [
            (0, OTHER)
        ]  # from which autograd node on they are of which region

    def held(self, tensor: Any) -> None:
        """Count the storage of a tensor on the device until nobody holds it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type == "meta" and key not in self._sizes and storage.nbytes():
            self._sizes[key] = storage.nbytes()
            self._users[key], self._reused[key] = set(), {Stream.current}
            weakref.finalize(storage, self._freed, key)
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)

    def _freed(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)
        self._sent.pop(key, None)
        self._written.pop(key, None)
        if self._users.pop(key) - self._reused.pop(key):
            self.races["memory is reused while another stream may read it (no record_stream)"] += 1

    def recorded(self, tensor: Any, stream: Stream) -> None:
        """The memory of a tensor is reused only once what `stream` was given by then is done."""
        self._reused[tensor.untyped_storage()._cdata].add(stream)

    def pin(self, tensor: Any) -> None:
        """A tensor's memory is page-locked."""
        storage = tensor.untyped_storage()
        self._pinned.add(storage._cdata)
        weakref.finalize(storage, self._pinned.discard, storage._cdata)

    def pinned(self, tensor: Any) -> bool:
        """Whether a tensor's memory is page-locked."""
        return tensor.untyped_storage()._cdata in self._pinned

    def resized(self, storage: Any, resize: Any, size: int) -> Any:
        """A storage resized; what was on the device counts as it is from now on."""
        if storage._cdata in self._sizes:
            self.bytes += size - self._sizes[storage._cdata]
            self._sizes[storage._cdata] = size
            self.peak = max(self.peak, self.bytes)
        return resize(storage, size)

    def copied(self, storage: Any, copy: Any, source: Any) -> Any:
        """A storage copied on the device, in one launch."""
        if storage.device.type == "meta":
            self.launches[self.region] += 1
            self.seconds[self.region] += max(2 * storage.nbytes() / MEMORY, LAUNCH)
        return copy(storage, source)

    def within(self, name: str | None, function: Any) -> Any:
        """The function, metered as a region; None: as that of the autograd node that calls it."""

        @functools.wraps(function)
        def inner(*arguments: Any, **keywords: Any) -> Any:
            outer = self.region
            self._enter(name or self._here())
            try:
                return function(*arguments, **keywords)
            finally:
                self._enter(outer)

        return inner

    def _enter(self, region: str) -> None:
        self.region = region
        self._marks.append((torch.autograd._get_sequence_nr(), region))  # type: ignore[attr-defined]

    def _here(self) -> str:
        """The region that is entered, or in a backward pass that which the node was made in."""
        node = torch._C._current_autograd_node() if self.region == OTHER else None
        if node is None:
            return self.region
        if node.name() == "struct torch::autograd::AccumulateGrad":
            return "gradients"
        number = node._sequence_nr()  # type: ignore[attr-defined]
        return self._marks[bisect_right(self._marks, number, key=lambda mark: mark[0]) - 1][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, _, name = func._schema.name.partition("::")
        given = tensors((*args, *kwargs.values()))
        there = any(x.device.type == "meta" for x in given)
        if there and (found := self._waited(name, given, args, kwargs)) is not None:
            return found[0]
        if name == "copy_" and given[0].device != given[1].device:
            self._crossed(
                given[1],
                given[0],
                waits=not (args[2] if len(args) > 2 else kwargs.get("non_blocking")),
            )
            return args[0]
        if there and name != "_to_copy" and any(x.device.type == "cpu" and x.dim() for x in given):
            self.mixed[f"{name} {place()}"] += 1
        made = (
            None if there and name.startswith("_fused_adam") else func(*args, **kwargs)
        )  # `meta` has no such kernel
        results = tensors((made,))
        for x in results:
            self.held(x)
        if name not in self.FREE:
            self._ordered(given, results)
        if name == "_to_copy" and not there and any(x.device.type == "meta" for x in results):
            self._crossed(given[0], results[0], waits=not kwargs.get("non_blocking"))
        elif (
            (there or any(x.device.type == "meta" for x in results))
            and name not in self.FREE
            and space != "c10d"
        ):
            self._count(func, name, args, kwargs, given, results, made)
        return made

    def _waited(self, name: str, given: list[Any], args: Any, kwargs: Any) -> tuple[Any] | None:
        """What an operation gives for which the host must wait, counted; None of any other."""
        x = given[0]
        if name == "_local_scalar_dense":
            self.waits[place()] += 1
            return (False if x.dtype == torch.bool else 0.5 if x.dtype.is_floating_point else 0,)
        if name == "equal":
            self.waits[place()] += 1
            return (True,)
        if name in ("nonzero", "masked_select"):
            self.waits[place()] += 1
            return (
                torch.empty(
                    x.numel(),
                    *([x.dim()] if name == "nonzero" else []),
                    dtype=torch.int64,
                    device=META,
                ),
            )
        if (
            name == "_to_copy"
            and kwargs.get("device") is not None
            and torch.device(kwargs["device"]).type == "cpu"
        ):
            copied = torch.zeros(x.shape, dtype=kwargs.get("dtype") or x.dtype)
            if kwargs.get("non_blocking"):
                self.pin(copied)  # as torch makes it then
            self._crossed(x, copied, waits=not kwargs.get("non_blocking"))
            return (copied,)
        places = args[1] if name.startswith("index") and isinstance(args[1], list) else []
        masks = [i for i in places if i is not None and i.dtype == torch.bool]
        if (
            masks and name != "index" and args[2].numel() == 1
        ):  # torch fills by mask, for which nobody waits
            self.launches[self._here()] += 1
            return (args[0],)
        if name in ("index", "index_put_", "_index_put_impl_") and masks:
            self.waits[place()] += 1
            whole = torch.zeros(masks[0].numel(), dtype=torch.int64, device=META)
            places = [i if i is None or i.dtype != torch.bool else whole for i in args[1]]
            operator = getattr(torch.ops.aten, name)
            return (operator(args[0].flatten(0, masks[0].dim() - 1), places, *args[2:]),)
        return None

    def _crossed(self, source: torch.Tensor, target: torch.Tensor, *, waits: bool) -> None:
        """A copy between host and device."""
        to_host = target.device.type == "cpu"
        locked = self.pinned(target if to_host else source)
        self.crossed["down" if to_host else "up"] += source.nbytes
        if to_host or Stream.current is Stream.default:
            self.seconds["copies"] += source.nbytes / LINK
        if to_host:
            if waits or not locked:
                self.waits[place()] += 1
            return
        if not locked or waits:
            self.copies[f"{place()}, {'blocking' if locked else 'pageable'}"] += 1
        elif Stream.current is Stream.default:
            self.inline[place()] += 1
        else:
            self.uploads += 1
            self.order.append("upload")
        if source.numel() == source.untyped_storage().nbytes():  # bytes that travel together
            self._sent[target.untyped_storage()._cdata] = source

    def _ordered(self, given: list[Any], results: list[Any]) -> None:
        """An operation is given to the current stream: whether it comes after those that made what it reads."""
        stream = Stream.current
        stream.now += 1
        for key in {x.untyped_storage()._cdata for x in given if x.device.type == "meta"}:
            writer, then = self._written.get(key, (stream, 0))
            if not stream.comes_after(writer, then):
                self.races[f"{place()} reads what another stream may not have written"] += 1
            if key in self._sizes:
                self._users[key].add(stream)
        for x in results:
            if x.device.type == "meta":
                self._written[x.untyped_storage()._cdata] = stream, stream.now

    def _pairs(self, ends: torch.Tensor) -> int:
        """Pairs of a query and a key that it sees, of tree attention's plan as the device was sent it."""
        sent = self._sent[ends.untyped_storage()._cdata].view(torch.int32)[ends.storage_offset() :][
            : len(ends)
        ]
        return int((sent - torch.arange(len(sent))).sum())

    def _count(
        self, func: Any, name: str, args: Any, kwargs: Any, given: Any, results: Any, made: Any
    ) -> None:
        operations, launches = 0.0, 1
        moved = sum(x.nbytes for x in (*given, *results))
        if name in ("embedding", "index", "index_select", "gather"):
            moved = 2 * sum(x.nbytes for x in results)
        elif name in ("zeros", "zeros_like", "ones", "full", "zero_", "fill_"):
            moved = sum(x.nbytes for x in results or given[:1])
        peak = PEAK if any(x.dtype == torch.bfloat16 for x in given) else FLOAT32_PEAK
        useful = None
        if name.startswith("tree_attention"):
            operations, launches, peak = tree_attention(name, args)
            forward = name == "tree_attention"
            queries, ends = (args[0], args[3][0]) if forward else (args[1][0], args[2][0])
            # two products over what is seen, and twice as much for their gradients
            useful = (
                (4.0 if forward else 8.0) * self._pairs(ends) * queries.shape[1] * queries.shape[2]
            )
        elif name == "_grouped_mm":
            operations, peak = 2.0 * given[0].numel() * results[0].shape[1], GROUPED_PEAK[0]
        elif name == "add_grouped":
            operations, peak = 2.0 * given[1].numel() * given[2].shape[1], GROUPED_PEAK[1]
            moved += given[0].nbytes  # which is read and written
        elif func._overloadpacket in flop_registry:
            plain = (
                args if "attention" in name else [x for x in args if isinstance(x, torch.Tensor)]
            )
            operations = flop_registry[func._overloadpacket](*plain, out_val=made)
            if "attention" in name:
                causal = any(x is True for x in args[4:8]) or kwargs.get("is_causal")
                operations /= 2 if causal else 1
                peak = (0.9 * 545e12 if peak == PEAK else 0.9 * 30e12) * (
                    0.75 if "backward" in name else 1
                )
        region = self._here()
        if name == "embedding" and region == "embedding":
            self.order.append("compute")
        self.model_operations += operations if useful is None else useful
        self.launches[region] += launches
        self.seconds[region] += max(operations / peak, moved / MEMORY, LAUNCH * launches)


METER = Meter()


def tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Those of an operator's arguments or results."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors(value)
    return found


def tree_attention(name: str, args: Any) -> tuple[float, int, float]:
    """Operations of the tiles that the kernels go through, launches, and the rate to expect."""
    forward = name == "tree_attention"
    (_, k, *_), plan, sizes = (
        (args[:3], args[3], args[4]) if forward else (args[1], args[2], args[3])
    )
    multiplied = plan[1].numel() * sizes[1] * sizes[2] * k.shape[1] * k.shape[2]
    # two products forward; three for the gradient of queries, four for those of keys and values
    return (4.0 * multiplied, 1, TREE_PEAK[0]) if forward else (14.0 * multiplied, 2, TREE_PEAK[1])


def place() -> str:
    """Which function of the project or of Megatron asked for it."""
    for frame in reversed(traceback.extract_stack()):
        if any(part in frame.filename for part in ("/mcore_mas/", "/rollout/", "/megatron/core/")):
            return f"{Path(frame.filename).name} {frame.name}"
    return "?"


IS_CUDA = torch.Tensor.is_cuda.__get__


class OnMeta(TorchFunctionMode):
    """What is asked for on CUDA is made on `meta`; what is to be page-locked is remembered."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "device" in kwargs:
            kwargs["device"] = elsewhere(kwargs["device"])
        if name == "to":
            args = tuple(elsewhere(x) for x in args)
        if name == "cuda":
            return args[0].to(META, **kwargs)
        if name == "__get__" and func == IS_CUDA:
            return args[0].device.type == "meta"
        if name == "is_pinned":
            return METER.pinned(args[0])
        if (
            name in ("tensor", "as_tensor")
            and kwargs.get("device") == META
            and not isinstance(args[0], torch.Tensor)
        ):
            METER.copies[f"{place()}, pageable"] += 1  # numbers of Python's
        pinned = kwargs.pop("pin_memory", False) or name == "pin_memory"
        made = args[0].clone() if name == "pin_memory" else func(*args, **kwargs)
        if pinned:
            METER.pin(made)
        return made


def elsewhere(device: Any) -> Any:
    """`meta` for CUDA, and anything else as it is."""
    return (
        META
        if str(device).startswith("cuda") and isinstance(device, str | torch.device)
        else device
    )


class FusedNorm(torch.autograd.Function):
    """CUDA's root-mean-square norm: one launch forward, two backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, of_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return of_out * x, (of_out * x).reshape(-1, len(weight)).sum(0)


def pretend() -> None:
    """Make torch say that there is a GPU, and nothing but shapes be computed on it."""
    cuda = torch.cuda
    properties = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, name="H200", total_memory=141 << 30
    )
    properties.shared_memory_per_block_optin = 227 << 10
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": META,
        "get_device_capability": (9, 0),
    }
    answers |= {
        "get_device_properties": properties,
        "is_initialized": False,
        "get_device_name": "H200",
    }
    answers |= {"mem_get_info": (140 << 30, 141 << 30), "max_memory_allocated": 0}
    answers |= dict.fromkeys(("set_device", "empty_cache", "ipc_collect", "manual_seed_all"))
    answers |= dict.fromkeys(("reset_peak_memory_stats", "set_sync_debug_mode"))
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    cuda.Stream, cuda.Event, cuda.synchronize = Stream, Event, synchronize
    cuda.current_stream, cuda.default_stream = lambda *_: Stream.current, lambda *_: Stream.default
    cuda.stream = lambda stream: stream or contextlib.nullcontext()
    torch.Tensor.record_stream = lambda x, stream: METER.recorded(x, stream)
    kind = torch.Tensor.type
    names = {torch.float32: "FloatTensor", torch.bfloat16: "BFloat16Tensor"}
    torch.Tensor.type = lambda x, dtype=None, *a, **k: (
        kind(x, dtype, *a, **k)
        if dtype is not None
        else f"torch.cuda.{names.get(x.dtype, 'Tensor')}"
    )
    # Megatron takes some of these as it is imported
    init, group = dist.init_process_group, dist.new_group
    dist.init_process_group = lambda backend=None, rank=0, world_size=1, **_: init(
        "fake", rank=rank, world_size=world_size, store=FakeStore()
    )
    dist.new_group = lambda ranks=None, timeout=None, backend=None, **_: group(
        ranks, backend="fake"
    )
    for name in (
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "broadcast",
        "all_gather",
        "barrier",
    ):
        setattr(dist, name, lambda *_, **__: Still())
    for name in ("all_to_all_single", "_reduce_scatter_base", "_all_gather_base", "reduce_scatter"):
        setattr(dist, name, lambda *_, **__: Still())
    dist._coalescing_manager = lambda *_, **__: contextlib.nullcontext(Still())
    importlib.import_module("megatron.core.jit").disable_jit_fuser()
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *_, **__: torch.empty(
        0, dtype=torch.uint8
    )
    torch.nn.Module._apply = move
    norm = torch.nn.functional.rms_norm
    torch.nn.functional.rms_norm = (
        lambda x, shape, weight, eps: (  # `meta` has no kernel for it, as CUDA has
            FusedNorm.apply(x, weight) if x.device.type == "meta" else norm(x, shape, weight, eps)
        )
    )
    grouped = torch.nn.functional.grouped_mm
    torch.nn.functional.grouped_mm = lambda x, stack, offs: (  # `meta` knows that of bfloat16 alone
        x.new_empty(len(x), stack.shape[2])
        if x.dtype == torch.float32
        else grouped(x, stack, offs=offs)
    )
    # a torch that is built for CUDA would ask it for its stream
    torch.accelerator.current_accelerator = lambda check_available=False: None
    importlib.import_module("torch.optim.adam")._device_dtype_check_for_fused = lambda *_, **__: (
        None
    )


def move(module: Any, change: Any, recurse: bool = True) -> Any:
    """`Module._apply` between `cpu` and `meta`, which torch refuses: parameters are made anew."""
    for child in module.children():
        child._apply(change)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            moved = change(parameter)
        if (moved.dtype, moved.device) != (parameter.dtype, parameter.device):
            new = torch.nn.Parameter(moved.detach(), parameter.requires_grad)
            new.__dict__.update(parameter.__dict__)
            module._parameters[name] = new
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else change(buffer)
    return module


def measure(
    folder: Path,
    *,
    model: str,
    layout: str,
    microbatches: int = 1,
    agents: int = 1,
    updates: int = 1,
    reference: bool = False,
    change: str = "",
    **spec: Any,
) -> dict[str, Any]:
    """One update of a model of `benchmarks.gpu.shapes`, or the last of several, as figures; with a change for worse.

    Every one of `agents` has so many micro-batches. With `reference`: the reference's scores after these updates, from
    the second time on.
    """
    from benchmarks.gpu.shapes import LAYOUTS, MODELS, make_batch, write_model
    from mcore_mas.config.policy import LoraConfig
    from mcore_mas.equations.losses import ValueObjective
    from mcore_mas.megatron.batch import CostModel
    from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
    from mcore_mas.megatron.step.trainer import MegatronTrainer

    path, meter = write_model(model, folder / model), METER
    if "lora" in spec:
        spec["lora"] = LoraConfig(**spec["lora"])
    if critic := spec.get("head") == "value":
        spec["objective"] = ValueObjective()
    trainer_spec = TrainerSpec(model=str(path), init="random", **{"bf16": True, **spec})
    vocab = int(MODELS[model]["vocab_size"])
    began = time.process_time()
    gc.collect()
    others = meter.bytes  # of earlier trainers
    with OnMeta(), meter, CHANGES[change]():
        init_process_groups(trainer_spec, rank=0, threads=1)
        trainer = MegatronTrainer(trainer_spec)
        batches = [
            make_batch(LAYOUTS[layout], vocab=vocab, seed=i)
            for i in range(microbatches * trainer_spec.dp)
        ]
        batches = [replace(batch, agent=f"agent {i}") for i in range(agents) for batch in batches]
        if critic:
            batches = [
                replace(batch, values=batch.weights, returns=batch.advantages) for batch in batches
            ]
        for run in [trainer.update] * updates + [
            partial(trainer.score, reference=True)
        ] * 2 * reference:
            meter.clear()
            kept = meter.bytes - others
            run(batches)
        destroy_process_groups()
    layers = int(MODELS[model]["num_hidden_layers"])
    trained = sum(p.numel() for p in trainer.model.trained_parameters.values())
    seconds, launches = sum(meter.seconds.values()), sum(meter.launches.values())
    flops = CostModel.of(trainer_spec).flops(*batches) / trainer_spec.ranks
    return {
        "model": model,
        "layout": layout,
        "recompute": trainer_spec.recompute,
        "tokens": len(batches[0].token_ids),
        "trained": trained,
        "bytes": {"kept": kept, "peak": meter.peak - others},
        "launches": launches,
        "launches_by_region": dict(meter.launches.most_common()),
        "launches_per_layer": {
            name: meter.launches[name] / layers / microbatches for name in IN_LAYERS
        },
        "milliseconds": {
            name: round(1e3 * value, 1) for name, value in meter.seconds.most_common()
        },
        "mfu": round(flops / max(seconds, launches * HOST_LAUNCH) / ADVERTISED, 3),
        "operations": {"counted": meter.model_operations, "model": flops},
        "waits": dict(+meter.waits),
        "copies": dict(meter.copies),
        "inline": dict(meter.inline),
        "uploads": meter.uploads,
        "crossed": dict(meter.crossed),
        "order": meter.order,
        "races": dict(meter.races),
        "mixed": dict(meter.mixed),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


IN_LAYERS = ("attention", "projections", "mlp", "layer")


def regions() -> None:
    """Say which function is of which region; what is inside is not of what is around it."""
    decoder = "mcore_mas.megatron.model.decoder"
    transformer = "megatron.core.transformer"
    trainer = "mcore_mas.megatron.step.trainer"
    for module, owner, method, region in (
        ("mcore_mas.megatron.model.attention", "TreeAttention", "forward", "attention"),
        (
            f"{transformer}.attention",
            "SelfAttention",
            "forward",
            "projections",
        ),  # norms and rotations among them
        ("mcore_mas.megatron.model.mlp", "GatedMLP", "forward", "mlp"),
        (f"{transformer}.moe.moe_layer", "MoELayer", "forward", "mlp"),
        (f"{transformer}.transformer_layer", "TransformerLayer", "forward", "layer"),
        (decoder, "PackedGPTModel", "_preprocess", "embedding"),
        (decoder, "PackedGPTModel", "_postprocess", "head"),
        ("megatron.core.tensor_parallel.random", "CheckpointWithoutOutput", "_recompute", None),
        ("mcore_mas.megatron.step.pipeline", "Pipeline", "_train", "loss"),
        (trainer, "MegatronTrainer", "_step", "optimizer"),
        (trainer, "MegatronTrainer", "_gradient_norm", "norms"),
    ):
        where = getattr(importlib.import_module(module), owner)
        setattr(where, method, METER.within(region, getattr(where, method)))


def worse(where: str, name: str, change: Callable[[Any], Any]) -> Callable[[], Any]:
    """A block in which `name` of what `where` says is what `change` makes of it."""

    def block() -> Any:
        module, _, owner = where.partition(":")
        target = importlib.import_module(module)
        target = getattr(target, owner) if owner else target
        return mock.patch.object(target, name, change(getattr(target, name)))

    return block


def one_by_one(_: Any) -> Any:
    """In place of `prefetch`: each when it is asked for."""
    from mcore_mas.megatron.transfer import upload

    def found(values: Any, device: Any, stream: Any) -> Iterator[Any]:
        for value in values:
            there = upload(value, device, stream)
            Stream.current.wait_stream(stream)
            yield there

    return found


def before(function: Any, first: Callable[[], Any]) -> Any:
    """The function, but `first` comes before it."""
    return lambda *arguments, **keywords: (first(), function(*arguments, **keywords))[1]


@contextlib.contextmanager
def without_fused_layers() -> Iterator[None]:
    """Compute norms, SwiGLU and head without Triton's kernels."""
    with contextlib.ExitStack() as stack:
        for name in ("norm", "mlp", "head"):
            module = importlib.import_module(f"mcore_mas.megatron.model.{name}")
            stack.enter_context(mock.patch.object(module, "use_triton", lambda _: False))
        yield


PIPELINE = "mcore_mas.megatron.step.pipeline"
# what would make an update slow or wrong on a GPU, and nobody would see on a CPU
CHANGES: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "rotation not fused": worse(
        "mcore_mas.megatron.model.build", "_fuse_rotation", lambda _: lambda: False
    ),
    "SwiGLU and head not fused": without_fused_layers,
    "pageable": worse(
        "torch", "empty", lambda empty: lambda *a, pin_memory=False, **k: empty(*a, **k)
    ),
    "waiting in each step": worse(
        f"{PIPELINE}:Pipeline", "_step", lambda f: before(f, torch.cuda.synchronize)
    ),
    "a stream's wait in each step": worse(
        f"{PIPELINE}:Pipeline",
        "_step",
        lambda f: before(f, lambda: torch.cuda.current_stream().synchronize()),
    ),
    "not ahead": worse(PIPELINE, "prefetch", one_by_one),
    "read too early": worse(__name__ + ":Stream", "wait_event", lambda _: lambda *_: None),
    "freed too early": worse(__name__ + ":Meter", "recorded", lambda _: lambda *_: None),
}


def even_exchange() -> None:
    """Ranks send each other equally many rows to experts, each of which gets as many: the device knows no numbers."""
    dispatcher = importlib.import_module(
        "megatron.core.transformer.moe.token_dispatcher"
    ).MoEAlltoAllTokenDispatcher
    known = dispatcher._maybe_dtoh_and_synchronize

    def even(self: Any, point: str, *arguments: Any) -> Any:
        there = known(self, point, *arguments)
        if point == self.cuda_dtoh_point and self.ep_size > 1:
            rows = self.num_out_tokens // self.ep_size
            self.input_splits[:] = self.output_splits[:] = rows
            self.output_splits_tp[:] = rows * self.ep_size
            each = rows // self.num_local_experts
            self.num_global_tokens_per_local_expert.fill_(each)[:, 0] += (
                rows - each * self.num_local_experts
            )
        return there

    dispatcher._maybe_dtoh_and_synchronize = even


def prepare() -> None:
    """Make torch `pretend`, and meter the trainer's regions."""
    pretend()
    from mcore_mas.megatron import device

    device.rank_device = lambda: META  # before other modules import it from there
    from mcore_mas.megatron import collectives

    collectives.all_gather_json = lambda value, group=None: [value] * dist.get_world_size(group)
    from mcore_mas.megatron.state import tensor_sources

    tensor_sources.RandomTensors._draw = lambda self, name: torch.empty(self.shapes[name])  # type: ignore[method-assign]
    regions()
    even_exchange()
    resize, copy = torch.UntypedStorage.resize_, torch.UntypedStorage.copy_
    torch.UntypedStorage.resize_ = lambda storage, size: METER.resized(storage, resize, size)
    torch.UntypedStorage.copy_ = lambda storage, source, *_: METER.copied(storage, copy, source)


def main(cases: list[str]) -> None:
    """Measure each case, a JSON object of `measure`'s arguments, and print a line of JSON for it."""
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            print(json.dumps(measure(Path(folder), **json.loads(case))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
