"""Support for several versions of megatron-core, on every device.

The names and arguments of megatron-core that this package uses are the same from 0.16.1 to 0.20.0.
The versions differ in this:

- 0.17 and later declare in their metadata that they need Python 3.12 or later.
- 0.18 and later import `triton` with their pipeline schedules, so `triton` must be installed even
  on a machine without a GPU, where torch does not install it.
- 0.18 and later construct the modules of a layer specification with keyword arguments only;
  `RMSNorm` and `TreeAttention` accept these.
- 0.19 reads the current CUDA stream when gradients are reduced; `patch_cuda` supplies one on a CPU.
- 0.20 renames the settings of CUDA graphs, and those of the number of SMs that dispatch tokens to
  experts. This package sets neither. At every construction of a model, 0.20 logs that the model's
  class is deprecated. It was not released when this was written; ten rows of docs/exactness.md were
  measured with its source of 2026-08-22 (d98e8a64), on Python 3.11.
"""

# mypy: disable-error-code="attr-defined, method-assign"

import importlib
import subprocess
import warnings
from functools import partial, partialmethod
from importlib import metadata
from typing import Any

import torch

# Versions with which rows of docs/exactness.md have been measured.
TESTED_VERSIONS = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")


def version_warning(version: str) -> str | None:
    """Return a warning about a version of megatron-core, or None if it has been tested."""
    if version in TESTED_VERSIONS:
        return None
    return (
        f"megatron-core {version} has not been tested, only {', '.join(TESTED_VERSIONS)}; "
        "run `make exactness` to check that it trains correctly"
    )


def patch_version() -> None:
    """Patch defects of single versions of megatron-core; warn if the installed one is untested.

    - 0.16: the router reads `te_general_gemm`, which is undefined without Transformer Engine.
    - 0.16: selective recomputation treats its default `fp8=False` as fp8 switched on, which needs
      Transformer Engine.
    - 0.19: selective recomputation compiles a C++ function, which needs ninja and a compiler.
      Without these, tensors are copied, as in earlier versions.
    """
    warning = version_warning(metadata.version("megatron-core"))
    if warning is not None:
        warnings.warn(warning, stacklevel=2)

    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    random = importlib.import_module("megatron.core.tensor_parallel.random")
    checkpoint = random.CheckpointWithoutOutput
    checkpoint.__init__ = partialmethod(_init_without_fp8, checkpoint.__init__)
    if hasattr(random, "_get_share_storage"):
        random._get_share_storage = partial(_compile_or_copy, random, random._get_share_storage)


def _init_without_fp8(checkpoint: Any, init: Any, fp8: bool = False, **arguments: Any) -> None:
    """Call Megatron's `init` of a checkpoint with `fp8=None` in place of False."""
    init(checkpoint, fp8=fp8 or None, **arguments)


def _compile_or_copy(random: Any, compile_share_storage: Any) -> Any:
    """Return Megatron's compiled function that restores a freed tensor, or `_copy_storage`.

    Args:
        random: Megatron's module `tensor_parallel.random`; after a failed compilation it is patched,
            so that it does not compile again.
        compile_share_storage: Megatron's `_get_share_storage`, which compiles the function.
    """
    try:
        return compile_share_storage()
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError):
        random._get_share_storage = lambda: _copy_storage
        return _copy_storage


def _copy_storage(freed: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Copy a recomputed tensor into the original, whose memory was freed after the forward pass."""
    source = recomputed.untyped_storage()
    target = freed.untyped_storage()
    target.resize_(source.nbytes())
    target.copy_(source)
