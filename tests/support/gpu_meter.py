"""Meter of the operations that a GPU would run: launches, floating-point operations, bytes and time.

The rates are those that an H100 reached (`benchmarks/gpu/results.jsonl`). An operation takes the
largest of: operations / rate of its kernel, bytes / rate of the memory, and 2.5 µs a launch. A copy to
or from the host takes bytes / (0.8 · 64 GB/s). Copies on streams of their own run beside kernels, and in
both directions at once.

Host and device have a clock each. A kernel starts when the device has ended the one before it and the
host has launched it; the time between is idle. When the host waits, its clock is set to the device's.

An operation belongs to a region: the one of the module that was called. In a backward pass it is the
region of the call that made the autograd node.
"""

from __future__ import annotations

import functools
import math
import weakref
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tests.support.gpu_streams import CLOCK, HOST_WAITS, META, Stream, calling_function, count_wait

OTHER = "other"  # region of operations outside all others

# Measured on an H100: AdamW and copies, a launch
MEMORY_BANDWIDTH = 2.76e12  # bytes a second
HOST_LAUNCH_S = 9.54e-6  # seconds that the host needs to launch a kernel
# Triton's tree attention with heads of 128, with the masked pairs of its tiles: output, gradient of
# queries, and gradients of keys and values. The last one was measured with tiles of 64 keys, where two
# groups of warps make the same two of four products; the rate includes these.
TREE_FORWARD_FLOPS = 257e12
TREE_QUERIES_FLOPS = 296e12
TREE_KEYS_FLOPS = 264e12
# Products: the best rate of large ones was 798 TFLOP/s, and all of an update of 1.7b had 735. A product is
# computed in waves of one tile for each multiprocessor, and a tile takes as long as its columns and
# a start of `_TILE_START` columns.
BF16_FLOPS = 817e12
_MULTIPROCESSORS = 132
_TILE_START = 192
_TILES = ((128, 256), (256, 128), (192, 192), (128, 128))
_SPLITS = (1, 2, 4, 8)  # parts of the columns that are summed, if there are few tiles
# Not measured
FLOAT32_FLOPS = 0.9 * 55e12
LAUNCH_S = 2.5e-6
LINK_BANDWIDTH = 0.8 * 64e9  # bytes a second between device and host
BF16_ATTENTION_FLOPS = 0.9 * 545e12
FLOAT32_ATTENTION_FLOPS = 0.9 * 30e12
# torch's grouped product on an H100, and Triton's of transposed rows
GROUPED_FLOPS = 600e12
GROUPED_GRADIENT_FLOPS = 450e12

# Elements and tensors that a launch of an operator of many tensors takes at most
_ELEMENTS_PER_LAUNCH = 320 * 65_536
_TENSORS_PER_LAUNCH = 36

