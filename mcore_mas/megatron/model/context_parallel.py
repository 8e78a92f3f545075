"""Context parallelism: the tokens of a micro-batch are cut over ranks, and exchanged for heads to attend.

The exchange is DeepSpeed-Ulysses' (arXiv:2309.14509), "a2a" in Megatron's words: every rank attends over the whole
micro-batch with its part of the heads, so any layout of sequences stays as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_mas.megatron.batch import Microbatch
from mcore_mas.megatron.model.attention import TreeAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's T / cp consecutive tokens of a micro-batch, and those of its N rows whose predictor is among them."""

    token_ids: Tensor  # [T / cp] int64
    position_ids: Tensor  # [T / cp] int64
    predictors: Tensor  # [n] int64, indices into T / cp
    labels: Tensor  # [n] int64
    temperatures: Tensor  # [n] float32
    rows: Tensor  # [n] int64, which of the N

    @classmethod
    def of(cls, batch: Microbatch, ranks: int, rank: int) -> Share:
        """What `rank` of `ranks` takes of a micro-batch whose T divides by `ranks`."""
        tokens = len(batch.token_ids) // ranks
        first = tokens * rank
        own = slice(first, first + tokens)
        rows = ((batch.predictors >= own.start) & (batch.predictors < own.stop)).nonzero()[:, 0]
        return cls(
            token_ids=batch.token_ids[own],
            position_ids=batch.position_ids[own],
            predictors=batch.predictors[rows] - first,
            labels=batch.labels[rows],
            temperatures=batch.temperatures[rows],
            rows=rows,
        )


def join(values: Tensor, rows: Tensor, total: int) -> Tensor:
    """All N = `total` rows on every rank from each rank's own.

    Every rank goes on with the same numbers to the same loss, so the gradient of a row is already whole: each rank
    takes that of its own.

    Args:
        values: [k, n] of this rank's rows.
        rows: [n] which of the N they are.

    Returns:
        [k, N]
    """
    joined: Tensor = _Join.apply(values, rows, total)
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, total: int) -> Tensor:
        ctx.save_for_backward(rows)
        whole = values.new_zeros(len(values), total)
        whole[:, rows] = values
        # every number is one rank's, and zero on the others: the sum is exact
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return gradient[:, rows], None, None


class ContextAttention(TreeAttention):
    """`TreeAttention` where each rank holds T / cp of the tokens."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """As `TreeAttention`; `config` says the number of context-parallel ranks."""
        super().__init__(config, *args, **kwargs)
        kv_heads = config.num_query_groups // config.tensor_model_parallel_size
        # fewer key/value heads than ranks, or a number that does not divide: some go to several ranks
        self.copies = config.context_parallel_size // math.gcd(config.context_parallel_size, kv_heads)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attend within each tree; tensors as in `TreeAttention` with T / cp in place of T."""
        if self.copies > 1:
            key, value = (x.repeat_interleave(self.copies, dim=2) for x in (key, value))
        ranks = parallel_state.get_context_parallel_world_size()
        # [T / cp, cp, heads / cp, head_dim] of queries, keys and values travel together
        parts = [x[:, 0].unflatten(1, (ranks, -1)) for x in (query, key, value)]
        whole = _AllToAll.apply(torch.cat(parts, dim=2).transpose(0, 1)).flatten(0, 1)  # [T, heads / cp, head_dim]
        heads = whole.split([part.shape[2] for part in parts], dim=1)
        attended = super().forward(*(x[:, None] for x in heads), *args, **kwargs)  # [T, 1, heads / cp · head_dim]
        back = _AllToAll.apply(attended[:, 0].unflatten(0, (ranks, -1)))  # [cp, T / cp, heads / cp · head_dim]
        return back.transpose(0, 1).reshape(query.shape[0], 1, -1)


class _AllToAll(torch.autograd.Function):
    """The r-th of a tensor's equal parts [cp, ...] goes to rank r, whose place in the result is the sender's."""

    @staticmethod
    def forward(_: Any, parts: Tensor) -> Tensor:
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=parallel_state.get_context_parallel_group())
        return received

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        # what came from rank r goes back to rank r: the exchange is its own inverse
        return _AllToAll.forward(_, gradient)
