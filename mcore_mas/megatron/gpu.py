"""What megatron-core leaves to Apex and Transformer Engine, by torch alone: it does nothing where there is no CUDA."""

# mypy: disable-error-code="attr-defined"
from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def patch_fallbacks() -> None:
    """Replace Megatron's fallbacks for a GPU without Transformer Engine or Apex.

    They read the norm of every gradient by itself, and the host waits for each; they launch kernels by parameter; and
    the gradient of a weight is made in bfloat16 before it is added to its float32 buffer.
    """
    if not torch.cuda.is_available():
        return
    utils = importlib.import_module("megatron.core.utils")
    clip = importlib.import_module("megatron.core.optimizer.clip_grads")
    if clip.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip.l2_norm_impl = _norm
        for module in (clip, importlib.import_module("megatron.core.optimizer.optimizer")):
            module.multi_tensor_scale_impl = _scale
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    if not layers._grad_accum_fusion_available:
        layers._grad_accum_fusion_available = True
        layers.fused_weight_gradient_mlp_cuda = _WeightGradient


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in total's precision."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cpu":
        total += a @ b
    else:  # cuBLAS adds to float32 what it makes of bfloat16 factors
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


class _WeightGradient:
    """Apex' module of that name."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, of_out: Tensor, total: Tensor) -> None:
        add_product(total, of_out.t(), inputs)


def _norm(_chunk: int, _flag: Tensor, tensors: Sequence[list[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """The norm [1] of all tensors together."""
    norms = torch._foreach_norm(tensors[0])
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def _scale(_chunk: int, _flag: Tensor, tensors: Sequence[list[Tensor]], scale: float) -> None:
    """Write the first list's tensors, scaled, into the second's."""
    source, target = tensors
    if source is not target:
        torch._foreach_copy_(target, source)
    if scale != 1.0:
        torch._foreach_mul_(target, scale)
