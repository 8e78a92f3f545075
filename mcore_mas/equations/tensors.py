"""Lazy import of torch for the equations.

Configs read the names and options of equations without torch, whose import takes seconds at the
start of every job.
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "torch"]

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _LazyTorch:
        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module("torch"), name)
            setattr(self, name, value)  # later accesses find the attribute itself
            return value

    torch = _LazyTorch()
    Tensor = Any  # used in annotations only
