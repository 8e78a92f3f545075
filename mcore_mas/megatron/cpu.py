"""CPU support for megatron-core: stand-ins for the parts of CUDA that it needs at import and in a training step.

Nothing here runs where CUDA is available, so the GPU path is Megatron's own.
"""

# mypy: disable-error-code="assignment, attr-defined, comparison-overlap, method-assign"
import contextlib
import importlib
import subprocess
import types
import warnings
from functools import partial, partialmethod
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

_DEVICE = torch.device("cpu")

# Modules of the training path that create tensors with a literal device="cuda".
_LITERAL_MODULES = (
    "megatron.core.pipeline_parallel.schedules",  # the running token count
    "megatron.core.optimizer.optimizer",  # loss scale
    "megatron.core.optimizer.clip_grads",  # overflow flag of the multi-tensor norm
    "megatron.core.utils",  # local multi-tensor norm
)

# Modules that ask which stream they are on, or wait for one.
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"  # sends token counts to the CPU on a stream of its own
_STREAM_MODULES = (
    _DISPATCHER,
    "megatron.core.distributed.param_and_grad_buffer",
)  # the latter from 0.19 on


class _Changed(types.ModuleType):
    """A module as one of Megatron's sees it, with some attributes replaced."""

    def __init__(self, module: types.ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _torch_on_cpu() -> _Changed:
    """`torch` whose tensor factories read device="cuda" as the CPU, with one stream on which nothing is under way."""
    # what was asked of it is done; so are the events it records
    only = types.SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)
    only.record_event = lambda: only
    cuda = _Changed(
        torch.cuda, Stream=lambda: only, current_stream=lambda: only, stream=contextlib.nullcontext
    )
    factories = {
        name: partial(_on_cpu, getattr(torch, name))
        for name in ("zeros", "ones", "tensor", "empty")
    }
    return _Changed(torch, cuda=cuda, **factories)


