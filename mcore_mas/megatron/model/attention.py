"""Attention over packed prefix trees, also under context parallelism, as Megatron modules.

On a GPU, Triton's kernels attend over any forest in one call (`tree_ops.py`). On a CPU, and on a GPU
where `choose_tile_sizes` rules Triton's kernels out, torch's fused kernels are called for pairs of
blocks (`block_attention.py`).

Context parallelism splits the tokens of a micro-batch over ranks. For attention the ranks exchange
tokens for heads (DeepSpeed-Ulysses, arXiv 2309.14509; "a2a" in Megatron): every rank attends over
the whole micro-batch with its part of the heads, so that the layout of the trees stays the same.
"""

import math
from functools import cache
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from mcore_mas.megatron.model.block_attention import BlockAttention, attend_exactly
from mcore_mas.megatron.model.layer_ops import KernelQueriesAndKeys
from mcore_mas.megatron.model.layout import PackedTrees
from mcore_mas.megatron.model.tree_ops import KernelAttention


class TreeAttention(torch.nn.Module):
    """Megatron `core_attention` over prefix trees; shared prefixes are computed once."""

    def __init__(  # type: ignore[no-untyped-def]
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        softmax_scale=None,
        uses_te_kernel: bool = False,
        **_,
    ) -> None:
        """Set the scale and the kernels; other arguments are Megatron's.

        Args:
            softmax_scale: factor of the scores; None: 1 / √head_dim.
            uses_te_kernel: use Transformer Engine's kernel for micro-batches whose sequences share
                no tokens. It does not support trees.
        """
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.uses_te_kernel = uses_te_kernel
        self.exact = config.deterministic_mode

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
            [T, 1, heads · head_dim], in the type of `value`.
        """
        layout = packed_seq_params
        assert layout is not None, "TreeAttention runs on packed trees only"
        # In the backward pass squeeze returns views, too; x[:, 0] would copy the gradients.
        q = query.squeeze(1)
        k = key.squeeze(1)
        v = value.squeeze(1)
        starts = layout.sequence_starts
        if self.uses_te_kernel and starts is not None:  # no two sequences share tokens
            return self._attend_sequences(q, k, v, starts, layout.longest_sequence)[:, None]
        if self.exact:
            return attend_exactly(q, k, v, layout.paths, self.scale)[:, None]
        if layout.block_plan is not None:
            out: Tensor = KernelAttention.apply(q, k, v, layout.block_plan, self.scale)
            return out.flatten(1)[:, None]

        if q.device.type == "cpu":
            # For short blocks, the backward pass of the CPU's kernel takes several times as long in
            # bfloat16 as in float32.
            q = q.float()
            k = k.float()
            v = v.float()
        out = BlockAttention.apply(q, k, v, layout, self.scale).to(value.dtype)
        return out.flatten(1)[:, None]

    def _attend_sequences(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int
    ) -> Tensor:
        """Attend causally within each sequence with Transformer Engine.

        Args:
            q, k, v: [T, heads, head_dim]; keys and values may have fewer heads.
            starts: [sequences + 1] first token of each sequence, and T.
            longest: number of tokens of the longest sequence.

        Returns:
            [T, heads · head_dim]
        """
        kernel = _transformer_engine_attention(q.shape[1], k.shape[1], q.shape[2], self.scale)
        # Rotated queries and keys are float32 on a CPU, where tests run a stand-in for Transformer
        # Engine. The kernel takes tensors of one type.
        out = kernel(
            q.to(v.dtype),
            k.to(v.dtype),
            v,
            **_PACKED_CAUSAL,
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return cast(Tensor, out)


# Transformer Engine's options for sequences end to end, each of which attends causally to itself.
_PACKED_CAUSAL = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}


@cache
def _transformer_engine_attention(
    heads: int, kv_heads: int, head_dim: int, scale: float
) -> torch.nn.Module:
    # Transformer Engine is an optional dependency.
    from transformer_engine.pytorch import DotProductAttention

    attention = DotProductAttention(
        num_attention_heads=heads,
        kv_channels=head_dim,
        num_gqa_groups=kv_heads,
        **_PACKED_CAUSAL,
        attention_dropout=0.0,
        softmax_scale=scale,
    )
    return cast(torch.nn.Module, attention)


class FusedSelfAttention(SelfAttention):
    """Megatron's self-attention on a GPU, where one kernel normalizes and rotates queries and keys.

    Megatron's own class takes more passes over memory: it copies the queries out of the result of the
    linear layer, normalizes and then rotates queries and keys, and joins the gradients of queries,
    keys and values.
    """

    _angles: Tensor  # of the current call

    def forward(  # type: ignore[no-untyped-def]
        self, hidden_states: Tensor, *args, rotary_pos_emb: Tensor, **kwargs
    ) -> Any:
        """Attend as Megatron does, with the angles [T, 1, 1, head_dim] of `TreeRotary`."""
        self._angles = rotary_pos_emb
        return super().forward(hidden_states, *args, rotary_pos_emb=None, **kwargs)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's queries and keys, already rotated, and its values.

        Returns:
            Queries [T, 1, heads, head_dim]; keys and values [T, 1, kv_heads, head_dim].
        """
        packed, _bias = self.linear_qkv(hidden_states)
        query_weight = None
        key_weight = None
        if self.config.qk_layernorm:
            # These are `HeadNorm`s, which return their weights.
            query_weight = self.q_layernorm()
            key_weight = self.k_layernorm()
        kv_heads = self.num_query_groups_per_partition
        heads_per_kv_head = self.num_attention_heads_per_partition // kv_heads
        head_sizes = (heads_per_kv_head, kv_heads, self.hidden_size_per_attention_head)
        query, key, value = KernelQueriesAndKeys.apply(
            packed,
            query_weight,
            key_weight,
            self._angles,
            head_sizes,
            self.config.layernorm_epsilon,
        )
        return query, key, value


