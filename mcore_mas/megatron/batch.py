"""Micro-batches: packed prefix trees, their cost, load balancing over data-parallel ranks, layout of tree attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

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
        above.append(above[segment.parent] + segments[segment.parent].tokens if segment.parent >= 0 else 0)
    return above


def pairs(segments: Sequence[Segment]) -> float:
    """Pairs of a token and one that it attends to, itself counted half."""
    above = depths(segments)
    return sum(segment.tokens * (depth + segment.tokens / 2) for segment, depth in zip(segments, above, strict=True))


_BY_TOKEN = ("token_ids", "position_ids")  # columns of a micro-batch with a number for each token, not for each row


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
    proximal: Tensor | None = None  # [N] float32 log-probabilities under the weights at the start of the step
    reference: Tensor | None = None  # [N] float32 log-probabilities under the frozen reference
    values: Tensor | None = None  # [N] float32 the critic's values at the start of the step
    returns: Tensor | None = None  # [N] float32 the critic's targets
    ages: Tensor | None = None  # [N] float32 hand-overs since the reply's oldest token; None: all are fresh

    def select(self, kept: Tensor) -> Microbatch:
        """Only the rows `kept` [N] bool, with the segments that lead to them."""
        if kept.all():
            return self
        lengths = torch.tensor([segment.tokens for segment in self.segments])
        owner = torch.arange(len(self.segments)).repeat_interleave(lengths)  # [T] the segment of each token
        needed = torch.zeros(len(self.segments), dtype=torch.bool)
        needed[owner[self.predictors[kept]]] = True
        for number in reversed(range(len(self.segments))):  # a segment comes after the one that it continues
            if needed[number] and self.segments[number].parent >= 0:
                needed[self.segments[number].parent] = True
        tokens = needed[owner]
        numbers = (needed.cumsum(0) - 1).tolist()
        columns: dict[str, Any] = {
            name: column[tokens if name in _BY_TOKEN else kept] for name, column in self._columns()
        }
        columns["predictors"] = (tokens.cumsum(0) - 1)[columns["predictors"]]
        return replace(
            self,
            segments=tuple(
                replace(segment, parent=numbers[segment.parent] if segment.parent >= 0 else -1)
                for segment, stays in zip(self.segments, needed.tolist(), strict=True)
                if stays
            ),
            **columns,
        )

    def padded(self, tokens: int) -> Microbatch:
        """The same with T = `tokens`: those that are added are a sequence of their own and train nothing."""
        extra = tokens - len(self.token_ids)
        if not extra:
            return self
        return replace(
            self,
            segments=(*self.segments, Segment(tokens=extra)),
            token_ids=torch.cat([self.token_ids, self.token_ids.new_zeros(extra)]),
            position_ids=torch.cat([self.position_ids, torch.arange(extra, device=self.position_ids.device)]),
        )

    def part(self, ranks: int, rank: int) -> tuple[Microbatch, Tensor]:
        """What context-parallel `rank` takes: T / ranks consecutive tokens and the n rows that these predict.

        Segments stay those of the whole micro-batch. With it comes [n] int64, which of the N rows they are.
        """
        tokens = len(self.token_ids) // ranks
        own = slice(tokens * rank, tokens * (rank + 1))
        rows = ((self.predictors >= own.start) & (self.predictors < own.stop)).nonzero()[:, 0]
        columns: dict[str, Any] = {name: column[own if name in _BY_TOKEN else rows] for name, column in self._columns()}
        return replace(self, **columns | {"predictors": columns["predictors"] - own.start}), rows

    def idle(self) -> Microbatch:
        """One token and one row of weight 0 with the same columns, for a rank that must keep step without work."""
        rows: dict[str, Any] = {
            name: torch.zeros(1, dtype=column.dtype, device=column.device) for name, column in self._columns()
        }
        rows["temperatures"] = torch.ones_like(rows["temperatures"])
        return replace(self, segments=(Segment(tokens=1),), unshared=1, **rows)

    def to(self, device: torch.device) -> Microbatch:
        """The same with its tensors on `device`."""
        moved: dict[str, Any] = {name: column.to(device) for name, column in self._columns()}
        return replace(self, **moved)

    def _columns(self) -> Iterator[tuple[str, Tensor]]:
        for column in fields(self):
            if isinstance(value := getattr(self, column.name), Tensor):
                yield column.name, value


# torch's causal kernel on the CPU computes every pair of 128 queries and their keys and drops half of them: a longer
# segment is cut into blocks, and each half of them sees the other without a mask (512 tokens: half the time)
_CPU_BLOCK = 128
_CPU_MULTIPLE = 32  # of the kernel's blocks of queries
# attended to by a call of their own, tokens cost more than the call; fewer are padded together
_WORTH_A_CALL = 64


@dataclass(frozen=True, slots=True)
class CausalBlocks:
    """Blocks of equal length, each of which attends to itself, causally.

    Either they lie one after the other at `place`, or `rows` says where the tokens of each are: shorter ones are padded
    by their last token, which `present` leaves out.
    """

    length: int  # L
    place: slice | None = None
    rows: Tensor | None = None  # [B, L]
    present: Tensor | None = None  # [B, L] bool


@dataclass
class PackedTrees(PackedSeqParams):
    """The layout of one micro-batch, handed through Megatron to `TreeAttention`.

    `qkv_format` stays "sbhd" (one row of T tokens), which keeps Megatron from re-shaping for its own packed kernels.
    """

    qkv_format: str = "sbhd"
    max_seqlen_q: int = 0  # Megatron takes the larger of these two for the rotary length; TreeRotary needs neither
    max_seqlen_kv: int = 0
    own: tuple[CausalBlocks, ...] = field(default_factory=tuple)  # every token is in one of them
    seen: tuple[tuple[slice, slice], ...] = field(default_factory=tuple)  # queries, and keys that all of them see
    starts: Tensor | None = None  # [sequences + 1] int32, where none shares anything: the first token of each, and T
    longest: int = 0  # tokens of the longest segment

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> PackedTrees:
        """The layout of `segments` end to end, depth first: what continues a segment lies right behind it."""
        ends = list(accumulate(segment.tokens for segment in segments))
        places = [slice(end - segment.tokens, end) for segment, end in zip(segments, ends, strict=True)]
        for i in reversed(range(len(segments))):
            if segments[i].parent >= 0:
                ends[segments[i].parent] = max(ends[segments[i].parent], ends[i])
        longest = max(segment.tokens for segment in segments)
        block = _CPU_BLOCK if device.type == "cpu" else longest
        blocks: list[slice] = []
        seen: list[tuple[slice, slice]] = []
        for place, end in zip(places, ends, strict=True):
            cut = _cut(place, block)
            blocks += cut
            seen += _halves(cut)
            if end > place.stop:
                seen.append((slice(place.stop, end), place))
        alone = all(segment.parent < 0 for segment in segments)
        starts = torch.tensor([0, *(place.stop for place in places)], dtype=torch.int32, device=device)
        return cls(
            own=tuple(_own(blocks, device)),
            seen=tuple(seen),
            starts=starts if alone else None,
            longest=longest,
        )


def _cut(place: slice, longest: int) -> list[slice]:
    """A stretch in as few blocks as possible, about equally long."""
    tokens = place.stop - place.start
    if tokens <= longest:
        return [place]
    length = -(-tokens // -(-tokens // longest))
    length += -length % _CPU_MULTIPLE
    return [slice(start, min(start + length, place.stop)) for start in range(place.start, place.stop, length)]


def _halves(blocks: Sequence[slice]) -> Iterator[tuple[slice, slice]]:
    """What the blocks of a segment see of it besides themselves: each half the one before it."""
    if len(blocks) > 1:
        half = (len(blocks) + 1) // 2
        yield slice(blocks[half].start, blocks[-1].stop), slice(blocks[0].start, blocks[half - 1].stop)
        yield from _halves(blocks[:half])
        yield from _halves(blocks[half:])


def _own(blocks: Sequence[slice], device: torch.device) -> Iterator[CausalBlocks]:
    """Neighbours of equal length in one call; what is too little for one is padded together with its like."""
    short: dict[int, list[slice]] = defaultdict(list)
    for length, run in groupby(blocks, key=lambda place: place.stop - place.start):
        members = list(run)
        place = slice(members[0].start, members[-1].stop)
        if place.stop - place.start >= _WORTH_A_CALL:
            yield CausalBlocks(length, place=place)
        else:
            short[length.bit_length()] += members
    for members in short.values():
        yield _padded(members, device)


def _padded(blocks: Sequence[slice], device: torch.device) -> CausalBlocks:
    if len(blocks) == 1:
        return CausalBlocks(blocks[0].stop - blocks[0].start, place=blocks[0])
    starts = torch.tensor([place.start for place in blocks])
    lengths = torch.tensor([place.stop - place.start for place in blocks])
    column = torch.arange(int(lengths.max()))
    rows = starts[:, None] + torch.minimum(column, lengths[:, None] - 1)
    present = column < lengths[:, None]
    return CausalBlocks(len(column), rows=rows.to(device), present=present.to(device))


_PER_STAGE = 2  # micro-batches of a rank, up to which more of them shorten the wait for the first and the last stage


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What micro-batches cost, and how long the ranks that they are spread over take for them."""

    dp: int = 1
    pp: int = 1
    vpp: int = 1
    architecture: Architecture | None = None  # None: every token costs the same
    value_head: bool = False

    @classmethod
    def of(cls, spec: TrainerSpec, architecture: Architecture | None = None) -> CostModel:
        """The cost model of a trainer, whose `architecture` is read if it is not given."""
        return cls(
            dp=spec.dp,
            pp=spec.pp,
            vpp=spec.vpp,
            architecture=architecture or read_architecture(spec.model),
            value_head=spec.head == "value",
        )

    @property
    def spread(self) -> bool:
        """Whether several ranks or stages take part, so that how samples are packed depends on them."""
        return self.dp * self.pp > 1

    def work(self, tokens: int, seen: float, rows: int) -> float:
        """Floating-point operations of one forward pass, or tokens where the model is not known.

        A backward pass has twice as many.

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
            weights += sparse * a.hidden * (3 * a.experts.per_token * a.experts.ffn + a.experts.count)
        head = a.hidden * (1 if self.value_head else a.vocab)
        # scores and sums of values over what is attended to
        return 2.0 * (tokens * weights + 2 * a.layers * seen * attention + rows * head)

    def work_of(self, batch: Microbatch) -> float:
        """`work` of a micro-batch."""
        return self.work(len(batch.token_ids), pairs(batch.segments), len(batch.predictors))

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
