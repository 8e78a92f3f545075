"""Credit assignment: samples as columns for the estimators, and their advantages back on the samples.

A run's advantages are watched: too large, none at all, or from rewards of very different scales.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from itertools import count, islice
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mcore_mas.config.credit import AdvantageConfig, FilterConfig
from mcore_mas.config.policy import TrainerConfig
from mcore_mas.credit.samples import CreditError, Sample, TurnId
from mcore_mas.equations.advantages import ALONE, BY_TOKEN, NEEDS, compared
from mcore_mas.equations.divergence import KLName, kl_penalty
from mcore_mas.equations.turns import Advantages, Turns
from rollout.records.trajectory import changed, grouped

_IDS = ("policy", "task", "agent", "trajectory", "state")


def _keys(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """The key columns of `Turns`: texts of samples are numbered, and so are nodes and their parents."""
    keys = {
        "turn": torch.tensor([s.turn for s in samples]),
        "round": torch.tensor([s.round for s in samples]),
    }
    for column in _IDS:
        known: dict[str, int] = {}
        keys[column] = torch.tensor(
            [known.setdefault(getattr(s, column), len(known)) for s in samples]
        )
    numbers: dict[tuple[str, str], int] = {}
    nodes = [numbers.setdefault((s.trajectory, s.node), len(numbers)) for s in samples]
    # a parent without a turn here, filtered or masked, has a number too: its children are nobody else's siblings
    above = [(s.trajectory, s.node.rpartition(".")[0]) for s in samples]
    for place in above:
        if place[1]:
            numbers.setdefault(place, len(numbers))
    parents = [
        numbers.get(place, -1) if s.node else -1 for s, place in zip(samples, above, strict=True)
    ]
    return keys | {"node": torch.tensor(nodes), "parent": torch.tensor(parents)}


def columns(samples: Sequence[Sample]) -> Turns:
    """The samples as the estimators see them, in their order."""
    trees = any(sample.node for sample in samples)
    penalised = any(sample.penalties is not None for sample in samples)
    return Turns(
        scores=torch.tensor(
            [sample.reward - sum(sample.penalties or ()) for sample in samples], dtype=torch.float64
        ),
        keys=_keys(samples),
        lengths=torch.tensor([sample.tokens for sample in samples]),
        # the rounds of a tree are not one line of time
        steps=None if trees else _steps(samples),
        greedy=_named(samples, "greedy"),
        penalties=_by_token([s.penalties or (0.0,) * s.tokens for s in samples])
        if penalised
        else None,
        values=_by_token([sample.values for sample in samples]),
        alike=partial(_alike, samples),
    )


def estimate(samples: Sequence[Sample], rules: Mapping[str, AdvantageConfig]) -> list[Sample]:
    """The samples with advantages, and with returns where an agent's estimator has a critic.

    Args:
        rules: the estimator of each agent. Every estimator sees all turns, and sets those of its agents.

    Raises:
        CreditError: an agent has no estimator, or an estimator lacks what it needs.
    """
    done = list(samples)
    for rule, seen, turns, made in assessments(samples, rules):
        advantages = _rows(turns, made.values, by_token=rule.name in BY_TOKEN)
        returns = None if made.returns is None else _rows(turns, made.returns, by_token=True)
        for place, i in enumerate(seen):
            if rules[samples[i].agent] == rule:
                target = returns[place] if returns else None
                done[i] = changed(samples[i], advantages=advantages[place], returns=target)
    return done


def assessments(
    samples: Sequence[Sample], rules: Mapping[str, AdvantageConfig]
) -> Iterator[tuple[AdvantageConfig, list[int], Turns, Advantages]]:
    """Every estimator of `rules`, with the places of the turns that it sees, these turns, and what it makes of them."""
    for rule in _distinct(samples, rules):
        own = [i for i, sample in enumerate(samples) if rules[sample.agent] == rule]
        seen = (
            [i for i in own if samples[i].tokens]
            if rule.name in ALONE
            else list(range(len(samples)))
        )
        if seen:  # else every reply of these agents is masked
            turns = columns([samples[i] for i in seen])
            yield rule, seen, turns, assess(turns, rule)


def assess(turns: Turns, rule: AdvantageConfig) -> Advantages:
    """What the estimator `rule` makes of the turns; one of a user's own may give the values alone.

    Raises:
        CreditError: the turns lack what it needs.
    """
    need = NEEDS.get(rule.name)
    if need is not None and getattr(turns, need) is None:
        raise CreditError(
            f"advantage '{rule.name}' needs {need} of every turn, and a turn has none"
        )
    made = rule.call(turns)
    return made if isinstance(made, Advantages) else Advantages(made)


def by_place(samples: Sequence[Sample]) -> dict[TurnId, float]:
    """The advantage of every turn, the mean over its tokens."""
    return {s.id: fmean(s.advantages) for s in samples if s.advantages}


def penalise(sample: Sample, coef: float, kind: KLName) -> Sample:
    """The sample with the penalty `coef` times KL estimate `kind`, against the reference, on every token's reward."""
    penalty = coef * kl_penalty(
        torch.tensor(sample.behaviour), torch.tensor(sample.reference), kind
    )
    return replace(sample, penalties=tuple(penalty.tolist()))


