"""Patches that make torch and Megatron use the `meta` device as their GPU.

torch reports a CUDA device, tensors for it are made on `meta`, which has shapes and no numbers, and
process groups are torch's fake ones. `prepare` must run before Megatron is imported.
"""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.gpu_meter import METER
from tests.support.gpu_streams import META, Event, Stream, calling_function, synchronize

_IS_CUDA = torch.Tensor.is_cuda.__get__

# Collectives that return a handle; nothing is exchanged.
_COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "all_gather",
    "barrier",
    "all_to_all_single",
    "_reduce_scatter_base",
    "_all_gather_base",
    "reduce_scatter",
)

# (module, class, method, region). Calls in a method belong to its region, except those of an inner
# method of this list. Region None is that of the autograd node that calls the method.
_REGIONS = (
    ("mcore_mas.megatron.model.attention", "TreeAttention", "forward", "attention"),
    # with the norms and rotations of queries and keys
    ("megatron.core.transformer.attention", "SelfAttention", "forward", "projections"),
    ("mcore_mas.megatron.model.mlp", "GatedMLP", "forward", "mlp"),
    ("megatron.core.transformer.moe.moe_layer", "MoELayer", "forward", "mlp"),
    ("megatron.core.transformer.transformer_layer", "TransformerLayer", "forward", "layer"),
    ("mcore_mas.megatron.model.decoder", "PackedGPTModel", "_preprocess", "embedding"),
    ("mcore_mas.megatron.model.decoder", "PackedGPTModel", "_postprocess", "head"),
    ("megatron.core.tensor_parallel.random", "CheckpointWithoutOutput", "_recompute", None),
    ("mcore_mas.megatron.step.pipeline", "Pipeline", "_weighted_loss", "loss"),
    ("mcore_mas.megatron.step.trainer", "MegatronTrainer", "_step", "optimizer"),
    ("mcore_mas.megatron.step.trainer", "MegatronTrainer", "_gradient_norm", "norms"),
)


class FinishedWork:
    """Handle of a collective that has ended; each of its methods returns the handle."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: self


class OnMeta(TorchFunctionMode):
    """Mode that makes tensors on `meta` where CUDA is asked for, and registers page-locked ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute, which is most of the calls
            return args[0].device.type == "meta" if func == _IS_CUDA else func(*args)

        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _replace_cuda(kwargs["device"])
        if name == "to":
            args = tuple(_replace_cuda(argument) for argument in args)
        if name == "cuda":
            return args[0].to(META, **kwargs)
        if name == "is_pinned":
            return METER.is_pinned(args[0])

        if name in ("tensor", "as_tensor") and kwargs.get("device") == META:
            is_python_data = not isinstance(args[0], torch.Tensor)
            if is_python_data:
                METER.copies[f"{calling_function()}, pageable"] += 1

        pin = kwargs.pop("pin_memory", False) or name == "pin_memory"
        result = args[0].clone() if name == "pin_memory" else func(*args, **kwargs)
        if pin:
            METER.pin(result)
        return result


def _replace_cuda(device: Any) -> Any:
    """Return `meta` for a CUDA device, and any other value as it is."""
    is_cuda = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return META if is_cuda else device


class _FusedNorm(torch.autograd.Function):
    """Root-mean-square norm with the launches of CUDA's: one forward, two backward.

    The numbers are wrong; `meta` has none.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad_out * x, (grad_out * x).reshape(-1, len(weight)).sum(0)


def prepare_torch() -> None:
    """Patch torch alone, for code that uses no other library on the GPU."""
    _patch_cuda()
    _patch_storages()


def prepare() -> None:
    """Patch torch, Megatron and the trainer, and count the trainer's operations by region."""
    prepare_torch()
    _patch_process_groups()
    _patch_megatron_random()
    _patch_operators()

    # Other modules import these names when they are imported, so they are patched first.
    from mcore_mas.megatron import device

    device.rank_device = lambda: META
    from mcore_mas.megatron import collectives

    collectives.all_gather_json = lambda value, group=None: [value] * dist.get_world_size(group)
    from mcore_mas.megatron.state import tensor_sources

    tensor_sources.RandomTensors.draw = lambda self, name: torch.empty(self.shapes[name])  # type: ignore[method-assign]
    for module, class_name, method, region in _REGIONS:
        owner = getattr(importlib.import_module(module), class_name)
        setattr(owner, method, METER.in_region(region, getattr(owner, method)))
    _balance_experts()


