"""Sequence packing: samples as micro-batches; what they begin with in common is stored and computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mcore_mas.credit.samples import Sample
from mcore_mas.megatron.batch import CostModel, Microbatch, Segment
from mcore_mas.packing.bin_packing import PackingItem, bin_pack
from mcore_mas.packing.prefix_tree import PrefixForest, prefix_forest, unshared_forest

_UNKNOWN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """A sample as the tokens that have to be computed: those before its last trained token."""

    number: int  # the sample's place in what was packed
    sample: Sample
    tokens: Tensor  # [L] int64
    trained: list[int]  # places in the completion

    @classmethod
    def of(cls, number: int, sample: Sample) -> _Sequence:
        c = len(sample.completion_ids)
        trained = list(range(c)) if sample.trained is None else [i for i in range(c) if sample.trained[i]]
        if trained and not sample.prompt_ids and trained[0] == 0:
            where = f"trajectory {sample.trajectory}, turn {sample.turn} ({sample.agent})"
            raise ValueError(
                f"{where}: the first token of all is to be trained, but nothing is before it to predict it"
            )
        ids = (sample.prompt_ids + sample.completion_ids)[: len(sample.prompt_ids) + trained[-1] if trained else 0]
        return cls(number=number, sample=sample, tokens=torch.tensor(ids, dtype=torch.int64), trained=trained)


def pack(
    samples: Sequence[Sample], max_tokens: int, cost: CostModel | None = None, *, share: bool = True
) -> list[Microbatch]:
    """Pack one policy's samples, agent by agent, into micro-batches of at most `max_tokens` tokens.

    Samples of one agent share what their sequences of prompt and completion begin with, as far as that saves enough: a
    prompt, the turns of a tree above where it branches, or the turns before this one if the prompt repeats them. Only
    a single sequence that is longer than `max_tokens` by itself may exceed it. What is not needed to predict a trained
    token is left out, so samples without trained tokens are in none.

    Args:
        cost: of micro-batches, and over how many ranks the work is to be spread; None: tokens, on one rank.
        share: off, every sample is stored by itself.
    """
    microbatches = []
    every = [own for i, sample in enumerate(samples) if (own := _Sequence.of(i, sample)).trained]
    for agent in sorted({own.sample.agent for own in every}):
        members = [own for own in every if own.sample.agent == agent]
        forest, holders = (prefix_forest if share else unshared_forest)([own.tokens for own in members])
        held: list[list[_Sequence]] = [[] for _ in forest.sequences]
        for own, holder in zip(members, holders, strict=True):
            held[holder].append(own)
        rows = [sum(len(own.trained) for own in riders) for riders in held]
        for items in bin_pack(forest, rows, max_tokens, cost or CostModel()):
            microbatches.append(_microbatch(agent, forest, held, items))
    return microbatches


def tokens_saved(microbatches: Sequence[Microbatch]) -> float:
    """The share of tokens that need not be computed because others begin with the same."""
    unshared = sum(batch.unshared for batch in microbatches)
    return 1.0 - sum(len(batch.token_ids) for batch in microbatches) / unshared if unshared else 0.0


def unpack(
    microbatches: Sequence[Microbatch], rows: Sequence[Tensor], samples: Sequence[Sample]
) -> list[tuple[float, ...]]:
    """A number per completion token of each sample, from one [N] per micro-batch; NaN where a token is not trained."""
    by_sample: list[list[float]] = [[] for _ in samples]
    for batch, values in zip(microbatches, rows, strict=True):
        for number, value in zip(batch.sequences.tolist(), values.tolist(), strict=True):
            by_sample[number].append(value)
    return [_spread(sample, values) for sample, values in zip(samples, by_sample, strict=True)]


def _spread(sample: Sample, values: list[float]) -> tuple[float, ...]:
    if sample.trained is None:
        return tuple(values)
    known = iter(values)
    return tuple(next(known) if trained else _UNKNOWN for trained in sample.trained)


def _microbatch(
    agent: str, forest: PrefixForest, held: Sequence[Sequence[_Sequence]], items: Sequence[PackingItem]
) -> Microbatch:
    segments: list[Segment] = []
    token_ids: list[Tensor] = []
    position_ids: list[Tensor] = []
    predictors: list[Tensor] = []
    trained: list[_Sequence] = []
    stored = 0
    for item in items:
        part = forest[item.first : item.end]
        own, places = part.segments()
        ids, positions = torch.empty(2, part.tokens, dtype=torch.int64)
        for sequence, place, riders in zip(part.sequences, places, held[item.first : item.end], strict=True):
            ids[place] = sequence
            positions[place] = torch.arange(len(place))
            for rider in riders:
                before = len(rider.sample.prompt_ids) - 1
                predictors.append(stored + place[[before + i for i in rider.trained]])
                trained.append(rider)
        shift = len(segments)
        segments += [replace(s, parent=s.parent + shift) if s.parent >= 0 else s for s in own]
        token_ids.append(ids)
        position_ids.append(positions)
        stored += part.tokens
    rows = [(own.number, own.sample, i) for own in trained for i in own.trained]

    def constant(name: str) -> Tensor:
        return torch.tensor([getattr(sample, name) for _, sample, _ in rows], dtype=torch.float32)

    def by_token(name: str) -> Tensor | None:
        """None when no sample knows it, NaN where only others do."""
        known = [(getattr(sample, name), i) for _, sample, i in rows]
        if all(values is None for values, _ in known):
            return None
        return torch.tensor([_UNKNOWN if values is None else values[i] for values, i in known], dtype=torch.float32)

    behaviour, advantages = by_token("behaviour"), by_token("advantages")
    return Microbatch(
        agent=agent,
        segments=tuple(segments),
        unshared=sum(len(own.tokens) for own in trained),
        token_ids=torch.cat(token_ids),
        position_ids=torch.cat(position_ids),
        predictors=torch.cat(predictors),
        labels=torch.tensor([sample.completion_ids[i] for _, sample, i in rows]),
        sequences=torch.tensor([number for number, _, _ in rows]),
        temperatures=constant("temperature"),
        weights=constant("weight"),
        kl_coef=constant("kl_coef"),
        entropy_coef=constant("entropy_coef"),
        behaviour=torch.full((len(rows),), _UNKNOWN) if behaviour is None else behaviour,
        advantages=torch.zeros(len(rows)) if advantages is None else advantages,
        proximal=by_token("proximal"),
        reference=by_token("reference"),
        ages=constant("age") if any(sample.age for _, sample, _ in rows) else None,
        values=by_token("values"),
        returns=by_token("returns"),
    )
