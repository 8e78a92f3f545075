"""The trainer's GPU branch on a machine without one, metered: launches, waits of the host, copies, an estimated time.

torch says that there is CUDA, what is put there lies on its `meta` device, which has shapes and no numbers, and process
groups are torch's fake ones. Every operation is counted with its floating-point operations and bytes. An H200's time
for it is the largest of operations / 0.9 of what its kernel was seen to reach, bytes / (0.8 · 4.8 TB/s), and 2.5 µs.
Such a figure is a prediction: it is for comparing two versions of the code.

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
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

META = torch.device("meta")
PEAK, MEMORY, LAUNCH = 0.9 * 790e12, 0.8 * 4.8e12, 2.5e-6  # operations and bytes a second, seconds
FLOAT32_PEAK = 0.9 * 55e12
TREE_PEAK = 380e12, 350e12  # Triton's flash attention on an H100, forward and backward
GROUPED_PEAK = 600e12, 450e12  # torch's grouped product on an H100, and Triton's of transposed rows
HOST_LAUNCH = 7e-6  # seconds that the host needs for one
ADVERTISED = 989e12  # what MFU is told of


class Still:
    """A stream or an event on which nothing is under way."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = META

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> Still:
        return self

    def __exit__(self, *_: object) -> None:
        return None


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
        self.region = "other"
        self.bytes = 0  # on the device now
        self._sizes: dict[int, int] = {}  # of each storage there
        self.clear()

    def clear(self) -> None:
        """Begin to count anew."""
        self.peak = self.bytes  # most of them at a time
        self.launches: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()  # the host waits for the device: where
        self.copies: Counter[str] = Counter()  # from memory that is not page-locked: where
        self.uploads = 0  # from memory that is
        self.mixed: Counter[str] = Counter()  # operations on tensors of two devices: where

    def held(self, tensor: Any) -> None:
        """Count the storage of a tensor on the device until nobody holds it."""
        storage = tensor.untyped_storage()
        if tensor.device.type == "meta" and storage._cdata not in self._sizes and storage.nbytes():
            self._sizes[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._freed, storage._cdata)
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)

    def _freed(self, storage: int) -> None:
        self.bytes -= self._sizes.pop(storage)

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

    def within(self, name: str, function: Any) -> Any:
        """The function, metered as a region."""

        @functools.wraps(function)
        def inner(*arguments: Any, **keywords: Any) -> Any:
            outer, self.region = self.region, name
            try:
                return function(*arguments, **keywords)
            finally:
                self.region = outer

        return inner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, _, name = func._schema.name.partition("::")
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = any(x.device.type == "meta" for x in given)
        if there and (found := self._waited(name, given, args, kwargs)) is not None:
            return found[0]
        if name == "copy_" and given[0].device != given[1].device:
            self._crossed(to_host=given[0].device.type == "cpu")
            return args[0]
        if there and name != "_to_copy" and any(x.device.type == "cpu" and x.dim() for x in given):
            self.mixed[f"{name} {place()}"] += 1
        made = None if there and name.startswith("_fused_adam") else func(*args, **kwargs)  # `meta` has no such kernel
        results = [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
        for x in results:
            self.held(x)
        if name == "_to_copy" and not there and any(x.device.type == "meta" for x in results):
            self._crossed(to_host=False)
        elif (there or any(x.device.type == "meta" for x in results)) and name not in self.FREE and space != "c10d":
            self._count(func, name, args, kwargs, given, results, made)
        return made

    def _waited(self, name: str, given: list[Any], args: Any, kwargs: Any) -> tuple[Any] | None:
        """What an operation gives for which the host must wait, counted; None of any other."""
        x = given[0]
        if name == "_local_scalar_dense":
            self.waits[place()] += 1
            return (False if x.dtype == torch.bool else 0.5 if x.dtype.is_floating_point else 0,)
        if name in ("nonzero", "masked_select"):
            self.waits[place()] += 1
            return (torch.empty(x.numel(), *([x.dim()] if name == "nonzero" else []), dtype=torch.int64, device=META),)
        if name == "_to_copy" and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
            self._crossed(to_host=True)
            return (torch.zeros(x.shape, dtype=kwargs.get("dtype") or x.dtype),)
        places = args[1] if name.startswith("index") and isinstance(args[1], list) else []
        masks = [i for i in places if i is not None and i.dtype == torch.bool]
        if masks and name != "index" and args[2].numel() == 1:  # torch fills by mask, for which nobody waits
            self.launches[self.region] += 1
            return (args[0],)
        if name in ("index", "index_put_", "_index_put_impl_") and masks:
            self.waits[place()] += 1
            whole = torch.zeros(masks[0].numel(), dtype=torch.int64, device=META)
            places = [i if i is None or i.dtype != torch.bool else whole for i in args[1]]
            operator = getattr(torch.ops.aten, name)
            return (operator(args[0].flatten(0, masks[0].dim() - 1), places, *args[2:]),)
        return None

    def _crossed(self, *, to_host: bool) -> None:
        where = place()
        if to_host:
            self.waits[where] += 1
        elif "/megatron/device.py" in where:
            self.uploads += 1
        else:
            self.copies[where] += 1

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, given: Any, results: Any, made: Any) -> None:
        operations, launches = 0.0, 1
        moved = sum(x.nbytes for x in (*given, *results))
        if name in ("embedding", "index", "index_select", "gather"):
            moved = 2 * sum(x.nbytes for x in results)
        elif name in ("zeros", "zeros_like", "ones", "full", "zero_", "fill_"):
            moved = sum(x.nbytes for x in results or given[:1])
        peak = PEAK if any(x.dtype == torch.bfloat16 for x in given) else FLOAT32_PEAK
        if name.startswith("tree_attention"):
            operations, launches, peak = tree_attention(name, args)
        elif name == "_grouped_mm":
            operations, peak = 2.0 * given[0].numel() * results[0].shape[1], GROUPED_PEAK[0]
        elif name == "add_grouped":
            operations, peak = 2.0 * given[1].numel() * given[2].shape[1], GROUPED_PEAK[1]
            moved += given[0].nbytes  # which is read and written
        elif func._overloadpacket in flop_registry:
            plain = args if "attention" in name else [x for x in args if isinstance(x, torch.Tensor)]
            operations = flop_registry[func._overloadpacket](*plain, out_val=made)
            if "attention" in name:
                causal = any(x is True for x in args[4:8]) or kwargs.get("is_causal")
                operations /= 2 if causal else 1
                peak = (0.9 * 545e12 if peak == PEAK else 0.9 * 30e12) * (0.75 if "backward" in name else 1)
        self.operations[self.region] += operations
        self.launches[self.region] += launches
        self.seconds[self.region] += max(operations / peak, moved / MEMORY, LAUNCH * launches)


