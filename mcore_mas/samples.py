"""Turns as training samples: rewards become advantages, and every token gets its weight in the update."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mcore_mas.core.advantages import ESTIMATORS, standardise
from rollout.records import Group, Status
from rollout.registry import lookup


class CreditError(ValueError):
    """Rewards cannot become advantages: names the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One turn as training tokens for its policy."""

    policy: str
    agent: str
    task: str
    trajectory: str
    turn: int
    prompt_ids: tuple[int, ...]  # [P]
    completion_ids: tuple[int, ...]  # [C]
    trained: tuple[bool, ...] | None = None  # [C] tokens that carry loss; None: all
    behaviour: tuple[float, ...] | None = None  # [C] log-probabilities of the sampler; None: not sampled
    temperature: float = 1.0
    reward: float = 0.0
    advantage: float = 0.0
    weight: float = 1.0  # of each token's loss, the denominator included once `weigh` has run

    @property
    def tokens(self) -> int:
        """Tokens that carry loss."""
        return len(self.completion_ids) if self.trained is None else sum(self.trained)


# what an estimator's keys may name
_COLUMNS: dict[str, Callable[[Sample], object]] = {
    "task": lambda sample: sample.task,
    "agent": lambda sample: sample.agent,
    "trajectory": lambda sample: sample.trajectory,
    "turn": lambda sample: sample.turn,
}


def to_samples(groups: Iterable[Group]) -> list[Sample]:
    """One sample per turn of every completed trajectory.

    Raises:
        CreditError: a turn has no finite reward.
    """
    samples = []
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.status is not Status.COMPLETED:
                continue
            for turn in trajectory.turns:
                if turn.reward is None or not math.isfinite(turn.reward):
                    where = f"trajectory {trajectory.id}, turn {turn.index} ({turn.agent})"
                    raise CreditError(f"{where}: reward is {turn.reward}; the reward allocator must set a finite one")
                samples.append(
                    Sample(
                        policy=turn.policy,
                        agent=turn.agent,
                        task=trajectory.task_id,
                        trajectory=trajectory.id,
                        turn=turn.index,
                        prompt_ids=turn.prompt_ids,
                        completion_ids=turn.completion_ids,
                        behaviour=turn.logprobs,
                        temperature=turn.temperature,
                        reward=turn.reward,
                    )
                )
    return samples


def estimate(samples: Sequence[Sample], name: str, *, eps: float = 1e-6, lone: str = "zero") -> list[Sample]:
    """The samples with advantages by the estimator `name` of `ESTIMATORS`."""
    estimator = lookup("advantage", name, ESTIMATORS)
    if not samples:
        return []
    advantages = standardise(
        torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        vote=_keys(samples, estimator.vote),
        mean=_keys(samples, estimator.mean),
        std=_keys(samples, estimator.std) if estimator.std else None,
        eps=eps,
        lone=lone,
    )
    return [replace(sample, advantage=value) for sample, value in zip(samples, advantages.tolist(), strict=True)]


def weigh(samples: Sequence[Sample], loss_weights: Mapping[str, float]) -> list[Sample]:
    """The samples with their share of a token-mean loss: agent's weight / all trained tokens of the policy."""
    totals: Counter[str] = Counter()
    for sample in samples:
        totals[sample.policy] += sample.tokens
    return [replace(sample, weight=loss_weights[sample.agent] / totals[sample.policy]) for sample in samples]


def _keys(samples: Sequence[Sample], columns: tuple[str, ...]) -> torch.Tensor:
    numbers: dict[tuple[object, ...], int] = {}
    rows = [tuple(_COLUMNS[column](sample) for column in columns) for sample in samples]
    return torch.tensor([numbers.setdefault(row, len(numbers)) for row in rows])
