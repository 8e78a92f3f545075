"""Sequence packing: samples as micro-batches; what they begin with in common is stored and computed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_mas.credit.samples import Sample
from mcore_mas.megatron.batch import CostModel, Microbatch, Segment
from mcore_mas.packing.prefix_tree import (
    PackingItem,
    PrefixForest,
    bin_pack,
    prefix_forest,
    unshared_forest,
)

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
        trained = _trained(sample)
        if trained and not sample.prompt_ids and trained[0] == 0:
            where = f"trajectory {sample.trajectory}, turn {sample.turn} ({sample.agent})"
            raise ValueError(
                f"{where}: the first token of all is to be trained, but nothing is before it to predict it"
            )
        ids = (sample.prompt_ids + sample.completion_ids)[: _computed(sample)]
        return cls(number=number, sample=sample, tokens=_tensor(ids, np.int64), trained=trained)


def _tensor(numbers: Sequence[float], dtype: Any) -> Tensor:
    """Of many numbers in a third to a fifth of the time of torch's own."""
    return torch.from_numpy(np.array(numbers, dtype))


def _trained(sample: Sample) -> list[int]:
    """Which tokens of the completion carry loss."""
    places = range(len(sample.completion_ids))
    return list(places) if sample.trained is None else [i for i in places if sample.trained[i]]


def _computed(sample: Sample) -> int:
    """How many tokens of prompt and completion come before the last trained one."""
    trained = _trained(sample)
    return len(sample.prompt_ids) + trained[-1] if trained else 0


class PackedSamples:
    """Some of a policy's samples, packed once; what is found out of them later becomes columns of their rows.

    They are packed when a model first scores them. Where none does before credit is assigned, packing waits for it:
    samples without a gradient then need no place.
    """

    def __init__(
        self, samples: Sequence[Sample], max_tokens: int, cost: CostModel | None = None
    ) -> None:
        """The arguments are those of `pack`."""
        self._samples = list(samples)
        self._pack = partial(pack, max_tokens=max_tokens, cost=cost)
        self._microbatches: list[Microbatch] | None = None

    @property
    def microbatches(self) -> list[Microbatch]:
        """All samples as micro-batches."""
        if self._microbatches is None:
            self._microbatches = self._pack(self._samples)
        return self._microbatches

    def unpack(self, scores: Iterable[Tensor]) -> list[tuple[float, ...]]:
        """What a model says of every row, one [N] per micro-batch, as a number per completion token of each sample."""
        return unpack(self.microbatches, list(scores), self._samples)

    def train(self, samples: Sequence[Sample]) -> list[Microbatch]:
        """Micro-batches of only `samples`, which are some of these with more known of them: the same places."""
        if self._microbatches is None:
            return self._pack(samples)
        known = {sample.id: sample for sample in samples}
        ordered = [known.get(sample.id) for sample in self._samples]
        kept = torch.tensor([sample is not None for sample in ordered])
        filled = []
        for batch in (
            b.select(kept[b.sequences]) for b in self._microbatches if kept[b.sequences].any()
        ):
            members = [
                s for n in batch.sequences.unique_consecutive().tolist() if (s := ordered[n])
            ]  # as its rows are
            filled.append(
                replace(batch, unshared=sum(map(_computed, members)), **_columns(members))
            )
        return filled


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
    microbatches, cost = [], cost or CostModel()
    every = [own for i, sample in enumerate(samples) if (own := _Sequence.of(i, sample)).trained]
    for agent in sorted({own.sample.agent for own in every}):
        members = [own for own in every if own.sample.agent == agent]
        tokens = [own.tokens for own in members]
        forest, holders = (
            prefix_forest(tokens, cost.per_shared) if share else unshared_forest(tokens)
        )
        held: list[list[_Sequence]] = [[] for _ in forest.sequences]
        for own, holder in zip(members, holders, strict=True):
            held[holder].append(own)
        rows = [sum(len(own.trained) for own in riders) for riders in held]
        for items in bin_pack(forest, rows, max_tokens, cost):
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
    found = []
    for sample, known in zip(samples, map(iter, by_sample), strict=True):
        trained = (True,) * len(sample.completion_ids) if sample.trained is None else sample.trained
        found.append(tuple(next(known) if carries_loss else _UNKNOWN for carries_loss in trained))
    return found


