"""CPU support for megatron-core: replacements for parts of CUDA that it uses.

Nothing is replaced on a machine with CUDA.
"""

# mypy: disable-error-code="assignment, attr-defined, comparison-overlap, method-assign"
import contextlib
import importlib
import types
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

_DEVICE = torch.device("cpu")

# Modules of the training path that create tensors with a literal device="cuda".
_LITERAL_DEVICE_MODULES = (
    "megatron.core.pipeline_parallel.schedules",  # sum of token counts
    "megatron.core.optimizer.optimizer",  # loss scale
    "megatron.core.optimizer.clip_grads",  # overflow flag of the multi-tensor norm
    "megatron.core.utils",  # local multi-tensor norm
)

# Modules that use CUDA streams: the dispatcher copies token counts to the CPU on a stream of its
# own, and since megatron-core 0.19 the gradient buffers ask for the current stream.
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_STREAM_MODULES = (_DISPATCHER, "megatron.core.distributed.param_and_grad_buffer")


def patch_cuda() -> None:
    """Prepare this process for megatron-core on a CPU.

    Do nothing on a machine with CUDA, or if this process is prepared already.
    """
    if torch.cuda.is_available() or torch.cuda.current_device is _current_device:
        return

    # Decorators compile Megatron's fused functions during its import. The functions stay uncompiled
    # on a CPU: importing torch's compiler would take as long as importing all of Megatron.
    compiler = torch.compile
    torch.compile = _uncompiled
    importlib.import_module("megatron.core.jit").disable_jit_fuser()
    torch.compile = compiler

    # Rotary embeddings, gradient buffers and vocabulary-parallel layers read the current device.
    torch.cuda.current_device = _current_device
    # Pipeline stages wait for the GPU while they exchange the shapes of micro-batches.
    torch.cuda.synchronize = lambda *_: None
    torch_on_cpu = _torch_on_cpu()
    for name in (*_LITERAL_DEVICE_MODULES, *_STREAM_MODULES):
        importlib.import_module(name).torch = torch_on_cpu

    # torch's all-to-all takes the numbers of tokens that ranks exchange as a NumPy array, not as a
    # tensor. Megatron's own function converts only tensors that it moves from a GPU.
    importlib.import_module(_DISPATCHER).maybe_move_tensor_to_cpu = _convert_on_cpu

    # With both tensor and expert parallelism the ranks have unequal numbers of tokens. gloo's
    # all-gather and reduce-scatter need equal numbers, and its all-to-all does not.
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    mappings._gather_along_first_dim = _with_unequal_sizes(
        mappings._gather_along_first_dim, _gather_unequal
    )
    mappings._reduce_scatter_along_first_dim = _with_unequal_sizes(
        mappings._reduce_scatter_along_first_dim, _reduce_scatter_unequal
    )

    # The optimizer and gradient clipping assert that a type is named "torch.cuda.FloatTensor".
    torch.Tensor.type = _cuda_type_name
    # The last pipeline stage moves its copy of a tied embedding to the GPU.
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor

    # Around dropout, which is always 0 here, layers fork the state of CUDA's random generator.
    # Megatron's tracker for inference has a fork that does nothing, so one is installed.
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    # Recomputation saves and restores the states of the CPU's and of CUDA's random generator.
    random._get_cuda_rng_state = _empty_rng_state
    random._set_cuda_rng_state = _empty_rng_state


class _ModuleProxy(types.ModuleType):
    """A module with some of its attributes replaced."""

    def __init__(self, module: types.ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _torch_on_cpu() -> _ModuleProxy:
    """Return `torch` with a CUDA stream that does nothing, and factories that create CUDA tensors on the CPU."""
    # Operations on a CPU have finished when they return, so no stream or event needs to wait.
    stream = types.SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)
    stream.record_event = lambda: stream
    cuda = _ModuleProxy(
        torch.cuda,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=contextlib.nullcontext,
    )
    factories = {
        name: partial(_create_on_cpu, getattr(torch, name))
        for name in ("zeros", "ones", "tensor", "empty")
    }
    return _ModuleProxy(torch, cuda=cuda, **factories)


def _create_on_cpu(factory: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """Call a tensor factory with the CPU in place of a CUDA device."""
    if str(device).startswith("cuda"):
        device = _DEVICE
    return factory(*args, device=device, **kwargs)


def _current_device() -> torch.device:
    return _DEVICE


def _empty_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _uncompiled(function: Any = None, **_: Any) -> Any:
    """Replace torch.compile: return the function unchanged, or a decorator if there are only options."""
    return _uncompiled if function is None else function


def _convert_on_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Return a tensor on the CPU, as an array if `as_numpy`; leave other values as they are."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _with_unequal_sizes(equal_collective: Any, unequal_collective: Any) -> Any:
    """Return a collective that chooses between two: one for parts of equal size, and one for any sizes.

    The second one is called if the sizes of the ranks' parts are given and there are several ranks.

    Args:
        equal_collective: Megatron's collective, which needs parts of equal size.
        unequal_collective: the same collective as a function of a tensor, its group, and the size
            of each rank's part.
    """

    def collective(
        x: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if sizes is None or group.size() == 1:
            return equal_collective(x, group, sizes, use_global_buffer)
        return unequal_collective(x, group, [int(size) for size in sizes])

    return collective


def _gather_unequal(x: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Gather the rows of all ranks on every rank, by an all-to-all; rank r has sizes[r] rows."""
    gathered = x.new_empty(sum(sizes), *x.shape[1:])
    copies = torch.cat([x] * len(sizes))  # one to send to each rank
    dist.all_to_all_single(gathered, copies, sizes, [len(x)] * len(sizes), group=group)
    return gathered


def _reduce_scatter_unequal(x: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Sum each row over all ranks, by an all-to-all; rank r gets sizes[r] of the summed rows."""
    own_size = sizes[group.rank()]
    parts = x.new_empty(len(sizes), own_size, *x.shape[1:])  # received from each rank
    dist.all_to_all_single(
        parts.flatten(0, 1), x.contiguous(), [own_size] * len(sizes), sizes, group=group
    )
    return parts.sum(dim=0)


_tensor_type = torch.Tensor.type


def _cuda_type_name(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Convert as `torch.Tensor.type`; without a dtype, return the name of the type on a GPU."""
    if dtype is not None:
        return _tensor_type(tensor, dtype, *args, **kwargs)
    return _tensor_type(tensor).replace("torch.", "torch.cuda.", 1)