def tree_attention(name: str, args: Any) -> tuple[float, int, float]:
    """Operations of the tiles that the kernels go through, launches, and the rate to expect."""
    forward = name == "tree_attention"
    (_, k, *_), plan, sizes = (args[:3], args[3], args[4]) if forward else (args[1], args[2], args[3])
    multiplied = plan[1].numel() * sizes[1] * sizes[2] * k.shape[1] * k.shape[2]
    # two products forward; three for the gradient of queries, four for those of keys and values
    return (4.0 * multiplied, 1, TREE_PEAK[0]) if forward else (14.0 * multiplied, 2, TREE_PEAK[1])


def place() -> str:
    """Whose line of the project or of Megatron asked for it."""
    for frame in reversed(traceback.extract_stack()):
        if any(part in frame.filename for part in ("/mcore_mas/", "/rollout/", "/megatron/core/")):
            parts = frame.filename.split("/")
            return f"/{'/'.join(parts[-3:])}:{frame.lineno}"
    return "?"


class OnMeta(TorchFunctionMode):
    """What is asked for on CUDA is made on `meta`; there is no page-locked memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "device" in kwargs:
            kwargs["device"] = elsewhere(kwargs["device"])
        if name == "to":
            args = tuple(elsewhere(x) for x in args)
        if name == "cuda":
            return args[0].to(META)
        if name == "pin_memory":
            return args[0]
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def elsewhere(device: Any) -> Any:
    """`meta` for CUDA, and anything else as it is."""
    return META if str(device).startswith("cuda") and isinstance(device, str | torch.device) else device


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
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H200", total_memory=141 << 30)
    answers = {"is_available": True, "device_count": 1, "current_device": META, "get_device_capability": (9, 0)}
    answers |= {"get_device_properties": properties, "is_initialized": False, "get_device_name": "H200"}
    answers |= dict.fromkeys(("set_device", "empty_cache", "ipc_collect", "synchronize"))
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    for name in ("current_stream", "default_stream", "Stream", "Event"):
        setattr(cuda, name, Still)
    cuda.stream = lambda _: contextlib.nullcontext()
    kind = torch.Tensor.type
    names = {torch.float32: "FloatTensor", torch.bfloat16: "BFloat16Tensor"}
    torch.Tensor.type = lambda x, dtype=None, *a, **k: (
        kind(x, dtype, *a, **k) if dtype is not None else f"torch.cuda.{names.get(x.dtype, 'Tensor')}"
    )
    # Megatron takes some of these as it is imported
    init, group = dist.init_process_group, dist.new_group
    dist.init_process_group = lambda backend=None, rank=0, world_size=1, **_: init(
        "fake", rank=rank, world_size=world_size, store=FakeStore()
    )
    dist.new_group = lambda ranks=None, timeout=None, backend=None, **_: group(ranks, backend="fake")
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_gather", "barrier"):
        setattr(dist, name, lambda *_, **__: Still())
    for name in ("all_to_all_single", "_reduce_scatter_base", "_all_gather_base", "reduce_scatter"):
        setattr(dist, name, lambda *_, **__: Still())
    dist._coalescing_manager = lambda *_, **__: contextlib.nullcontext(Still())
    importlib.import_module("megatron.core.jit").disable_jit_fuser()
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *_, **__: torch.empty(0, dtype=torch.uint8)
    torch.nn.Module._apply = move
    norm = torch.nn.functional.rms_norm
    torch.nn.functional.rms_norm = lambda x, shape, weight, eps: (  # `meta` has no kernel for it, as CUDA has
        FusedNorm.apply(x, weight) if x.device.type == "meta" else norm(x, shape, weight, eps)
    )
    # a torch that is built for CUDA would ask it for its stream
    torch.accelerator.current_accelerator = lambda check_available=False: None
    importlib.import_module("torch.optim.adam")._device_dtype_check_for_fused = lambda *_, **__: None


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
    meter: Meter, folder: Path, *, model: str, layout: str, microbatches: int = 1, updates: int = 1, **spec: Any
) -> dict[str, Any]:
    """One update of a model of `benchmarks.gpu.shapes`, or the last of several, as figures."""
    from benchmarks.gpu.shapes import LAYOUTS, MODELS, make_batch, operations, write_model
    from mcore_mas.config.policy import LoraConfig
    from mcore_mas.equations.losses import ValueObjective
    from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
    from mcore_mas.megatron.step.trainer import MegatronTrainer

    path = write_model(model, folder / model)
    if "lora" in spec:
        spec["lora"] = LoraConfig(**spec["lora"])
    if critic := spec.get("head") == "value":
        spec["objective"] = ValueObjective()
    trainer_spec = TrainerSpec(model=str(path), init="random", **{"bf16": True, **spec})
    vocab = int(MODELS[model]["vocab_size"])
    began = time.process_time()
    gc.collect()
    others = meter.bytes  # of earlier trainers
    with OnMeta(), meter:
        init_process_groups(trainer_spec, rank=0, threads=1)
        trainer = MegatronTrainer(trainer_spec)
        batches = [make_batch(LAYOUTS[layout], vocab=vocab, seed=i) for i in range(microbatches * trainer_spec.dp)]
        if critic:
            batches = [replace(batch, values=batch.weights, returns=batch.advantages) for batch in batches]
        for _ in range(updates):
            meter.clear()
            kept = meter.bytes - others
            trainer.update(batches)
        destroy_process_groups()
    layers = int(MODELS[model]["num_hidden_layers"])
    seconds, launches = sum(meter.seconds.values()), sum(meter.launches.values())
    flops = sum(operations(path, batch) for batch in batches)
    return {
        "model": model,
        "layout": layout,
        "recompute": trainer_spec.recompute,
        "tokens": len(batches[0].token_ids),
        "bytes": {"kept": kept, "peak": meter.peak - others},
        "launches": launches,
        "launches_of_attention_per_layer": meter.launches["attention"] / layers / microbatches,
        "milliseconds": {name: round(1e3 * value, 1) for name, value in meter.seconds.most_common()},
        "mfu": round(flops / max(seconds, launches * HOST_LAUNCH) / ADVERTISED, 3),
        "waits": dict(meter.waits),
        "copies": dict(meter.copies),
        "uploads": meter.uploads,
        "mixed": dict(meter.mixed),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def main(cases: list[str]) -> None:
    """Measure each case, a JSON object of `measure`'s arguments, and print a line of JSON for it."""
    pretend()
    from mcore_mas.megatron import device

    device.rank_device = lambda: META  # before others take them from there
    device.exchange = lambda value, group=None: [value] * dist.get_world_size(group)
    from mcore_mas.megatron.model import attention, layer_ops, tree_ops
    from mcore_mas.megatron.state import weight_import
    from mcore_mas.megatron.step import trainer

    weight_import.RandomTensors._draw = lambda self, name: torch.empty(self.shapes[name])  # type: ignore[method-assign]
    meter = Meter()
    for module, name, methods, region in (
        (attention, "_TreeAttention", ("forward", "backward"), "attention"),
        (tree_ops, "KernelAttention", ("forward", "backward"), "attention"),
        (layer_ops, "KernelHead", ("forward", "backward"), "head"),
    ):
        for method in methods:
            own = getattr(module, name)
            setattr(own, method, staticmethod(meter.within(region, getattr(own, method))))
    for method, region in (("_step", "optimizer"), ("_norm", "norms")):
        setattr(trainer.MegatronTrainer, method, meter.within(region, getattr(trainer.MegatronTrainer, method)))
    resize, copy = torch.UntypedStorage.resize_, torch.UntypedStorage.copy_
    torch.UntypedStorage.resize_ = lambda storage, size: meter.resized(storage, resize, size)
    torch.UntypedStorage.copy_ = lambda storage, source, *_: meter.copied(storage, copy, source)
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            print(json.dumps(measure(meter, Path(folder), **json.loads(case))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