def reference_kl(samples: Sequence[Sample], kind: KLName) -> float:
    """Mean KL estimate per token in nats, of the sampler against the reference."""
    behaviour = torch.tensor([value for sample in samples for value in sample.behaviour or ()])
    reference = torch.tensor([value for sample in samples for value in sample.reference or ()])
    return float(kl_penalty(behaviour, reference, kind).double().mean())


def keep(samples: Sequence[Sample], rule: FilterConfig) -> list[Sample]:
    """The samples that the filter `rule` leaves in."""
    if not samples:
        return []
    mask = rule.call(columns(samples))
    return [sample for sample, stays in zip(samples, mask.tolist(), strict=True) if stays]


def _distinct(
    samples: Sequence[Sample], rules: Mapping[str, AdvantageConfig]
) -> list[AdvantageConfig]:
    distinct: list[AdvantageConfig] = []
    for sample in samples:
        if sample.agent not in rules:
            raise CreditError(
                f"trajectory {sample.trajectory}, turn {sample.turn}: agent '{sample.agent}' has no estimator; "
                f"agents: {', '.join(rules)}"
            )
        if rules[sample.agent] not in distinct:
            distinct.append(rules[sample.agent])
    return distinct


def _rows(turns: Turns, values: Tensor, *, by_token: bool) -> list[tuple[float, ...]]:
    """A number per token of each turn, from [T] or, the same for all tokens of a turn, from [n].

    `by_token` says which where n turns, some of them masked, have n tokens; elsewhere the length says it.
    """
    lengths = turns.lengths.tolist()
    if len(values) == sum(lengths) and (by_token or len(values) != len(lengths)):
        flat = iter(values.tolist())
        return [tuple(islice(flat, length)) for length in lengths]
    return [(value,) * length for value, length in zip(values.tolist(), lengths, strict=True)]


def _named(samples: Sequence[Sample], name: str) -> Tensor | None:
    """[n] the score `name` of every turn; None when a turn has none."""
    values = [sample.scores.get(name) for sample in samples]
    return (
        None
        if any(value is None for value in values)
        else torch.tensor(values, dtype=torch.float64)
    )


def _steps(samples: Sequence[Sample]) -> Tensor | None:
    """[n, K] rewards of the steps from each turn's round on, 0 beyond the last; None when no step followed a turn."""
    rows = [sample.steps[sample.round :] for sample in samples]
    if not all(rows):
        return None
    return pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


