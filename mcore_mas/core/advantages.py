"""Group-relative advantages: peers (whom am I compared with) × vote (what counts once) × baseline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """One row of the table: which columns of a turn make its peer groups and its vote."""

    mean: tuple[str, ...]  # turns that agree in these columns share μ
    std: tuple[str, ...]  # turns that agree in these columns share σ; empty: only centred
    vote: tuple[str, ...]  # turns that agree in these columns count once, by their mean score
    source: str


_TRAJECTORY = ("trajectory",)
_TURN = ("trajectory", "turn")

ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(mean=("task",), std=("task",), vote=_TRAJECTORY, source="DeepSeekMath, arXiv 2402.03300"),
    "dr_grpo": Estimator(mean=("task",), std=(), vote=_TRAJECTORY, source="Dr. GRPO, arXiv 2503.20783"),
    "drmas": Estimator(mean=("task", "agent"), std=("task", "agent"), vote=_TURN, source="Dr. MAS, arXiv 2602.08847"),
}


def standardise(
    scores: Tensor, *, vote: Tensor, mean: Tensor, std: Tensor | None, eps: float = 1e-6, lone: str = "zero"
) -> Tensor:
    """Advantages [n] of n turns: A = (s̄_vote − μ_group) / (σ_group + ε), Dr. MAS eq. 5 with free keys.

    Args:
        scores: [n] one score per turn, finite.
        vote, mean, std: [n] integer keys; equal keys belong together. Turns of one vote count once in μ and σ, by
            their mean score. `std` None only centres.
        eps: added to σ, in reward units.
        lone: what a vote without peers gets: "zero", or "raw" (its own score, as Dr. MAS's released code does).

    σ is the unbiased standard deviation (n − 1). Computed in float64.
    """
    scores = scores.double()
    own = _mean_by(scores, vote)
    # one row stands for each vote; a vote whose turns fall into several groups is counted once in each of them
    mu, size = _moments(own, vote, mean)[:2]
    centred = own - mu
    if std is not None:
        _, _, sigma = _moments(own, vote, std)
        centred = centred / (sigma + eps)
    alone = own if lone == "raw" else torch.zeros_like(own)
    return torch.where(size > 1, centred, alone)


def _mean_by(values: Tensor, key: Tensor) -> Tensor:
    index = _number(key)
    sums = torch.zeros(int(index.max()) + 1, dtype=values.dtype).index_add(0, index, values)
    means: Tensor = (sums / index.bincount())[index]
    return means


def _number(keys: Tensor) -> Tensor:
    """Equal rows of `keys` [n] or [n, c] get equal numbers from 0 on, [n]."""
    return torch.unique(keys, dim=0, return_inverse=True)[1]  # type: ignore[no-any-return]


def _moments(values: Tensor, vote: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per row: mean, number of votes and unbiased deviation of its group, each (group, vote) counted once."""
    index = _number(group)
    pair = _number(torch.stack([index, vote], dim=1))
    pairs = int(pair.max()) + 1
    ballot = torch.empty(pairs, dtype=values.dtype)
    ballot[pair] = values
    box = torch.empty(pairs, dtype=torch.int64)
    box[pair] = index
    size = box.bincount()
    mu = torch.zeros(len(size), dtype=values.dtype).index_add(0, box, ballot) / size
    squares = torch.zeros(len(size), dtype=values.dtype).index_add(0, box, (ballot - mu[box]) ** 2)
    sigma = (squares / (size - 1).clamp(min=1)).sqrt()
    return mu[index], size[index], sigma[index]
