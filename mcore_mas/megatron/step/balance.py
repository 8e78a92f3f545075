"""Micro-batches dealt to data-parallel ranks so that all have about the same work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_mas.megatron.batch import Microbatch, pairs
from mcore_mas.megatron.spec import TrainerSpec
from rollout.models.architecture import Architecture, read_architecture

_PER_STAGE = 2  # micro-batches of a rank, up to which more of them shorten the wait for the first and the last stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Over how many ranks the micro-batches of a pass are spread, and what one of them costs."""

    dp: int = 1
    pp: int = 1
    vpp: int = 1
    architecture: Architecture | None = None  # None: every token costs the same
    value_head: bool = False

    @classmethod
    def of(cls, spec: TrainerSpec) -> Shares:
        """The shares of a trainer."""
        return cls(
            dp=spec.dp,
            pp=spec.pp,
            vpp=spec.vpp,
            architecture=read_architecture(Path(spec.model)),
            value_head=spec.head == "value",
        )

    def work(self, tokens: int, seen: float, rows: int) -> float:
        """Floating-point operations of a forward pass, or tokens where the model is not known."""
        if self.architecture is None:
            return float(tokens)
        return operations(tokens, seen, rows, self.architecture, value_head=self.value_head)

    def counts(self, least: int) -> list[int]:
        """How many micro-batches may be worth their while, where at least `least` are needed."""
        if self.dp * self.pp == 1:
            return []
        turns = self.pp if self.vpp > 1 else 1  # interleaved stages take turns of pp each
        fewest = -(-least // (self.dp * turns)) * turns  # of a rank
        most = max(fewest, _PER_STAGE * self.pp if self.pp > 1 else 1)
        return [self.dp * count for count in range(fewest, most + 1, turns)]

    def makespan(self, loads: Sequence[float]) -> float:
        """How long a pass takes, in work: the busiest rank's, and its stages' wait for the first and the last."""
        dealt = [[loads[i] for i in own] for own in deal(loads, self.dp)]
        return max((sum(own) + (self.pp - 1) * max(own, default=0.0)) / self.pp for own in dealt)


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which of the pieces each rank gets: the dearest first, each to the rank that has least so far.

    At most 4/3 of the best possible maximum (Graham 1969). Equal loads go to the lowest rank, so that every process
    comes to the same answer; a rank's pieces keep their order, and a rank may get none.
    """
    loads = [0.0] * ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for piece in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        loads[rank] += costs[piece]
        dealt[rank].append(piece)
    return [sorted(pieces) for pieces in dealt]


def operations(tokens: int, seen: float, rows: int, architecture: Architecture, *, value_head: bool = False) -> float:
    """Floating-point operations of one forward pass; a backward pass has twice as many.

    Args:
        seen: pairs of a token and one that it attends to.
        rows: tokens that go through the head.
    """
    a = architecture
    attention = a.heads * a.head_dim
    # a weight is used once per token: queries and outputs, keys and values; gate, up and down of a dense layer, of a
    # sparse one those of the experts that see the token, and the router
    weights = a.layers * a.hidden * (2 * attention + 2 * a.kv_heads * a.head_dim)
    sparse = sum(a.experts.sparse) if a.experts else 0
    weights += (a.layers - sparse) * a.hidden * 3 * a.ffn
    if a.experts:
        weights += sparse * a.hidden * (3 * a.experts.per_token * a.experts.ffn + a.experts.count)
    head = a.hidden * (1 if value_head else a.vocab)
    # scores and sums of values over what is attended to
    return 2.0 * (tokens * weights + 2 * a.layers * seen * attention + rows * head)


def flops(batch: Microbatch, architecture: Architecture, *, value_head: bool = False) -> float:
    """`operations` of a micro-batch."""
    seen = pairs(batch.segments)
    return operations(len(batch.token_ids), seen, len(batch.predictors), architecture, value_head=value_head)
