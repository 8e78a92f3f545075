"""Attention and rotary positions over packed prefix trees, also under context parallelism, as Megatron modules.

Where there is CUDA, Triton's kernels attend over any forest in one call (`tree_kernels.py`). Elsewhere torch's fused
kernels attend from one block of queries to one block of keys. The output and its log-sum-exp of several blocks of keys
become those of all keys, and each block's gradient follows from the joint output and log-sum-exp alone (as in ring
attention, arXiv 2310.01889). torch differentiates its kernels through the output of one call only, so both directions
are called here.

Context parallelism cuts the tokens of a micro-batch over ranks, and exchanges them for heads to attend. The exchange is
DeepSpeed-Ulysses' (arXiv 2309.14509), "a2a" in Megatron's words: every rank attends over the whole micro-batch with its
part of the heads, so any layout of sequences stays as it is.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor
from torch.nn.functional import pad

from mcore_mas.megatron.model.layout import CausalBlocks, PackedTrees
from mcore_mas.megatron.model.tree_ops import KernelAttention
from rollout.models.exact import COLUMNS, row_attention


class TreeAttention(torch.nn.Module):
    """Megatron `core_attention` over trees of segments: what sequences share is computed once."""

    def __init__(  # type: ignore[no-untyped-def]
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        softmax_scale=None,
        fused: bool = False,
        **_,
    ) -> None:
        """With `fused`, Transformer Engine's kernels attend where no sequence shares anything: they have no trees."""
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.fused, self.exact = fused, config.deterministic_mode

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: object,
        packed_seq_params: PackedTrees,
        **__: object,
    ) -> Tensor:
        """Attend within each tree.

        Args:
            query: [T, 1, heads, head_dim] of this rank.
            key, value: [T, 1, kv_heads, head_dim] of this rank.
            packed_seq_params: the layout.

        Returns:
            [T, 1, heads * head_dim]
        """
        assert packed_seq_params is not None, "TreeAttention runs on packed trees only"
        q, k, v = (
            x.squeeze(1) for x in (query, key, value)
        )  # a view, whose gradient needs no copy either
        if self.fused and packed_seq_params.starts is not None:
            return self._whole_sequences(
                q, k, v, packed_seq_params.starts, packed_seq_params.longest
            )[:, None]
        if self.exact:
            return _attend_exactly(q, k, v, packed_seq_params.paths, self.scale)[:, None]
        if packed_seq_params.plan is not None:
            out: Tensor = KernelAttention.apply(q, k, v, packed_seq_params.plan, self.scale)
        else:
            if (
                q.device.type == "cpu"
            ):  # short blocks take its kernels up to six times as long in bfloat16
                q, k, v = q.float(), k.float(), v.float()
            out = _TreeAttention.apply(q, k, v, packed_seq_params, self.scale).to(value.dtype)
        return out.flatten(1)[:, None]

    def _whole_sequences(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int
    ) -> Tensor:
        """[T, heads * head_dim] by Transformer Engine, every sequence causally over itself."""
        kernel = _fused_kernel(q.shape[1], k.shape[1], q.shape[2], self.scale)
        sizes = {
            "cu_seqlens_q": starts,
            "cu_seqlens_kv": starts,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }
        return cast(Tensor, kernel(q, k, v, **_THD, **sizes))


_THD = {
    "qkv_format": "thd",
    "attn_mask_type": "padding_causal",
}  # sequences end to end, each causally over itself


@cache
def _fused_kernel(heads: int, kv_heads: int, head_dim: int, scale: float) -> torch.nn.Module:
    from transformer_engine.pytorch import (
        DotProductAttention,  # only where it is installed and asked for
    )

    sizes = {"num_attention_heads": heads, "kv_channels": head_dim, "num_gqa_groups": kv_heads}
    return cast(
        torch.nn.Module,
        DotProductAttention(**sizes, **_THD, attention_dropout=0.0, softmax_scale=scale),
    )


