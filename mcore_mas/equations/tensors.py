"""torch, imported when an equation first computes; a config only reads the equations' names and options.

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