def _by_token(rows: Sequence[tuple[float, ...] | None]) -> Tensor | None:
    """[T] of all samples one after the other; None when a sample has none."""
    if any(row is None for row in rows):
        return None
    return torch.tensor([value for row in rows for value in row or ()], dtype=torch.float64)


def _alike(samples: Sequence[Sample], similarity: float) -> Tensor:
    """[n] numbers of states: a prompt joins the first earlier state of its task that it is at least so alike to."""
    anchors: dict[str, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    numbers, new = list[int](), count()
    for sample in samples:
        alike = (
            number
            for number, prompt in anchors[sample.task]
            if SequenceMatcher(None, prompt, sample.prompt_ids, autojunk=False).ratio()
            >= similarity
        )
        if (found := next(alike, None)) is None:
            found = next(new)
            anchors[sample.task].append((found, sample.prompt_ids))
        numbers.append(found)
    return torch.tensor(numbers)


_SCALES_APART = 10.0  # times the smallest range of an agent's rewards, from which a warning is due


class CreditWatch:
    """Looks at the credit of every step. Of a run that goes on from a checkpoint the first steps are not known."""

    def __init__(self) -> None:
        self._without = 0  # steps from the start on in which no turn had an advantage
        self._seen = False  # whether a turn ever had one
        self._told: set[tuple[str, str]] = (
            set()
        )  # pairs of agents whose rewards were said to be apart in scale

    def check(self, trainer: TrainerConfig, step: int, samples: Sequence[Sample]) -> None:
        """Look at a step's `samples`, in the order of the steps.

        Raises:
            CreditError: an advantage is beyond `trainer.max_advantage`, or no turn of the run's first
                `trainer.signal_within` steps had one other than 0.
        """
        bound, within = trainer.max_advantage, trainer.signal_within
        sizes = np.array([np.abs(sample.advantages or (0.0,)).max() for sample in samples])
        if (
            bound is not None and not (sizes <= bound).all()
        ):  # nor may one be no number, which is the largest here
            largest, sample = sizes.max(), samples[int(sizes.argmax())]
            raise CreditError(
                f"step {step}: agent {sample.agent} has an advantage of {largest:.2g} (trajectory {sample.trajectory}, "
                f"turn {sample.turn}), beyond trainer.max_advantage {bound:g}; its rewards are out of scale, or their "
                "σ is next to nothing: see `mcore-mas explain`, change advantage or reward, or the bound"
            )
        self._seen = self._seen or bool(sizes.any())
        self._without += not self._seen
        if within is not None and self._without == within and step + 1 == within:
            raise CreditError(
                f"step {step}: no turn of the first {within} steps has an advantage, so nothing was learned: whatever "
                "is compared got equal rewards; see `mcore-mas explain`, and change tasks, reward or advantage, or "
                "raise trainer.signal_within (null: never stop)"
            )

    def scales_apart(self, samples: Sequence[Sample], rules: Mapping[str, AdvantageConfig]) -> str:
        """One line where an agent's credit by task has another agent's rewards in it, of a very different scale; or "".

        A scale is the largest of an agent's rewards less its smallest, in a step. A pair of agents is told of once.
        """
        groups = [compared(rule.name, rule.options) for rule in rules.values()]
        if not any(group is not None and "agent" not in group.peers for group in groups):
            return ""
        rewards = grouped((sample.agent, sample.reward) for sample in samples)
        scales = {
            agent: max(own) - min(own) for agent, own in rewards.items() if max(own) > min(own)
        }
        if not scales:
            return ""
        low, high = min(scales, key=scales.__getitem__), max(scales, key=scales.__getitem__)
        least, most = scales[low], scales[high]
        if most < _SCALES_APART * least or (low, high) in self._told:
            return ""
        self._told.add((low, high))
        return (
            f"agents' reward scales differ {most / least:.0f}x ({high} {most:g}, {low} {least:g}): group-relative "
            "credit by task will mostly be noise; use drmas or normalised rewards"
        )
