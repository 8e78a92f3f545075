"""Attention over packed sequences."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class DotProductAttention(torch.nn.Module):
    """Causal attention within each of several packed sequences (format thd)."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert qkv_format == "thd"
        assert attn_mask_type == "padding_causal"
        assert attention_dropout == 0.0
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        **_: Any,
    ) -> Tensor:
        """Return [tokens, heads · head_dim]."""
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        lengths = cu_seqlens_q.diff().tolist()
        assert max_seqlen_q == max_seqlen_kv == max(lengths)
        sequences = zip(
            query_layer.split(lengths),
            key_layer.split(lengths),
            value_layer.split(lengths),
            strict=True,
        )
        attended = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in sequence),
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
            for sequence in sequences
        ]
        return torch.cat(attended).flatten(1)
