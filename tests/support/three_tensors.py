"""Three tensors of different types and shapes, which tests of weight sync send."""

from __future__ import annotations

import torch
from torch import Tensor

NAMES = ("a.weight", "b.weight", "c.bias")


def tensors(scale: float = 1.0) -> dict[str, Tensor]:
    return {
        "a.weight": torch.arange(1000.0).view(50, 20) * scale,
        "b.weight": torch.arange(640.0).view(10, 64).bfloat16(),
        "c.bias": torch.tensor([0.0, -1.5, 2.0]),
    }
