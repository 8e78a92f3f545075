"""Attention over prefix trees with torch's fused kernels, called for pairs of blocks.

A call attends from blocks of queries to blocks of keys. Outputs and log-sum-exps of several calls
for the same queries are merged to those of all keys, and the gradients of each call follow from the
merged output and log-sum-exp alone (as in ring attention, arXiv 2310.01889). torch differentiates
its kernels through the output of a single call only, so the kernels of both directions are
called here.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from mcore_mas.megatron.model.layout import CausalBlocks, PackedTrees
from rollout.models.batch_invariant import KEY_MULTIPLE, row_attention


class BlockAttention(torch.autograd.Function):
    """`apply(q, k, v, layout, scale)`: causal attention of each token to its segment and its ancestors.

    Every token attends within its own block first. Then its attention to earlier blocks is merged in,
    call by call. Sums over several calls are accumulated in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: PackedTrees, scale: float
    ) -> Tensor:
        """Return [T, heads, d] for q [T, heads, d] and k, v [T, kv_heads, d]."""
        merged_out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for blocks in layout.causal_blocks:
            block_q, block_k, block_v = (_read_blocks(x, blocks) for x in (q, k, v))
            block_out, block_lse = attend(block_q, block_k, block_v, causal=True, scale=scale)
            _write_blocks(merged_out, blocks, block_out)
            _write_blocks(lse, blocks, block_lse)
        for queries, keys in layout.unmasked_pairs:
            more_out, more_lse = attend(
                _read_range(q, queries),
                _read_range(k, keys),
                _read_range(v, keys),
                causal=False,
                scale=scale,
            )
            _merge_outputs(
                merged_out[queries], lse[queries], more_out[0].transpose(0, 1), more_lse[0].t()
            )
        out = merged_out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout = layout
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grad_q, grad_k, grad_v = (
            torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)
        )
        for blocks in ctx.layout.causal_blocks:
            block_grad_out = _read_blocks(grad_out, blocks)
            if blocks.is_present is not None:  # padding has no gradient
                block_grad_out = block_grad_out * blocks.is_present[:, None, :, None]
            block_grads = attend_backward(
                block_grad_out,
                *(_read_blocks(x, blocks) for x in (q, k, v, out, lse)),
                causal=True,
                scale=ctx.scale,
            )
            for grad, block_grad in zip((grad_q, grad_k, grad_v), block_grads, strict=True):
                _write_blocks(grad, blocks, block_grad)
        for queries, keys in ctx.layout.unmasked_pairs:
            more_grad_q, more_grad_k, more_grad_v = attend_backward(
                _read_range(grad_out, queries),
                _read_range(q, queries),
                _read_range(k, keys),
                _read_range(v, keys),
                _read_range(out, queries),
                _read_range(lse, queries),
                causal=False,
                scale=ctx.scale,
            )
            grad_q[queries] += more_grad_q[0].transpose(0, 1)
            grad_k[keys] += more_grad_k[0].transpose(0, 1)
            grad_v[keys] += more_grad_v[0].transpose(0, 1)
        return grad_q.to(q.dtype), grad_k.to(q.dtype), grad_v.to(q.dtype), None, None


