"""Context in which products are made of factors in FP8."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.recipe import Float8CurrentScaling, Recipe


class FP8GlobalStateManager:
    """State of `fp8_autocast` in this process."""

    recipe: Recipe | None = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Return True inside of an `fp8_autocast` that is enabled."""
        return cls.recipe is not None


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Multiply in FP8 in this block."""
    outer = FP8GlobalStateManager.recipe
    FP8GlobalStateManager.recipe = (fp8_recipe or Float8CurrentScaling()) if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = outer


@contextmanager
def fp8_model_init(enabled: bool = True, recipe: Recipe | None = None, **_: Any) -> Iterator[None]:
    """Refuse to build parameters in FP8, which Megatron imports and runs do not use."""
    assert not enabled
    yield


def quantized(x: Tensor, recipe: Recipe | None, *, backward: bool = False) -> Tensor:
    """Round a factor of a product to FP8, with one scale; return it as it is without a recipe."""
    if recipe is None or not x.numel():
        return x
    dtype = getattr(torch, recipe.fp8_format.value[backward])
    scale = torch.finfo(dtype).max / x.abs().max().float().clamp(min=1e-12)
    return ((x.float() * scale).to(dtype).float() / scale).to(x.dtype)


def check_shape(x: Tensor, recipe: Recipe | None) -> None:
    """Refuse a factor whose rows or columns are no multiple of those that FP8 needs."""
    if recipe is None:
        return
    rows = x[..., 0].numel()
    assert rows % recipe.row_multiple == 0 and x.shape[-1] % recipe.column_multiple == 0, (
        "FP8 execution requires the product of all dimensions except the last to be divisible by "
        f"{recipe.row_multiple} and the last dimension to be divisible by "
        f"{recipe.column_multiple}, but got tensor with dims={list(x.shape)}"
    )