def _patch_cuda() -> None:
    """Make torch report one H100 with the memory of an H200."""
    # In inference mode, the meter would see composite operators instead of those that they call.
    torch.inference_mode = torch.no_grad  # type: ignore[misc, assignment]
    cuda = torch.cuda
    properties = SimpleNamespace(
        major=9,
        minor=0,
        multi_processor_count=132,
        name="H100",
        total_memory=141 << 30,
        shared_memory_per_block_optin=227 << 10,
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": META,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "is_initialized": False,
        "get_device_name": "H100",
        "mem_get_info": (140 << 30, 141 << 30),
        "max_memory_allocated": 0,
        "set_device": None,
        "empty_cache": None,
        "ipc_collect": None,
        "manual_seed_all": None,
        "reset_peak_memory_stats": None,
        "set_sync_debug_mode": None,
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    cuda.Stream = Stream
    cuda.Event = Event
    cuda.synchronize = synchronize
    cuda.current_stream = lambda *_: Stream.current
    cuda.default_stream = lambda *_: Stream.default
    cuda.stream = lambda stream: stream or contextlib.nullcontext()
    torch.Tensor.record_stream = lambda x, stream: METER.record_stream(x, stream)

    tensor_type = torch.Tensor.type
    type_names = {torch.float32: "FloatTensor", torch.bfloat16: "BFloat16Tensor"}

    def type_of(x: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return tensor_type(x, dtype, *args, **kwargs)
        return f"torch.cuda.{type_names.get(x.dtype, 'Tensor')}"

    torch.Tensor.type = type_of
    # A torch that is built for CUDA would ask its accelerator for a stream.
    torch.accelerator.current_accelerator = lambda check_available=False: None


def _patch_process_groups() -> None:
    """Use torch's fake process groups; call this before Megatron imports some of these functions by name."""
    init_process_group = dist.init_process_group
    new_group = dist.new_group
    dist.init_process_group = lambda backend=None, rank=0, world_size=1, **_: init_process_group(
        "fake", rank=rank, world_size=world_size, store=FakeStore()
    )
    dist.new_group = lambda ranks=None, timeout=None, backend=None, **_: new_group(
        ranks, backend="fake"
    )
    for name in _COLLECTIVES:
        setattr(dist, name, lambda *_, **__: FinishedWork())
    dist._coalescing_manager = lambda *_, **__: contextlib.nullcontext(FinishedWork())


def _uncompiled(function: Any = None, **_: Any) -> Any:
    """Replace torch.compile: return the function unchanged, or a decorator if there are only options."""
    return _uncompiled if function is None else function


def _patch_megatron_random() -> None:
    # Megatron's decorators compile functions during its import, and importing torch's compiler takes
    # as long as importing all of Megatron.
    with mock.patch.object(torch, "compile", _uncompiled):
        importlib.import_module("megatron.core.jit").disable_jit_fuser()
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    no_state = torch.empty(0, dtype=torch.uint8)
    random._get_cuda_rng_state = lambda *_, **__: no_state.clone()
    random._set_cuda_rng_state = lambda *_, **__: no_state.clone()


def _patch_operators() -> None:
    """Replace operators that CUDA has and `meta` lacks."""
    torch.nn.Module._apply = _apply_to_module

    rms_norm = torch.nn.functional.rms_norm

    def fused_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float) -> Any:
        if x.device.type == "meta":
            return _FusedNorm.apply(x, weight)
        return rms_norm(x, shape, weight, eps)

    torch.nn.functional.rms_norm = fused_norm

    grouped_mm = torch.nn.functional.grouped_mm

    def grouped_product(x: torch.Tensor, stack: torch.Tensor, offs: torch.Tensor) -> Any:
        if x.dtype == torch.float32:  # `meta` has the operator for bfloat16 only
            return x.new_empty(len(x), stack.shape[2])
        return grouped_mm(x, stack, offs=offs)

    torch.nn.functional.grouped_mm = grouped_product
    adam = importlib.import_module("torch.optim.adam")
    adam._device_dtype_check_for_fused = lambda *_, **__: None


def _patch_storages() -> None:
    resize = torch.UntypedStorage.resize_
    copy = torch.UntypedStorage.copy_
    torch.UntypedStorage.resize_ = lambda storage, size: METER.resize_storage(storage, resize, size)
    torch.UntypedStorage.copy_ = lambda storage, source, *_: METER.copy_storage(
        storage, copy, source
    )


def _apply_to_module(module: Any, function: Any, recurse: bool = True) -> Any:
    """Replace parameters instead of their data; torch refuses to move data from or to `meta`.

    Stands for `torch.nn.Module._apply`.
    """
    for child in module.children():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            moved = function(parameter)
        if (moved.dtype, moved.device) != (parameter.dtype, parameter.device):
            replacement = torch.nn.Parameter(moved.detach(), parameter.requires_grad)
            replacement.__dict__.update(parameter.__dict__)
            module._parameters[name] = replacement
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def _balance_experts() -> None:
    """Let ranks exchange equal numbers of rows, and give every expert equally many.

    The numbers of rows are read from the device, which has none.
    """
    module = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher_class = module.MoEAlltoAllTokenDispatcher
    synchronize_counts = dispatcher_class._maybe_dtoh_and_synchronize

    def synchronize_equal_counts(self: Any, point: str, *arguments: Any) -> Any:
        result = synchronize_counts(self, point, *arguments)
        if point == self.cuda_dtoh_point and self.ep_size > 1:
            rows = self.num_out_tokens // self.ep_size
            self.input_splits[:] = rows
            self.output_splits[:] = rows
            self.output_splits_tp[:] = rows * self.ep_size
            rows_per_expert = rows // self.num_local_experts
            remainder = rows - rows_per_expert * self.num_local_experts
            self.num_global_tokens_per_local_expert.fill_(rows_per_expert)
            self.num_global_tokens_per_local_expert[:, 0] += remainder
        return result

    dispatcher_class._maybe_dtoh_and_synchronize = synchronize_equal_counts