# Operators that launch no kernel
_FREE_OPERATORS = frozenset(
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


class Meter(TorchDispatchMode):
    """Counts of operations on tensors of the `meta` device, which stands for the GPU.

    Attributes:
        region: region that operations are counted in.
        bytes: bytes on the device now.
        peak: largest number of bytes on the device since `clear`.
        launches: kernels by region.
        seconds: estimated seconds by region.
        moved_bytes: bytes that kernels read from and write to the device's memory.
        model_operations: floating-point operations of products and attention; of attention, for
            pairs of tokens that see each other only.
        waits: waits of the host for the device, by calling function.
        copies: copies to the device from memory that is not page-locked, or for which the host
            waits, by calling function.
        inline: other copies to the device on the stream that computes, by calling function.
        uploads: copies to the device from page-locked memory on another stream.
        crossed: bytes to the device ("up") and from it ("down").
        order: "upload" for each such copy, and "compute" for each micro-batch that begins.
        races: reads of tensors that another stream may not have written yet, and memory that is
            freed while another stream may read it.
        mixed: operations on tensors of two devices, by operator and calling function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.region = OTHER
        self.bytes = 0
        self._sizes: dict[int, int] = {}  # bytes by storage on the device
        self._pinned: set[int] = set()  # storages of page-locked memory
        # host tensor that a storage on the device was last filled from
        self._uploaded: dict[int, torch.Tensor] = {}
        # stream that last wrote a storage, and its number of operations then
        self._writers: dict[int, tuple[Stream, int]] = {}
        # streams that use a storage, with their number of operations then
        self._users: defaultdict[int, dict[Stream, int]] = defaultdict(dict)
        self._owners: dict[int, Stream] = {}  # stream that a storage was allocated on
        # streams that the allocator waits for before it reuses a storage's memory
        self._recorded: defaultdict[int, set[Stream]] = defaultdict(set)
        self.clear()

    def clear(self) -> None:
        """Reset the counts."""
        self.peak = self.bytes
        self.launches: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.moved_bytes = 0
        CLOCK.reset()
        self.model_operations = 0.0
        HOST_WAITS.clear()
        self.copies: Counter[str] = Counter()
        self.inline: Counter[str] = Counter()
        self.uploads = 0
        self.crossed = Counter({"up": 0, "down": 0})
        self.order: list[str] = []
        self.races: Counter[str] = Counter()
        self.mixed: Counter[str] = Counter()
        # (first autograd sequence number, region of the nodes from there on)
        self._region_marks: list[tuple[int, str]] = [(0, OTHER)]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler, which would be asked at each operation."""
        return False

    @property
    def waits(self) -> Counter[str]:
        return HOST_WAITS

    def add_storage(self, tensor: Any) -> None:
        """Count the bytes of a tensor's storage on the device until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type == "meta" and key not in self._sizes and storage.nbytes():
            self._sizes[key] = storage.nbytes()
            self._users[key] = {}
            self._owners[key] = Stream.current
            self._recorded[key] = {Stream.current}
            weakref.finalize(storage, self._remove_storage, key)
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)

    def _remove_storage(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)
        self._uploaded.pop(key, None)
        self._writers.pop(key, None)
        owner = self._owners.pop(key)
        recorded = self._recorded.pop(key)
        unsafe = [
            stream
            for stream, operations in self._users.pop(key).items()
            if stream not in recorded and not owner.comes_after(stream, operations)
        ]
        if unsafe:
            self.races["memory is reused while another stream may read it (no record_stream)"] += 1

    def record_stream(self, tensor: Any, stream: Stream) -> None:
        """Keep a tensor's memory until `stream` has done what it was given; see torch."""
        self._recorded[tensor.untyped_storage()._cdata].add(stream)

    def pin(self, tensor: Any) -> None:
        """Register a tensor's memory as page-locked."""
        storage = tensor.untyped_storage()
        self._pinned.add(storage._cdata)
        weakref.finalize(storage, self._pinned.discard, storage._cdata)

    def is_pinned(self, tensor: Any) -> bool:
        """Return True if a tensor's memory is page-locked."""
        return tensor.untyped_storage()._cdata in self._pinned

    def resize_storage(self, storage: Any, resize: Any, size: int) -> Any:
        """Resize a storage by `resize`, and count its new size."""
        if storage._cdata in self._sizes:
            self.bytes += size - self._sizes[storage._cdata]
            self._sizes[storage._cdata] = size
            self.peak = max(self.peak, self.bytes)
        return resize(storage, size)

    def copy_storage(self, storage: Any, copy: Any, source: Any) -> Any:
        """Copy a storage by `copy`, and count one launch on the device."""
        if storage.device.type == "meta":
            self._add_kernels(self.region, 1, 2 * storage.nbytes() / MEMORY_BANDWIDTH)
        return copy(storage, source)

    def in_region(self, region: str | None, function: Any) -> Any:
        """Return the function, whose operations are counted in a region.

        Args:
            region: the region; None for that of the autograd node that calls the function.
        """

        @functools.wraps(function)
        def inner(*arguments: Any, **keywords: Any) -> Any:
            previous = self.region
            self._enter(region or self._current_region())
            try:
                return function(*arguments, **keywords)
            finally:
                self._enter(previous)

        return inner

    def _enter(self, region: str) -> None:
        self.region = region
        sequence_number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._region_marks.append((sequence_number, region))

    def _current_region(self) -> str:
        """Return the entered region, or in a backward pass the region that made the node."""
        if self.region != OTHER:
            return self.region
        node = torch._C._current_autograd_node()
        if node is None:
            return self.region
        if node.name() == "struct torch::autograd::AccumulateGrad":
            return "gradients"
        sequence_number = node._sequence_nr()  # type: ignore[attr-defined]
        position = bisect_right(self._region_marks, sequence_number, key=lambda mark: mark[0])
        return self._region_marks[position - 1][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        inputs = find_tensors((*args, *kwargs.values()))
        on_device = any(tensor.device.type == "meta" for tensor in inputs)

        if on_device:
            handled, result = self._run_blocking(name, inputs, args, kwargs)
            if handled:
                return result
        if name == "copy_" and inputs[0].device != inputs[1].device:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")
            self._order_on_stream(inputs, inputs[:1])
            self._count_transfer(inputs[1], inputs[0], waits=not non_blocking)
            return args[0]
        # scalars on the host are arguments of kernels
        host_tensors = [tensor for tensor in inputs if tensor.device.type == "cpu" and tensor.dim()]
        if on_device and host_tensors and name != "_to_copy":
            self.mixed[f"{name} {calling_function()}"] += 1

        # `meta` has no fused Adam
        result = None if on_device and name.startswith("_fused_adam") else func(*args, **kwargs)
        outputs = find_tensors((result,))
        for tensor in outputs:
            self.add_storage(tensor)
        if name not in _FREE_OPERATORS:
            self._order_on_stream(inputs, outputs)

        makes_on_device = any(tensor.device.type == "meta" for tensor in outputs)
        if name == "_to_copy" and not on_device and makes_on_device:
            waits = not kwargs.get("non_blocking")
            self._count_transfer(inputs[0], outputs[0], waits=waits)
        elif (on_device or makes_on_device) and name not in _FREE_OPERATORS and namespace != "c10d":
            self._count_kernel(
                func,
                name,
                args=args,
                kwargs=kwargs,
                inputs=inputs,
                outputs=outputs,
                result=result,
            )
        return result

    def _run_blocking(
        self, name: str, inputs: list[Any], args: Any, kwargs: Any
    ) -> tuple[bool, Any]:
        """Run an operation for whose result the host waits, and count the wait.

        Returns:
            True and the result; or False and None if the operation is of another kind.
        """
        x = inputs[0]
        if name == "_local_scalar_dense":
            count_wait()
            if x.dtype == torch.bool:
                return True, False
            return True, 0.5 if x.dtype.is_floating_point else 0
        if name == "equal":
            count_wait()
            return True, True
        if name in ("nonzero", "masked_select"):
            count_wait()
            shape = [x.numel(), x.dim()] if name == "nonzero" else [x.numel()]
            return True, torch.empty(*shape, dtype=torch.int64, device=META)
        target = kwargs.get("device")
        if name == "_to_copy" and target is not None and torch.device(target).type == "cpu":
            copied = _host_zeros(x.shape, kwargs.get("dtype") or x.dtype)
            if kwargs.get("non_blocking"):
                self.pin(copied)  # as torch allocates it then
            self._count_transfer(x, copied, waits=not kwargs.get("non_blocking"))
            return True, copied

        indices = args[1] if name.startswith("index") and isinstance(args[1], list) else []
        masks = [index for index in indices if index is not None and index.dtype == torch.bool]
        if masks and name != "index" and args[2].numel() == 1:
            # torch calls masked_fill for it, which does not wait
            self._add_kernels(self._current_region(), 1, args[0].nbytes / MEMORY_BANDWIDTH)
            return True, args[0]
        if masks and name in ("index", "index_put_", "_index_put_impl_"):
            count_wait()
            every_row = torch.zeros(masks[0].numel(), dtype=torch.int64, device=META)
            row_indices = []
            for index in indices:
                is_mask = index is not None and index.dtype == torch.bool
                row_indices.append(every_row if is_mask else index)
            operator = getattr(torch.ops.aten, name)
            flattened = args[0].flatten(0, masks[0].dim() - 1)
            return True, operator(flattened, row_indices, *args[2:])
        return False, None

    def _count_transfer(self, source: torch.Tensor, target: torch.Tensor, *, waits: bool) -> None:
        """Count a copy between host and device."""
        to_host = target.device.type == "cpu"
        is_pinned = self.is_pinned(target if to_host else source)
        self.crossed["down" if to_host else "up"] += source.nbytes
        copy_s = source.nbytes / LINK_BANDWIDTH
        if Stream.current is Stream.default:
            self.seconds["copies"] += copy_s
        Stream.current.launch_copy(HOST_LAUNCH_S, copy_s)
        if to_host:
            if waits or not is_pinned:
                count_wait()
            return

        if not is_pinned or waits:
            kind = "blocking" if is_pinned else "pageable"
            self.copies[f"{calling_function()}, {kind}"] += 1
        elif Stream.current is Stream.default:
            self.inline[calling_function()] += 1
        else:
            self.uploads += 1
            self.order.append("upload")
        # A micro-batch with its attention plan is uploaded as one tensor of bytes, and the inputs of the
        # embedded engine as one of int32.
        is_packed = source.dtype in (torch.uint8, torch.int32)
        if is_packed and source.nbytes == source.untyped_storage().nbytes():
            self._uploaded[target.untyped_storage()._cdata] = source

    def _order_on_stream(self, inputs: list[Any], outputs: list[Any]) -> None:
        """Give an operation to the current stream; count a race if its inputs may not be ready."""
        stream = Stream.current
        stream.operations += 1
        keys = {x.untyped_storage()._cdata for x in inputs if x.device.type == "meta"}
        for key in keys:
            writer, operations = self._writers.get(key, (stream, 0))
            if not stream.comes_after(writer, operations):
                race = f"{calling_function()} reads what another stream may not have written"
                self.races[race] += 1
            if key in self._sizes:
                self._users[key][stream] = stream.operations
        for x in outputs:
            if x.device.type == "meta":
                self._writers[x.untyped_storage()._cdata] = (stream, stream.operations)

    def _visible_pairs(self, ends: torch.Tensor) -> int:
        """Return the number of pairs of a query and a key that the query sees.

        They are counted from the ends of tree attention's plan.
        """
        numbers = self._uploaded_numbers(ends)
        return int((numbers - torch.arange(len(numbers))).sum())

    def _cache_pairs(self, blocks: torch.Tensor) -> tuple[int, int]:
        """Return the number of pairs of a query and a key that it sees, and that of keys that the blocks read.

        `blocks` are those of the embedded engine's `attend_to_cache`.
        """
        uploaded = self._uploaded[blocks.untyped_storage()._cdata].view(torch.int32)
        first = blocks.storage_offset()
        numbers = uploaded[first : first + blocks.numel()].view(-1, 4)
        counts = numbers[:, 2]
        positions = numbers[:, 3]
        pairs = counts * positions + counts * (counts + 1) // 2
        return int(pairs.sum()), int((positions + counts).sum())

    def _uploaded_numbers(self, plan_tensor: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a tensor of tree attention's plan.

        It has none on `meta`, so they are read from the host tensor that was uploaded.
        """
        uploaded = self._uploaded[plan_tensor.untyped_storage()._cdata].view(torch.int32)
        first = plan_tensor.storage_offset()
        return uploaded[first : first + len(plan_tensor)]

    def _key_tile_operations(
        self, keys: torch.Tensor, *, plan: Sequence[Any], sizes: Sequence[int]
    ) -> float:
        """Return the operations of the gradients of keys and values; repeated ones count each time."""
        # Megatron is imported after torch is patched.
        from mcore_mas.megatron.model.tree_ops import WARPS

        group, _, _, rows, keys_of_tile = sizes
        query_tokens = rows // group
        largest_ends = self._uploaded_numbers(plan[5])
        first_blocks = torch.arange(len(largest_ends)) * keys_of_tile // query_tokens
        tiles = int((-(-largest_ends // query_tokens) - first_blocks).sum())
        # Two of the four products are divided among the warps, 16 keys for each. Warps that are left
        # without keys repeat them.
        products = 2 + 2 * max(1, 16 * WARPS // keys_of_tile)
        return 2.0 * products * tiles * rows * keys_of_tile * keys.shape[1] * keys.shape[2]

    def _count_kernel(
        self,
        func: Any,
        name: str,
        *,
        args: Any,
        kwargs: Any,
        inputs: list[Any],
        outputs: list[Any],
        result: Any,
    ) -> None:
        operations = 0.0
        launches = 1
        rate = BF16_FLOPS if any(x.dtype == torch.bfloat16 for x in inputs) else FLOAT32_FLOPS
        moved_bytes: int = sum(x.nbytes for x in (*inputs, *outputs))
        if name in ("embedding", "index", "index_select", "gather"):
            moved_bytes = 2 * sum(x.nbytes for x in outputs)
        elif name in ("zeros", "zeros_like", "ones", "full", "zero_", "fill_"):
            moved_bytes = sum(x.nbytes for x in outputs or inputs[:1])
        elif name == "copy_":
            moved_bytes = sum(x.nbytes for x in inputs)  # the target is written only
        elif name.startswith(("_foreach", "_fused_adam")):
            lists = [find_tensors((argument,)) for argument in args if isinstance(argument, list)]
            moved_bytes = _bytes_of_lists(name, lists)
            elements = sum(x.numel() for x in lists[0])
            launches = max(
                math.ceil(elements / _ELEMENTS_PER_LAUNCH),
                math.ceil(len(lists[0]) / _TENSORS_PER_LAUNCH),
            )

        model_operations = None  # equal to `operations`
        if name == "tree_attention":
            operations = 4.0 * _tile_operations(args[1], plan=args[3], sizes=args[4])
            rate = _attention_rate(TREE_FORWARD_FLOPS, args[1].shape[-1])
            # two products
            model_operations = 4.0 * self._attention_elements(queries=args[0], ends=args[3][0])
        elif name == "tree_attention_backward":
            keys = args[1][1]
            # three products for the gradient of queries
            query_operations = 6.0 * _tile_operations(keys, plan=args[2], sizes=args[3])
            key_operations = self._key_tile_operations(keys, plan=args[2], sizes=args[3])
            operations = query_operations + key_operations
            launches = 2
            head_dim = keys.shape[-1]
            seconds = query_operations / _attention_rate(TREE_QUERIES_FLOPS, head_dim)
            seconds += key_operations / _attention_rate(TREE_KEYS_FLOPS, head_dim)
            rate = operations / seconds
            model_operations = 8.0 * self._attention_elements(queries=args[1][0], ends=args[2][0])
        elif name == "attend_to_cache":
            pairs, key_count = self._cache_pairs(args[3])
            operations = 4.0 * pairs * args[0].shape[1] * args[0].shape[2]
            rate = _attention_rate(TREE_FORWARD_FLOPS, args[0].shape[2])
            kv_heads, _, head_dim = args[1].shape[1:]
            key_bytes = key_count * kv_heads * head_dim * args[1].itemsize
            moved_bytes = 2 * key_bytes + 2 * args[0].nbytes
            launches = 1 if args[5] == 1 else 2
        elif name == "rotate_and_store":
            moved_bytes = 2 * args[0].nbytes
        elif name == "_grouped_mm":
            operations = 2.0 * inputs[0].numel() * outputs[0].shape[1]
            rate = GROUPED_FLOPS
        elif name == "add_grouped":
            operations = 2.0 * inputs[1].numel() * inputs[2].shape[1]
            rate = GROUPED_GRADIENT_FLOPS
            moved_bytes += inputs[0].nbytes  # the total is read and written
        elif func._overloadpacket in flop_registry and "attention" in name:
            operations = flop_registry[func._overloadpacket](*args, out_val=result)
            if any(x is True for x in args[4:8]) or kwargs.get("is_causal"):
                operations /= 2
            is_bf16 = rate == BF16_FLOPS
            rate = BF16_ATTENTION_FLOPS if is_bf16 else FLOAT32_ATTENTION_FLOPS
            if "backward" in name:
                rate *= 0.75
        elif func._overloadpacket in flop_registry:
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            operations = flop_registry[func._overloadpacket](*tensors, out_val=result)
            if name in ("mm", "addmm") and rate == BF16_FLOPS:
                rate *= _product_efficiency(*tensors[-2:])

        region = self._current_region()
        if name == "embedding" and region == "embedding":
            self.order.append("compute")
        self.moved_bytes += moved_bytes
        if model_operations is None:
            model_operations = operations
        self.model_operations += model_operations
        self._add_kernels(region, launches, max(operations / rate, moved_bytes / MEMORY_BANDWIDTH))

    def _add_kernels(self, region: str, launches: int, seconds: float) -> None:
        """Count kernels that need `seconds` for their operations and bytes."""
        seconds = max(seconds, LAUNCH_S * launches)
        self.launches[region] += launches
        self.seconds[region] += seconds
        for _ in range(launches):
            CLOCK.launch(HOST_LAUNCH_S, seconds / launches)

    def _attention_elements(self, *, queries: torch.Tensor, ends: torch.Tensor) -> int:
        """Return visible pairs · heads · head dimension."""
        return self._visible_pairs(ends) * queries.shape[1] * queries.shape[2]


def _host_zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in host memory that take memory only when they are read, as NumPy makes them."""
    zero_bytes = np.zeros(shape.numel() * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(zero_bytes).view(dtype).view(shape)


def _attention_rate(rate: float, head_dim: int) -> float:
    """Return the rate for a width of heads, from that of 128: only products take less time with narrower heads."""
    width = head_dim / 128
    share_of_products = rate / BF16_FLOPS
    return rate * width / (share_of_products * width + 1 - share_of_products)


def _product_efficiency(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the share of `BF16_FLOPS` at which a product of matrices is computed, with the best tiles."""
    rows, columns = a.shape
    best = 0.0
    for tile_rows, tile_columns in _TILES:
        tiles = math.ceil(rows / tile_rows) * math.ceil(b.shape[1] / tile_columns)
        for parts in _SPLITS:
            waves = math.ceil(tiles * parts / _MULTIPROCESSORS)
            computed = waves * _MULTIPROCESSORS * tile_rows * tile_columns
            computed *= math.ceil(columns / parts) + _TILE_START
            best = max(best, rows * b.shape[1] * columns / computed)
    return best


def _bytes_of_lists(name: str, lists: Sequence[Sequence[torch.Tensor]]) -> int:
    """Return the bytes that an operator on lists of tensors reads and writes."""
    sizes = [sum(x.nbytes for x in tensors) for tensors in lists]
    if name.startswith("_fused_adam"):
        # It reads weights, gradients and both moments, and writes all but the gradients.
        weights, gradients, first_moments, second_moments, *_ = sizes
        return 2 * (weights + first_moments + second_moments) + gradients
    if name.endswith("_") and name != "_foreach_copy_":
        return sum(sizes) + sizes[0]  # the first list is read and written
    return sum(sizes)


def _tile_operations(keys: torch.Tensor, *, plan: Sequence[Any], sizes: Sequence[int]) -> int:
    """Return pairs of a query and a key in the tiles of a tree attention, times its key width."""
    return plan[1].numel() * sizes[1] * sizes[2] * keys.shape[1] * keys.shape[2]


def find_tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments or results, also those in lists."""
    tensors = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += find_tensors(value)
    return tensors


METER = Meter()
