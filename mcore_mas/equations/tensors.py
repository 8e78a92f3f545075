"""Lazy import of torch for the equations: configs read their names and options without it.

Importing torch takes seconds, which the start of every job of the pipeline would pay.
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "torch"]

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _WhenUsed:
        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module("torch"), name)
            setattr(self, name, value)  # found without this call from now on
            return value

    torch = _WhenUsed()
    Tensor = Any  # in annotations only