class ContextAttention(TreeAttention):
    """`TreeAttention` under context parallelism, where each rank holds T / cp of the tokens."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Build the module as `TreeAttention` does; `config` has the number of context-parallel ranks."""
        super().__init__(config, *args, **kwargs)
        ranks = config.context_parallel_size
        kv_heads = config.num_query_groups // config.tensor_model_parallel_size
        # If the key/value heads cannot be divided among the ranks, each is repeated.
        self.copies = ranks // math.gcd(ranks, kv_heads)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Attend within each tree; tensors as in `TreeAttention` with T / cp in place of T."""
        if self.copies > 1:
            key = key.repeat_interleave(self.copies, dim=2)
            value = value.repeat_interleave(self.copies, dim=2)
        group = parallel_state.get_context_parallel_group()
        ranks = group.size()

        # Queries, keys and values are sent together. Each is viewed as
        # [T / cp, cp, heads / cp, head_dim]; rank r receives index r of the second dimension. What it
        # receives is in the order of the senders, which is the order of the tokens.
        parts = [x.squeeze(1).unflatten(1, (ranks, -1)) for x in (query, key, value)]
        sent = torch.cat(parts, dim=2).transpose(0, 1)
        received = all_to_all(group, sent).flatten(0, 1)  # [T, heads / cp, head_dim]
        q, k, v = received.split([part.shape[2] for part in parts], dim=1)

        # [T, 1, heads / cp · head_dim]
        attended = super().forward(q[:, None], k[:, None], v[:, None], *args, **kwargs)

        # [cp, T / cp, heads / cp · head_dim]. On a CPU the rotated queries are float32, and the
        # values became float32 when they were concatenated with them.
        sent_back = attended.squeeze(1).unflatten(0, (ranks, -1)).to(value.dtype)
        received_back: Tensor = all_to_all(group, sent_back)
        return received_back.transpose(0, 1).reshape(query.shape[0], 1, -1)