def _microbatch(
    agent: str,
    forest: PrefixForest,
    held: Sequence[Sequence[_Sequence]],
    items: Sequence[PackingItem],
) -> Microbatch:
    segments: list[Segment] = []
    token_ids: list[Tensor] = []
    position_ids: list[Tensor] = []
    predictors: list[Tensor] = []
    trained: list[_Sequence] = []
    begins: list[Tensor] = []  # of each of these, where its tokens are
    stored = 0
    for item in items:
        part = forest[item.first : item.end]
        own, places = part.segments()
        ids, positions = torch.empty(2, part.tokens, dtype=torch.int64)
        for sequence, place, riders in zip(
            part.sequences, places, held[item.first : item.end], strict=True
        ):
            ids[place] = sequence
            positions[place] = torch.arange(len(place))
            for rider in riders:
                before = len(rider.sample.prompt_ids) - 1
                predictors.append(stored + place[before + _tensor(rider.trained, np.int64)])
                trained.append(rider)
                begins.append(stored + place[: len(rider.tokens)])
        shift = len(segments)
        segments += [replace(s, parent=s.parent + shift) if s.parent >= 0 else s for s in own]
        token_ids.append(ids)
        position_ids.append(positions)
        stored += part.tokens
    members = [own.sample for own in trained]
    return Microbatch(
        agent=agent,
        segments=tuple(segments),
        unshared=sum(map(_computed, members)),
        token_ids=torch.cat(token_ids),
        position_ids=torch.cat(position_ids),
        predictors=torch.cat(predictors),
        labels=_tensor(
            [own.sample.completion_ids[i] for own in trained for i in own.trained], np.int64
        ),
        sequences=_tensor([own.number for own in trained], np.int64).repeat_interleave(
            torch.tensor([len(own.trained) for own in trained])
        ),
        routing=_routing(stored, members, begins),
        **_columns(members),
    )


def _routing(tokens: int, samples: Sequence[Sample], places: Sequence[Tensor]) -> Tensor | None:
    """The experts of each token [T, bytes] as the first of the samples that share it knows them, 255 where none does.

    Args:
        places: of each sample's tokens that are computed.
    """
    known = [
        (sample, place) for sample, place in zip(samples, places, strict=True) if sample.routing
    ]
    found: Tensor | None = None
    for sample, place in reversed(known):  # the first one has the last word
        computed = len(sample.prompt_ids) + len(sample.completion_ids) - 1
        rows = torch.frombuffer(bytearray(sample.routing), dtype=torch.uint8).view(computed, -1)
        found = (
            torch.full((tokens, rows.shape[1]), 255, dtype=torch.uint8) if found is None else found
        )
        found[place] = rows[: len(place)]
    return found


def _columns(samples: Sequence[Sample]) -> dict[str, Any]:
    """What is known of the trained tokens of some samples, each [N] float32; None where no sample knows it."""
    trained = [_trained(sample) for sample in samples]
    counts = torch.tensor([len(places) for places in trained])

    def constant(name: str) -> Tensor:
        return torch.tensor(
            [getattr(s, name) for s in samples], dtype=torch.float32
        ).repeat_interleave(counts)

    def by_token(name: str) -> Tensor | None:
        """NaN where only others know it."""
        known = [getattr(sample, name) for sample in samples]
        if all(values is None for values in known):
            return None
        rows = [
            [_UNKNOWN if values is None else values[i] for i in places]
            for values, places in zip(known, trained, strict=True)
        ]
        return _tensor(list(chain.from_iterable(rows)), np.float32)

    behaviour, advantages = by_token("behaviour"), by_token("advantages")
    rows = int(counts.sum())
    return {
        "temperatures": constant("temperature"),
        "weights": constant("weight"),
        "kl_coef": constant("kl_coef"),
        "entropy_coef": constant("entropy_coef"),
        "behaviour": torch.full((rows,), _UNKNOWN) if behaviour is None else behaviour,
        "advantages": torch.zeros(rows) if advantages is None else advantages,
        "proximal": by_token("proximal"),
        "reference": by_token("reference"),
        "ages": constant("age") if any(sample.age for sample in samples) else None,
        "values": by_token("values"),
        "returns": by_token("returns"),
    }
