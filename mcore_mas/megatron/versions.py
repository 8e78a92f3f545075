"""What differs between the versions of megatron-core, and which of them have been tried.

What this package uses of megatron-core has the same names and arguments from 0.16.1 to 0.19.2. But:

- 0.16: the router reads `te_general_gemm`, which only an import of Transformer Engine defines (see `repair`).
- 0.17 on: Python 3.12 or later by their metadata. 0.18 on: `triton` is imported with the schedules; its package does
  that without a GPU too, where torch came without it.
- 0.18 on: a module is made by calling what a spec names, with keywords only; `RMSNorm` and `TreeAttention` take them.
- 0.19: the exchange of gradients asks which stream it is on; `cpu.install` answers.
"""

from __future__ import annotations

import importlib
import warnings
from importlib import metadata

TRIED = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")  # of these, rows of docs/exactness.md have been measured


def untried(version: str) -> str | None:
    """What there is to say of a version of megatron-core; None if it has been tried."""
    if version in TRIED:
        return None
    return (
        f"megatron-core {version} has not been tried; tried: {', '.join(TRIED)}; "
        "`make exactness` tells whether it trains as it should"
    )


def repair() -> None:
    """Supply what a version of megatron-core leaves out, on every device; warns of one that has not been tried."""
    said = untried(metadata.version("megatron-core"))
    if said:
        warnings.warn(said, stacklevel=2)
    moe = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe, "te_general_gemm"):
        moe.te_general_gemm = None