def _attend_exactly(
    q: Tensor, k: Tensor, v: Tensor, paths: Sequence[Sequence[slice]], scale: float
) -> Tensor:
    """[T, heads · d] of q [T, heads, d] and k, v [T, kv_heads, d], to the bits of the embedded engine's attention."""
    outs, groups = [], q.shape[1] // k.shape[1]
    for path in paths:
        # [kv_heads, K, d] of all that the segment's last token sees, and no more than a softmax's lanes beyond
        keys, values = (torch.cat([x[place] for place in path]).transpose(0, 1) for x in (k, v))
        seen, own = keys.shape[1], q[path[-1]]
        keys, values = (pad(x, (0, 0, 0, -seen % COLUMNS)) for x in (keys, values))
        near = torch.arange(keys.shape[1]) <= torch.arange(seen - len(own), seen)[:, None]
        mask = torch.where(near, 0.0, -torch.inf).repeat(groups, 1)[None]
        folded = (own * scale).unflatten(1, (-1, groups)).permute(1, 2, 0, 3).flatten(1, 2)
        mixed = row_attention(folded, keys.transpose(1, 2), values, mask)
        outs.append(mixed.unflatten(1, (groups, -1)).permute(2, 0, 1, 3).flatten(1))
    return torch.cat(outs)


class _TreeAttention(torch.autograd.Function):
    """Every token over its own block, then joined with what it sees before, call by call.

    Sums over several calls are kept in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: PackedTrees, scale: float
    ) -> Tensor:
        """[T, heads, d] of q [T, heads, d] and k, v [T, kv_heads, d]."""
        joint = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for own in layout.own:
            out, own_lse = attend(*(_blocks(x, own) for x in (q, k, v)), causal=True, scale=scale)
            _put(joint, own, out)
            _put(lse, own, own_lse)
        for queries, keys in layout.seen:
            seen, seen_lse = attend(
                _row(q, queries), _row(k, keys), _row(v, keys), causal=False, scale=scale
            )
            _join(joint[queries], lse[queries], seen[0].transpose(0, 1), seen_lse[0].t())
        out = joint.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        of_out = of_out.contiguous()
        gradients = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)]
        for own in ctx.layout.own:
            blocks = [_blocks(x, own) for x in (of_out, q, k, v, out, lse)]
            if own.present is not None:  # what was padded has no gradient
                blocks[0] = blocks[0] * own.present[:, None, :, None]
            parts = attend_backward(*blocks, causal=True, scale=ctx.scale)
            for whole, part in zip(gradients, parts, strict=True):
                _put(whole, own, part)
        for queries, keys in ctx.layout.seen:
            at_queries = [_row(x, queries) for x in (of_out, q, out, lse)]
            at_keys = [_row(x, keys) for x in (k, v)]
            parts = attend_backward(
                *at_queries[:2], *at_keys, *at_queries[2:], causal=False, scale=ctx.scale
            )
            for whole, place, part in zip(gradients, (queries, keys, keys), parts, strict=True):
                whole[place] += part[0].transpose(0, 1)
        return *(gradient.to(q.dtype) for gradient in gradients), None, None


def _join(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Outputs [Q, heads, d] and their log-sum-exps [Q, heads], in place, with those over further keys."""
    # o = o + w (o' − o), w = e^l' / (e^l + e^l')
    out.lerp_(more.float(), torch.sigmoid(more_lse - lse)[..., None])
    torch.logaddexp(lse, more_lse, out=lse)


def _row(x: Tensor, place: slice) -> Tensor:
    """[1, heads, Q, ...] of [T, heads, ...]."""
    return x[place].transpose(0, 1)[None]


def _blocks(x: Tensor, own: CausalBlocks) -> Tensor:
    """[B, heads, L, ...] of [T, heads, ...]: a view where the blocks lie one after the other, all of them full."""
    blocks: Tensor = (
        x[own.rows] if own.place is None else x[own.place].unflatten(0, (-1, own.length))
    )
    return blocks.transpose(1, 2)


def _put(x: Tensor, own: CausalBlocks, blocks: Tensor) -> None:
    """Write [B, heads, L, ...] to where `_blocks` reads it."""
    blocks = blocks.transpose(1, 2)
    if own.place is not None:
        x[own.place].unflatten(0, (-1, own.length)).copy_(blocks)
    else:
        x[own.tokens] = blocks.flatten(0, 1)[own.filled].to(x.dtype)


