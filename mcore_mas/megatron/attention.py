"""Attention and rotary positions over packed trees of sequences, as Megatron modules."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_mas.megatron.batch import Tree


@dataclass
class PackedTrees(PackedSeqParams):
    """The layout of one micro-batch, handed through Megatron to `TreeAttention` and `TreeRotary`.

    `qkv_format` stays "sbhd" (one row of T tokens), which keeps Megatron from re-shaping for its own packed kernels.
    """

    qkv_format: str = "sbhd"
    max_seqlen_q: int = 0  # Megatron takes the larger of these two for the rotary length; TreeRotary needs neither
    max_seqlen_kv: int = 0
    spans: tuple[_Span, ...] = field(default_factory=tuple)

    @classmethod
    def of(cls, trees: tuple[Tree, ...], device: torch.device) -> PackedTrees:
        """The layout of `trees` packed end to end, with its index tensors made once for all layers."""
        spans, start = [], 0
        for tree in trees:
            spans.append(_Span.of(tree, start, device))
            start += tree.tokens
        return cls(spans=tuple(spans))


@dataclass(frozen=True, slots=True)
class _Span:
    """One tree's place in the pack; replies are padded to R, the longest, for one batched call."""

    start: int
    prompt: int  # P
    tokens: int
    rows: Tensor | None  # [G, R] index of each reply token into the span; pads repeat the reply's last token
    flat: Tensor | None  # [sum of replies] index into the flattened [G, R]
    mask: Tensor | None  # [R, P + R] bool, what a reply token sees

    @classmethod
    def of(cls, tree: Tree, start: int, device: torch.device) -> _Span:
        if not tree.replies:
            return cls(start, tree.prompt, tree.tokens, None, None, None)
        lengths = torch.tensor(tree.replies)
        longest = int(lengths.max())
        first = tree.prompt + torch.cumsum(lengths, 0) - lengths
        column = torch.arange(longest)
        rows = first[:, None] + torch.minimum(column[None], lengths[:, None] - 1)
        flat = (column[None] < lengths[:, None]).flatten().nonzero()[:, 0]
        own = torch.ones(longest, longest, dtype=torch.bool).tril()
        mask = torch.cat([torch.ones(longest, tree.prompt, dtype=torch.bool), own], dim=1)
        return cls(start, tree.prompt, tree.tokens, rows.to(device), flat.to(device), mask.to(device))


class TreeAttention(torch.nn.Module):
    """Megatron `core_attention` by torch's scaled-dot-product attention; prompts are computed once per tree."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.repeat = config.num_attention_heads // config.num_query_groups

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: object = None,
        packed_seq_params: PackedTrees | None = None,
    ) -> Tensor:
        """Attend within each tree.

        Args:
            query: [T, 1, heads, head_dim] of this rank.
            key, value: [T, 1, kv_heads, head_dim] of this rank.
            packed_seq_params: the layout; required.

        Returns:
            [T, 1, heads * head_dim]
        """
        assert packed_seq_params is not None, "TreeAttention runs on packed trees only"
        q, k, v = (x[:, 0].transpose(0, 1) for x in (query, key, value))  # [heads, T, d]
        outs = [self._span(q, k, v, span) for span in packed_seq_params.spans]
        return torch.cat(outs, dim=1).transpose(0, 1).reshape(query.shape[0], 1, -1)

    def _span(self, q: Tensor, k: Tensor, v: Tensor, span: _Span) -> Tensor:
        q, k, v = (x[:, span.start : span.start + span.tokens] for x in (q, k, v))
        p = span.prompt
        out = self._attend(q[None, :, :p], k[None, :, :p], v[None, :, :p], None)[0]  # [heads, P, d]
        if span.rows is None:
            return out
        group = span.rows.shape[0]
        own = [x[:, span.rows].transpose(0, 1) for x in (q, k, v)]  # [G, heads, R, d]
        seen = [
            torch.cat([x[None, :, :p].expand(group, -1, -1, -1), y], dim=2)
            for x, y in zip((k, v), own[1:], strict=True)
        ]
        replies = self._attend(own[0], *seen, span.mask)  # [G, heads, R, d]
        replies = replies.transpose(0, 1).flatten(1, 2)[:, span.flat]  # [heads, sum of replies, d]
        return torch.cat([out, replies], dim=1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.repeat > 1:
            k, v = k.repeat_interleave(self.repeat, dim=1), v.repeat_interleave(self.repeat, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale)


class TreeRotary(RotaryEmbedding):
    """Rotary embedding at explicit positions, set per micro-batch: a reply continues its prompt's positions."""

    position_ids: Tensor  # [T]

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: object = None) -> Tensor:
        """Angles [T, 1, 1, head_dim] of the current micro-batch."""
        return self.get_emb(int(self.position_ids.max()) + 1)[self.position_ids]