def _on_cpu(factory: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    return factory(*args, device=_DEVICE if str(device).startswith("cuda") else device, **kwargs)


def patch_cuda() -> None:
    """Prepare this process for megatron-core on the CPU; does nothing where CUDA is available, or a second time."""
    if torch.cuda.is_available() or torch.cuda.current_device is _current_device:
        return
    # Megatron's fusers are torch.compile, by decorators that run as soon as the package is imported: its functions stay
    # as they are on the CPU, and the compiler, which takes as long to import as all of Megatron, is not asked for.
    compiler, torch.compile = torch.compile, _uncompiled
    importlib.import_module("megatron.core.jit").disable_jit_fuser()
    torch.compile = compiler
    # Rotary embeddings, DDP buffers and the vocabulary-parallel layers ask for the current device.
    torch.cuda.current_device = _current_device
    # Pipeline stages that tell each other the lengths of micro-batches wait for the GPU in between.
    torch.cuda.synchronize = lambda *_: None
    proxy = _torch_on_cpu()
    for name in (*_LITERAL_MODULES, *_STREAM_MODULES):
        importlib.import_module(name).torch = proxy
    # The counts that ranks send each other tokens by come to the CPU as arrays, which gloo takes; those that are there
    # already would stay tensors, which it does not.
    importlib.import_module(_DISPATCHER).maybe_move_tensor_to_cpu = _as_asked
    # Experts cut by tensor- and dealt to expert-parallel ranks get unequal numbers of tokens; gloo gathers equal ones.
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    mappings._gather_along_first_dim = _unequally(mappings._gather_along_first_dim, _gather)
    mappings._reduce_scatter_along_first_dim = _unequally(
        mappings._reduce_scatter_along_first_dim, _reduce_scatter
    )
    # The optimizer and gradient clipping assert on the *name* "torch.cuda.FloatTensor".
    torch.Tensor.type = _cuda_type_name
    # A tied embedding's copy on the last pipeline stage is sent to the GPU before it is filled.
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    # Layers fork the CUDA generator around dropout; the inference tracker's fork is a no-op, and dropout is 0.
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    # Recomputing activations saves and restores the CUDA generator beside the CPU's, which stays as it is.
    random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *_, **__: torch.empty(
        0, dtype=torch.uint8
    )


def _current_device() -> torch.device:
    return _DEVICE


def _uncompiled(function: Any = None, **_: Any) -> Any:
    return _uncompiled if function is None else function


def _as_asked(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _unequally(equal: Any, unequal: Any) -> Any:
    """Megatron's exchange of equal parts, with another where it is told the sizes of unequal ones."""

    def exchange(
        x: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if sizes is None or group.size() == 1:
            return equal(x, group, sizes, use_global_buffer)
        return unequal(x, group, [int(size) for size in sizes])

    return exchange


def _gather(x: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Every rank's rows, `sizes` of them, on every rank."""
    whole = x.new_empty(sum(sizes), *x.shape[1:])
    copies = torch.cat([x] * len(sizes))  # to each rank its own
    dist.all_to_all_single(whole, copies, sizes, [len(x)] * len(sizes), group=group)
    return whole


def _reduce_scatter(x: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """The sum over ranks of this rank's rows; rank r has `sizes`[r] of them."""
    own = sizes[group.rank()]
    parts = x.new_empty(len(sizes), own, *x.shape[1:])
    dist.all_to_all_single(
        parts.flatten(0, 1), x.contiguous(), [own] * len(sizes), sizes, group=group
    )
    return parts.sum(dim=0)


_tensor_type = torch.Tensor.type


def _cuda_type_name(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is not None:
        return _tensor_type(tensor, dtype, *args, **kwargs)
    return _tensor_type(tensor).replace("torch.", "torch.cuda.", 1)


TRIED = (
    "0.16.1",
    "0.17.1",
    "0.18.2",
    "0.19.2",
)  # of these, rows of docs/exactness.md have been measured


def untried(version: str) -> str | None:
    """What there is to say of a version of megatron-core; None if it has been tried."""
    if version in TRIED:
        return None
    return (
        f"megatron-core {version} has not been tried; tried: {', '.join(TRIED)}; "
        "`make exactness` tells whether it trains as it should"
    )


def patch_release() -> None:
    """Supply what a version of megatron-core leaves out, on every device; warns of one that has not been tried.

    What this package uses of megatron-core has the same names and arguments from 0.16.1 to 0.19.2. But:

    - 0.16: the router reads `te_general_gemm`, which only an import of Transformer Engine defines; and selective
      recomputation takes its default, no fp8, for fp8, which is Transformer Engine's.
    - 0.17 on: Python 3.12 or later by their metadata. 0.18 on: `triton` is imported with the schedules; its package
      does that without a GPU too, where torch came without it.
    - 0.18 on: a module is made by calling what a spec names, with keywords only; `RMSNorm` and `TreeAttention` take
      them.
    - 0.19: the exchange of gradients asks which stream it is on; `patch_cuda` answers. And selective recomputation
      compiles C++, for which ninja and a compiler must be found; where it does not, it copies, as before 0.19.
    """
    said = untried(metadata.version("megatron-core"))
    if said:
        warnings.warn(said, stacklevel=2)
    moe = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe, "te_general_gemm"):
        moe.te_general_gemm = None
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    checkpoint = random.CheckpointWithoutOutput
    checkpoint.__init__ = partialmethod(_without_fp8, checkpoint.__init__)
    if hasattr(random, "_get_share_storage"):
        random._get_share_storage = partial(_sharing, random, random._get_share_storage)


def _without_fp8(checkpoint: Any, init: Any, fp8: bool = False, **more: Any) -> None:
    init(checkpoint, fp8=fp8 or None, **more)


def _sharing(random: Any, compiled: Any) -> Any:
    """What gives a freed tensor the memory of the same one computed again, or a copy of it where nothing compiles."""
    try:
        return compiled()
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError):
        random._get_share_storage = lambda: _copy_storage  # it is not tried again
        return _copy_storage


def _copy_storage(freed: torch.Tensor, again: torch.Tensor) -> None:
    held = again.untyped_storage()
    freed.untyped_storage().resize_(held.nbytes())
    freed.untyped_storage().copy_(held)