def _merge_outputs(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Merge the attention over further keys into outputs and log-sum-exps, in place.

    Args:
        out, more_out: [Q, heads, d].
        lse, more_lse: [Q, heads].
    """
    # o = o + w (o' − o), w = e^l' / (e^l + e^l')
    out.lerp_(more_out.float(), torch.sigmoid(more_lse - lse)[..., None])
    torch.logaddexp(lse, more_lse, out=lse)


def _read_range(x: Tensor, tokens: slice) -> Tensor:
    """Return a range of tokens of x [T, heads, ...] as [1, heads, Q, ...]."""
    return x[tokens].transpose(0, 1)[None]


def _read_blocks(x: Tensor, blocks: CausalBlocks) -> Tensor:
    """Return blocks of x [T, heads, ...] as [B, heads, L, ...]; a view if they lie end to end."""
    if blocks.token_range is None:
        result: Tensor = x[blocks.block_tokens]
    else:
        result = x[blocks.token_range].unflatten(0, (-1, blocks.length))
    return result.transpose(1, 2)


def _write_blocks(x: Tensor, blocks: CausalBlocks, values: Tensor) -> None:
    """Write values [B, heads, L, ...], except those of padding, to the tokens that `_read_blocks` reads."""
    values = values.transpose(1, 2)
    if blocks.token_range is not None:
        x[blocks.token_range].unflatten(0, (-1, blocks.length)).copy_(values)
    else:
        x[blocks.present_tokens] = values.flatten(0, 1)[blocks.present_positions].to(x.dtype)


_aten = torch.ops.aten

# The memory-efficient kernel pads its log-sum-exps to a multiple of this length.
_LSE_MULTIPLE = 32

# Gradients of queries, keys and values.
_Gradients = tuple[Tensor, Tensor, Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute softmax(scale · q kᵀ) v by one of torch's fused kernels, without autograd.

    Args:
        q: [B, heads, Q, d]; `heads` is a multiple of `kv_heads`.
        k, v: [B, kv_heads, K, d].
        causal: query i attends to keys 0 to i; then Q = K.

    Returns:
        Output [B, heads, Q, d]; log-sum-exps [B, heads, Q] in float32.
    """
    if q.device.type == "cpu":  # this kernel takes k and v with fewer heads than q
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return out, lse

    k = _repeat_heads(k, q)
    v = _repeat_heads(v, q)
    if q.dtype == torch.float32:
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
        return out, lse[..., : q.shape[2]]
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse


def attend_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> _Gradients:
    """Compute the gradients of `attend` in q, k and v.

    Args:
        grad_out: gradient of the output, in the shape of `out`.
        q, k, v, causal, scale: arguments of `attend`.
        out, lse: results of `attend`, merged over all keys of the queries.
    """
    if q.device.type == "cpu":
        cpu_kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return cast(_Gradients, cpu_kernel(grad_out, q, k, v, out, lse, 0.0, causal, scale=scale))

    # Neither kernel drops anything out, but both want the state of a random generator.
    tensors = (grad_out, q, _repeat_heads(k, q), _repeat_heads(v, q))
    if q.dtype == torch.float32:
        # The kernel assumes that log-sum-exps are contiguous.
        padding = -lse.shape[-1] % _LSE_MULTIPLE
        padded_lse = pad(lse, (0, padding), value=torch.inf).contiguous()
        random_state = torch.zeros((), dtype=torch.int64, device=q.device)
        grad_q, grad_k, grad_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
            *tensors,
            None,
            out,
            padded_lse,
            random_state,
            random_state,
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
    else:
        random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grad_q, grad_k, grad_v = _aten._scaled_dot_product_flash_attention_backward(
            *tensors,
            out,
            lse.contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            random_state,
            random_state[0],
            scale=scale,
        )
    return grad_q, _sum_repeated_heads(grad_k, k), _sum_repeated_heads(grad_v, v)


def _repeat_heads(kv: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values [B, kv_heads, K, d] for the query heads that share them."""
    repeats = q.shape[1] // kv.shape[1]
    return kv if repeats == 1 else kv.repeat_interleave(repeats, dim=1)


def _sum_repeated_heads(grad: Tensor, kv: Tensor) -> Tensor:
    """Sum the gradients of keys or values over the query heads that share them."""
    summed: Tensor = grad.unflatten(1, (kv.shape[1], -1)).sum(dim=2)
    return summed


def attend_exactly(
    q: Tensor, k: Tensor, v: Tensor, paths: Sequence[Sequence[slice]], scale: float
) -> Tensor:
    """Compute attention over prefix trees with the bits of the embedded engine's attention.

    Args:
        q: [T, heads, d].
        k, v: [T, kv_heads, d].
        paths: token ranges from the root to each segment, by segment.

    Returns:
        [T, heads · d]
    """
    heads_per_kv_head = q.shape[1] // k.shape[1]
    outputs = []
    for path in paths:
        # [kv_heads, K, d]: all tokens that the segment's last token attends to, padded to a
        # multiple of the lanes of a softmax, as in the engine.
        keys = torch.cat([k[token_range] for token_range in path]).transpose(0, 1)
        values = torch.cat([v[token_range] for token_range in path]).transpose(0, 1)
        key_count = keys.shape[1]
        padding = -key_count % KEY_MULTIPLE
        keys = pad(keys, (0, 0, 0, padding))
        values = pad(values, (0, 0, 0, padding))

        queries = q[path[-1]]
        last_keys = torch.arange(key_count - len(queries), key_count)[:, None]
        is_visible = torch.arange(keys.shape[1]) <= last_keys
        mask = torch.where(is_visible, 0.0, -torch.inf).repeat(heads_per_kv_head, 1)[None]

        # [kv_heads, heads per kv head · Q, d]
        grouped = (queries * scale).unflatten(1, (-1, heads_per_kv_head))
        grouped = grouped.permute(1, 2, 0, 3).flatten(1, 2)
        out = row_attention(grouped, keys.transpose(1, 2), values, mask)
        outputs.append(out.unflatten(1, (heads_per_kv_head, -1)).permute(2, 0, 1, 3).flatten(1))
    return torch.cat(outputs)
