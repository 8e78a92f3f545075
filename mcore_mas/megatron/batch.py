"""Micro-batches: packed prefix trees, their cost, load balancing over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_mas.config.policy import LoraConfig
from mcore_mas.megatron.spec import TrainerSpec
from rollout.models.architecture import Architecture, read_architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A node of a prefix tree: a stretch of tokens that is stored once, for all sequences that continue it.

    Its tokens attend to those before them in it and to all of the segments above it: of its parent, its parent's
    parent, and so on.
    """

    tokens: int
    parent: int = -1  # place of the segment that it continues; -1: it begins a sequence


def depths(segments: Sequence[Segment]) -> list[int]:
    """How many tokens lie above each segment."""
    above: list[int] = []
    for segment in segments:
        above.append(
            above[segment.parent] + segments[segment.parent].tokens if segment.parent >= 0 else 0
        )
    return above


def pairs(segments: Sequence[Segment]) -> int:
    """Pairs of a token and one that it attends to, itself among them."""
    return sum(
        s.tokens * (2 * above + s.tokens + 1) // 2
        for s, above in zip(segments, depths(segments), strict=True)
    )


_BY_TOKEN = (
    "token_ids",
    "position_ids",
    "routing",
)  # columns of a micro-batch that are of its tokens, not its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Prefix trees of one agent's sequences, packed end to end: T tokens, N rows to train.

    Segments come depth first: all that continue one follow it directly. Row n says: what comes out at `predictors[n]`
    predicts `labels[n]`. A token may predict several, and the same one for several samples.
    """

    agent: str
    segments: tuple[Segment, ...]
    unshared: int  # tokens if every sample had been stored by itself
    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, each segment continues its parent
    predictors: Tensor  # [N] int64, indices into T
    labels: Tensor  # [N] int64
    temperatures: Tensor  # [N] float32
    sequences: Tensor  # [N] int64, which of the packed samples the row belongs to
    behaviour: Tensor  # [N] float32 log-probabilities of the sampler; NaN where there was none
    advantages: Tensor  # [N] float32
    weights: Tensor  # [N] float32, the update's denominator included
    kl_coef: Tensor  # [N] float32 factor of the KL term
    entropy_coef: Tensor  # [N] float32 factor of the entropy bonus
    proximal: Tensor | None = (
        None  # [N] float32 log-probabilities under the weights at the start of the step
    )
    reference: Tensor | None = None  # [N] float32 log-probabilities under the frozen reference
    values: Tensor | None = None  # [N] float32 the critic's values at the start of the step
    returns: Tensor | None = None  # [N] float32 the critic's targets
    ages: Tensor | None = (
        None  # [N] float32 hand-overs since the reply's oldest token; None: all are fresh
    )
    routing: Tensor | None = (
        None  # [T, bytes] uint8, each token's experts as `Completion` has them; all 255: not known
    )

    def select(self, kept: Tensor) -> Microbatch:
        """Only the rows `kept` [N] bool, with the segments that lead to them."""
        if kept.all():
            return self
        lengths = torch.tensor([segment.tokens for segment in self.segments])
        owner = torch.arange(len(self.segments)).repeat_interleave(
            lengths
        )  # [T] the segment of each token
        needed = torch.zeros(len(self.segments), dtype=torch.bool)
        needed[owner[self.predictors[kept]]] = True
        for number in reversed(
            range(len(self.segments))
        ):  # a segment comes after the one that it continues
            if needed[number] and self.segments[number].parent >= 0:
                needed[self.segments[number].parent] = True
        tokens = needed[owner]
        numbers = (needed.cumsum(0) - 1).tolist()
        columns: dict[str, Any] = {
            name: column[tokens if name in _BY_TOKEN else kept] for name, column in self._columns()
        }
        columns["predictors"] = (tokens.cumsum(0) - 1)[columns["predictors"]]
        segments = (
            replace(segment, parent=numbers[segment.parent] if segment.parent >= 0 else -1)
            for segment, stays in zip(self.segments, needed.tolist(), strict=True)
            if stays
        )
        return replace(self, segments=tuple(segments), **columns)

    def padded(self, tokens: int) -> Microbatch:
        """The same with T = `tokens`: those that are added are a sequence of their own and train nothing."""
        extra = tokens - len(self.token_ids)
        if not extra:
            return self
        return replace(
            self,
            segments=(*self.segments, Segment(tokens=extra)),
            token_ids=torch.cat([self.token_ids, self.token_ids.new_zeros(extra)]),
            position_ids=torch.cat(
                [self.position_ids, torch.arange(extra, device=self.position_ids.device)]
            ),
            routing=None
            if self.routing is None
            else F.pad(self.routing, (0, 0, 0, extra), value=255),
        )

    def part(self, ranks: int, rank: int) -> tuple[Microbatch, Tensor]:
        """What context-parallel `rank` takes: T / ranks consecutive tokens and the n rows that these predict.

        Segments stay those of the whole micro-batch. With it comes [n] int64, which of the N rows they are.
        """
        if ranks == 1:
            return self, torch.arange(len(self.predictors))
        tokens = len(self.token_ids) // ranks
        own = slice(tokens * rank, tokens * (rank + 1))
        rows = ((self.predictors >= own.start) & (self.predictors < own.stop)).nonzero()[:, 0]
        columns: dict[str, Any] = {
            name: column[own if name in _BY_TOKEN else rows] for name, column in self._columns()
        }
        return replace(self, **columns | {"predictors": columns["predictors"] - own.start}), rows

    def idle(self) -> Microbatch:
        """One token and one row of weight 0 with the same columns, for a rank that must keep step without work."""
        rows: dict[str, Any] = {
            name: column.new_zeros(1, *column.shape[1:]) for name, column in self._columns()
        }
        rows["temperatures"] = torch.ones_like(rows["temperatures"])
        if self.routing is not None:
            rows["routing"].fill_(255)
        return replace(self, segments=(Segment(tokens=1),), unshared=1, **rows)

    def _columns(self) -> Iterator[tuple[str, Tensor]]:
        for column in fields(self):
            if isinstance(value := getattr(self, column.name), Tensor):
                yield column.name, value


_PER_STAGE = 2  # micro-batches of a rank, up to which more of them shorten the wait for the first and the last stage


# On a CPU a shared stretch is a call of attention of its own, whose result is joined with the others'; Triton's kernels
# have no such calls. Measured at widths of 128 and 256: with 15 tokens that all prompts begin with shared, an update
# took 3 to 7 % longer than with these repeated, with 40 of them as long
_CPU_PER_SHARED = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What micro-batches cost, and how long the ranks that they are spread over take for them."""

    dp: int = 1
    pp: int = 1
    vpp: int = 1
    architecture: Architecture | None = None  # None: every token costs the same
    value_head: bool = False
    lora: LoraConfig | None = None
    per_shared: float = 0.0  # what it takes, in tokens, that one of them attends to one more stretch that others share

    @classmethod
    def of(
        cls, spec: TrainerSpec, architecture: Architecture | None = None, *, cpu: bool = False
    ) -> CostModel:
        """The cost model of a trainer, whose `architecture` is read if it is not given."""
        a, per_shared = (
            architecture or read_architecture(spec.model),
            _CPU_PER_SHARED if cpu else 0.0,
        )
        sizes = {"dp": spec.dp, "pp": spec.pp, "vpp": spec.vpp}
        return cls(
            **sizes,
            architecture=a,
            value_head=spec.head == "value",
            lora=spec.lora,
            per_shared=per_shared,
        )

    @property
    def spread(self) -> bool:
        """Whether several ranks or stages take part, so that how samples are packed depends on them."""
        return self.dp * self.pp > 1

    def work(self, tokens: int, seen: int, rows: int) -> float:
        """Floating-point operations of one forward pass, or tokens where the model is not known.

        A backward pass has twice as many. An adapter's own are left out.

        Args:
            seen: pairs of a token and one that it attends to.
            rows: tokens that go through the head.
        """
        if (a := self.architecture) is None:
            return float(tokens)
        attention = a.heads * a.head_dim
        # a weight is used once per token: queries and outputs, keys and values; gate, up and down of a dense layer, of
        # a sparse one those of the experts that see the token, and the router
        weights = a.layers * a.hidden * (2 * attention + 2 * a.kv_heads * a.head_dim)
        sparse = sum(a.experts.sparse) if a.experts else 0
        weights += (a.layers - sparse) * a.hidden * 3 * a.ffn
        if a.experts:
            weights += (
                sparse * a.hidden * (3 * a.experts.per_token * a.experts.ffn + a.experts.count)
            )
        head = a.hidden * (1 if self.value_head else a.vocab)
        # scores and sums of values over what is attended to
        return 2.0 * (tokens * weights + 2 * a.layers * seen * attention + rows * head)

    def work_of(self, batch: Microbatch) -> float:
        """`work` of a micro-batch."""
        return self.work(len(batch.token_ids), pairs(batch.segments), len(batch.predictors))

    def flops(self, *batches: Microbatch) -> float:
        """Floating-point operations of training on micro-batches, forward and backward, recomputation not counted.

        A frozen weight has no gradient, so with adapters its products are two of three, and there are the adapters'.
        """
        work, a = 3 * sum(map(self.work_of, batches)), self.architecture
        if self.lora is None or a is None:
            return work
        adapters = sum(sum(a.projections[x]) for x in self.lora.targets) * self.lora.rank
        tokens, rows = (
            sum(len(b.token_ids) for b in batches),
            sum(len(b.predictors) for b in batches),
        )
        return work - self.work(tokens, 0, rows) + 6 * a.layers * tokens * adapters

    def counts(self, least: int) -> list[int]:
        """How many micro-batches may be worth their while, where at least `least` are needed."""
        if not self.spread:
            return []
        turns = self.pp if self.vpp > 1 else 1  # interleaved stages take turns of pp each
        fewest = -(-least // (self.dp * turns)) * turns  # of a rank
        most = max(fewest, _PER_STAGE * self.pp if self.pp > 1 else 1)
        return [self.dp * count for count in range(fewest, most + 1, turns)]

    def makespan(self, loads: Sequence[float]) -> float:
        """How long a pass takes, in work: the busiest rank's, and its stages' wait for the first and the last."""
        ranks = [[loads[i] for i in own] for own in balance_work(loads, self.dp)]
        return max((sum(own) + (self.pp - 1) * max(own, default=0.0)) / self.pp for own in ranks)


def balance_work(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Load balancing: which micro-batches each rank gets, the dearest first, each to the rank with least so far.

    At most 4/3 of the best possible maximum (Graham 1969). Equal loads go to the lowest rank, so that every process
    comes to the same answer; a rank's micro-batches keep their order, and a rank may get none.
    """
    loads = [0.0] * ranks
    given: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        loads[rank] += costs[i]
        given[rank].append(i)
    return [sorted(own) for own in given]