class TreeRotary(RotaryEmbedding):
    """Rotary embedding at explicit positions, set per micro-batch: a segment continues its parent's positions."""

    position_ids: Tensor  # [T]
    positions: int  # above all of them; a number here, because asking the GPU for it would wait

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: object = None
    ) -> Tensor:
        """Angles [T, 1, 1, head_dim] of the current micro-batch, twice; on a CPU what `turned` takes."""
        angles = cast(Tensor, self.get_emb(self.positions)[self.position_ids])
        if angles.device.type != "cpu":
            return angles
        half = angles[..., : angles.shape[-1] // 2]
        cos, sin = half.cos(), half.sin()
        return torch.cat([cos, cos, -sin, sin], dim=-1)


_aten = torch.ops.aten
_LSE_MULTIPLE = 32  # to which the memory-efficient kernel pads its log-sum-exps

Gradients = tuple[Tensor, Tensor, Tensor]


# in `attend` and its gradient, queries and outputs are [B, heads, Q, d], keys and values [B, kv_heads, K, d], and
# log-sum-exps [B, heads, Q] float32; heads are a multiple of kv_heads


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of softmax(scale · q kᵀ) v; with `causal`, Q = K and a query sees keys up to its own."""
    if q.device.type == "cpu":  # its kernel knows of shared keys
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return out, lse
    k, v = _per_head(q, k), _per_head(q, v)
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
    of_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> Gradients:
    """Gradients of q, k and v from that of the output; `out` and `lse` are those over all keys of the queries."""
    if q.device.type == "cpu":
        on_cpu = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return cast(Gradients, on_cpu(of_out, q, k, v, out, lse, 0.0, causal, scale=scale))
    backward = _efficient_backward if q.dtype == torch.float32 else _flash_backward
    of_q, *of_kv = backward(of_out, q, _per_head(q, k), _per_head(q, v), out, lse, causal, scale)
    of_k, of_v = (of_expanded.unflatten(1, (k.shape[1], -1)).sum(dim=2) for of_expanded in of_kv)
    return of_q, of_k, of_v


def _efficient_backward(
    of_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> Gradients:
    padded = pad(
        lse, (0, -lse.shape[-1] % _LSE_MULTIPLE), value=torch.inf
    ).contiguous()  # read as neighbours, always
    none = torch.zeros(
        (), dtype=torch.int64, device=q.device
    )  # state of a dropout that there is not
    mask = [True, True, True, False]
    of_q, of_k, of_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
        of_out, q, k, v, None, out, padded, none, none, 0.0, mask, causal, scale=scale
    )
    return of_q, of_k, of_v


def _flash_backward(
    of_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> Gradients:
    none = torch.zeros(2, dtype=torch.uint64, device=q.device)
    lengths = (None, None, q.shape[2], k.shape[2])
    given = (of_out, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, none, none[0])
    return cast(Gradients, _aten._scaled_dot_product_flash_attention_backward(*given, scale=scale))


def _per_head(q: Tensor, k: Tensor) -> Tensor:
    """[B, heads, K, d] of keys or values, each repeated for the heads that share it."""
    shared = q.shape[1] // k.shape[1]
    return k if shared == 1 else k.repeat_interleave(shared, dim=1)


class ContextAttention(TreeAttention):
    """`TreeAttention` where each rank holds T / cp of the tokens."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """As `TreeAttention`; `config` says the number of context-parallel ranks."""
        super().__init__(config, *args, **kwargs)
        kv_heads = config.num_query_groups // config.tensor_model_parallel_size
        # fewer key/value heads than ranks, or a number that does not divide: some go to several ranks
        self.copies = config.context_parallel_size // math.gcd(
            config.context_parallel_size, kv_heads
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Attend within each tree; tensors as in `TreeAttention` with T / cp in place of T."""
        if self.copies > 1:
            key, value = (x.repeat_interleave(self.copies, dim=2) for x in (key, value))
        group = parallel_state.get_context_parallel_group()
        # [T / cp, cp, heads / cp, head_dim] of queries, keys and values travel together
        parts = [x.squeeze(1).unflatten(1, (group.size(), -1)) for x in (query, key, value)]
        # the r-th of [cp, ...] goes to rank r, whose place in the result is the sender's
        whole = all_to_all(group, torch.cat(parts, dim=2).transpose(0, 1)).flatten(
            0, 1
        )  # [T, heads / cp, head_dim]
        heads = whole.split([part.shape[2] for part in parts], dim=1)
        attended = super().forward(
            *(x[:, None] for x in heads), *args, **kwargs
        )  # [T, 1, heads / cp · head_dim]
        # [cp, T / cp, heads / cp · head_dim]
        own = (
            attended.squeeze(1).unflatten(0, (group.size(), -1)).to(value.dtype)
        )  # queries on a CPU are float32
        back: Tensor = all_to_all(group, own)
        return back.transpose(0, 1).reshape(query.shape[0], 1, -1)
