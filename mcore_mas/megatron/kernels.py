"""One block of queries over one block of keys: torch's fused attention kernels with what joins their results.

The output and its log-sum-exp of several blocks of keys become those of all keys, and each block's gradient follows
from the joint output and log-sum-exp alone (as in ring attention, arXiv 2310.01889). torch differentiates
its kernels through the output of one call only, so both directions are called here.

Queries, outputs and their gradients are [B, heads, Q, d], keys and values [B, kv_heads, K, d], log-sum-exps [B, heads,
Q] float32; heads are a multiple of kv_heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_aten = torch.ops.aten
_LSE_MULTIPLE = 32  # to which the memory-efficient kernel pads its log-sum-exps

Gradients = tuple[Tensor, Tensor, Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of softmax(scale · q kᵀ) v; with `causal`, Q = K and a query sees keys up to its own."""
    if q.device.type == "cpu":  # its kernel knows of shared keys
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    k, v = _per_head(q, k), _per_head(q, v)
    if q.dtype == torch.float32:
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[2]]
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def attend_backward(
    of_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> Gradients:
    """Gradients of q, k and v from that of the output; `out` and `lse` are those over all keys of the queries."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            of_out, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    expanded_k, expanded_v = _per_head(q, k), _per_head(q, v)
    backward = _efficient_backward if q.dtype == torch.float32 else _flash_backward
    of_q, of_k, of_v = backward(of_out, q, expanded_k, expanded_v, out, lse, causal, scale)
    return of_q, _summed(of_k, k), _summed(of_v, v)


def _efficient_backward(
    of_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    padded = pad(lse, (0, -lse.shape[-1] % _LSE_MULTIPLE), value=torch.inf)
    none = torch.zeros((), dtype=torch.int64, device=q.device)  # state of a dropout that there is not
    mask = [True, True, True, False]
    of_q, of_k, of_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
        of_out, q, k, v, None, out, padded, none, none, 0.0, mask, causal, scale=scale
    )
    return of_q, of_k, of_v


def _flash_backward(
    of_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    none = torch.zeros(2, dtype=torch.uint64, device=q.device)
    lengths = (None, None, q.shape[2], k.shape[2])
    return _aten._scaled_dot_product_flash_attention_backward(
        of_out, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, none, none[0], scale=scale
    )


def _per_head(q: Tensor, k: Tensor) -> Tensor:
    """[B, heads, K, d] of keys or values, each repeated for the heads that share it."""
    shared = q.shape[1] // k.shape[1]
    return k if shared == 1 else k.repeat_interleave(shared, dim=1)


def _summed(of_expanded: Tensor, k: Tensor) -> Tensor:
    """Gradient of keys or values from that of `_per_head`."""
    return of_expanded.unflatten(1, (k.shape[1], -1)).sum(dim=2)
