"""Faster replacements for the fallbacks that Megatron uses on a GPU without Apex or Transformer Engine."""

# mypy: disable-error-code="attr-defined"

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mcore_mas.megatron.main_grad import add_product


def patch_fallbacks() -> None:
    """Replace four slow functions of Megatron on a GPU; do nothing on a machine without CUDA.

    - Norm of gradients: the fallback computes one norm per gradient, and the host waits for each.
    - Scaling of gradients: the fallback launches one kernel per parameter.
    - Copies of master weights to weights in bfloat16: Megatron launches one kernel per parameter,
      with Apex or without.
    - Gradient of a weight, unless Apex has a kernel for it: the fallback computes it in bfloat16,
      and then adds it to the float32 buffer.

    The norm and the scaling replace the kernels of Transformer Engine and Apex too, so that their
    results do not depend on what is installed.
    """
    if not torch.cuda.is_available():
        return

    clip_grads = importlib.import_module("megatron.core.optimizer.clip_grads")
    optimizer = importlib.import_module("megatron.core.optimizer.optimizer")
    clip_grads.l2_norm_impl = _multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_impl = _multi_tensor_scale
    optimizer.multi_tensor_scale_impl = _multi_tensor_scale
    optimizer._multi_tensor_copy_this_to_that = multi_tensor_copy

    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    if not layers._grad_accum_fusion_available:
        layers._grad_accum_fusion_available = True
        # Megatron calls the kernel by its name in Apex, MODULE.FUNCTION.
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=_accumulate_weight_grad
        )


def _accumulate_weight_grad(inputs: Tensor, grad_out: Tensor, total: Tensor) -> None:
    """Add the gradient of a weight, grad_outᵀ · inputs, to its float32 buffer."""
    add_product(total, grad_out.t(), inputs)


def _multi_tensor_l2_norm(
    _chunk_size: int, _overflow: Tensor, tensors: Sequence[list[Tensor]], *_: Any
) -> tuple[Tensor, None]:
    """Return the norm [1] of all tensors of the first list, with the signature of Apex's function."""
    norms = torch._foreach_norm(tensors[0])
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def multi_tensor_copy(
    this: Sequence[Tensor], that: Sequence[Tensor], overflow_buf: Tensor | None = None
) -> None:
    """Copy the tensors of one list to those of another, with the signature of Megatron's function."""
    if this:
        torch._foreach_copy_(list(that), list(this))


def _multi_tensor_scale(
    _chunk_size: int, _overflow: Tensor, tensors: Sequence[list[Tensor]], scale: float
) -> None:
    """Write the scaled tensors of the first list to those of the second, with the signature of Apex's function."""
    sources, targets = tensors
    if sources is not targets:
        torch._foreach_copy_(targets, sources)
    if scale != 1.0:
        torch._foreach_mul_(targets, scale)
