"""Advantages of turns: whom is a turn compared with (peers), what counts once (vote), and against what (baseline).

Every estimator is a callable from `Turns` and keyword options to advantages [n] by turn, or [T] by token where it says
so, in float64. `ESTIMATORS` is the table of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mcore_mas.equations.turns import (
    Turns,
    average,
    gae,
    number,
    reinforce_pp,
    reinforce_pp_baseline,
    reverse_scan,
    total,
)

Keys = tuple[str, ...]
Lone = Literal["zero", "raw"]  # what a vote without peers gets
_TASK: Keys = ("task",)
_TRAJECTORY: Keys = ("trajectory",)
_TURN: Keys = ("trajectory", "node", "turn")


@dataclass(frozen=True, slots=True)
class Ballot:
    """The votes of each peer group, seen from every turn."""

    own: Tensor  # [n] the score of the turn's vote: the mean over the turns of that vote
    mean: Tensor  # [n] over the votes of its group
    std: Tensor  # [n]
    size: Tensor  # [n] votes in its group
    votes: Tensor  # [m] the score of each (group, vote)
    box: Tensor  # [m] its group
    row: Tensor  # [n] which of the m votes a turn belongs to


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Who is compared with whom: turns that agree in `peers`, of which those that agree in `vote` count once."""

    peers: Keys
    vote: Keys

    def ballot(self, turns: Turns, ddof: int = 1) -> Ballot:
        """Count each vote once in each group that it has turns in; σ divides by (votes - `ddof`)."""
        return _count(turns, turns.key(*self.vote), turns.key(*self.peers), ddof)


def _count(turns: Turns, own: Tensor, group: Tensor, ddof: int) -> Ballot:
    groups, voters = int(group.max()) + 1, int(own.max()) + 1
    score = average(turns.scores, own, voters)[own]
    row = number(group * voters + own)
    votes = torch.empty(int(row.max()) + 1, dtype=score.dtype)
    votes[row] = score
    box = torch.empty(len(votes), dtype=torch.int64)
    box[row] = group
    size = box.bincount(minlength=groups)
    mean = average(votes, box, groups)
    squares = total((votes - mean[box]) ** 2, box, groups)
    std = (squares / (size - ddof).clamp(min=1)).sqrt()
    return Ballot(score, mean[group], std[group], size[group], votes, box, row)


def standardise(b: Ballot, eps: float) -> Tensor:
    """[n] A = (r - μ) / (σ + ε)   GRPO: DeepSeekMath, arXiv 2402.03300."""
    return (b.own - b.mean) / (b.std + eps)


def centre(b: Ballot, _eps: float) -> Tensor:
    """[n] A = r - μ   Dr. GRPO, arXiv 2503.20783."""
    return b.own - b.mean


def leave_one_out(b: Ballot, _eps: float) -> Tensor:
    """[n] A = r - mean of the other votes = (r - μ) n / (n - 1)   RLOO, arXiv 2402.14740."""
    return (b.own - b.mean) * b.size / (b.size - 1).clamp(min=1)


def best_of_k(b: Ballot, eps: float) -> Tensor:
    """[n] The best vote alone: A = (r_max - r_second) / (σ + ε), all others 0   arXiv 2503.19595, as verl has it."""
    order = torch.argsort(b.votes, descending=True, stable=True)
    order = order[torch.argsort(b.box[order], stable=True)]  # by group, best first
    first = torch.ones(len(order), dtype=torch.bool)
    first[1:] = b.box[order][1:] != b.box[order][:-1]
    best = order[first]
    follows = torch.nonzero(first).flatten() + 1
    has_second = (follows < len(order)) & (b.box[order[follows.clamp(max=len(order) - 1)]] == b.box[best])
    second = b.votes[order[follows.clamp(max=len(order) - 1)]]
    advantage = torch.zeros_like(b.votes)
    advantage[best] = torch.where(has_second, b.votes[best] - second, 0.0)
    return advantage[b.row] / (b.std + eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relative:
    """One row of the table of group-relative estimators."""

    comparison: Comparison
    baseline: Callable[[Ballot, float], Tensor]
    source: str

    def __call__(self, turns: Turns, *, eps: float = 1e-6, ddof: int = 1, lone: Lone = "zero") -> Tensor:
        """Advantages [n].

        Args:
            eps: added to σ, in reward units.
            ddof: σ divides by (votes - ddof).
            lone: what a vote without peers gets: "zero", or "raw", its own score, as Dr. MAS's released code does.
        """
        b = self.comparison.ballot(turns, ddof)
        return _lone(b, self.baseline(b, eps), lone)


_DRMAS = {"agent": Comparison(peers=("task", "agent"), vote=_TURN), "team": Comparison(peers=_TASK, vote=_TRAJECTORY)}


def drmas(
    turns: Turns,
    *,
    mean: Literal["agent", "team"] = "agent",
    std: Literal["agent", "team"] = "agent",
    eps: float = 1e-6,
    ddof: int = 1,
    lone: Lone = "zero",
) -> Tensor:
    """Advantages [n] normalised agent by agent: A^k = (r - μ_k) / (σ_k + ε)   Dr. MAS, arXiv 2602.08847, eq. 5.

    `mean` and `std` choose each statistic's key by itself, which gives the four rows of its Table 3: "agent" takes the
    agent's turns on the task, every turn a vote; "team" the task's trajectories, each a vote by the mean of its turns,
    and ("team", "team") is GRPO.
    """
    mu = _DRMAS[mean].ballot(turns, ddof)
    sigma = mu if std == mean else _DRMAS[std].ballot(turns, ddof)
    return _lone(mu, (mu.own - mu.mean) / (sigma.std + eps), lone)


_GIGPO = {"episode": _DRMAS["team"], "step": Comparison(peers=("task", "state"), vote=_TURN)}


def gigpo(
    turns: Turns,
    *,
    weight: float = 1.0,
    gamma: float = 0.95,
    scale: bool = True,
    similarity: float = 1.0,
    eps: float = 1e-6,
    ddof: int = 1,
    lone: Lone = "zero",
) -> Tensor:
    """Advantages [n] of the episode, plus `weight` times those among turns that stood at the same state of the task.

    A = A_E(τ) + ω A_S(s, a)   GiGPO, arXiv 2505.10978. A_S compares discounted returns from the turn's round on,
    R_t = Σ_{k≥t} γ^{k-t} r_k. `scale` divides both by σ (its mean_std_norm), else they are centred.
    `similarity` < 1 joins states that are at least so alike (difflib's ratio).
    """
    baseline = standardise if scale else centre
    episode = _GIGPO["episode"].ballot(turns, ddof)
    step = _GIGPO["step"].ballot(_anchored(turns, gamma, similarity), ddof)
    return _lone(episode, baseline(episode, eps), lone) + weight * _lone(step, baseline(step, eps), "zero")


def _anchored(turns: Turns, gamma: float, similarity: float) -> Turns:
    """The turns with their discounted returns as scores, and states that are alike as one."""
    state = turns.keys["state"]
    if similarity < 1.0:
        if turns.alike is None:
            raise ValueError("gigpo: similarity below 1 needs the texts of the states, which are not there")
        state = turns.alike(similarity)
    keys = {column: turns.keys[column] for column in ("task", "trajectory", "node", "turn")}
    return Turns(scores=discounted_returns(turns, gamma), keys={**keys, "state": state}, lengths=turns.lengths)


def discounted_returns(turns: Turns, gamma: float) -> Tensor:
    """[n] R_t = Σ_{k≥t} γ^{k-t} r_k over the rounds k of a turn's trajectory from its own on, a round counted once.

    Raises:
        ValueError: the turns have no rewards of environment steps.
    """
    if turns.steps is None:
        raise ValueError("discounted returns need the rewards of environment steps, which are not there")
    trajectory, rounds = turns.key("trajectory"), turns.keys["round"]
    width = int(rounds.max()) + 2
    distinct, row = torch.unique(trajectory * width + rounds + 1, return_inverse=True)  # ordered by trajectory, round
    reward = torch.empty(len(distinct), dtype=torch.float64)
    reward[row] = turns.steps
    lengths = (distinct // width).bincount()
    return reverse_scan(reward, gamma, lengths)[row]


def remax(turns: Turns) -> Tensor:
    """Advantages [n]: A = r - r(greedy trajectory of the same task)   ReMax, arXiv 2310.10505.

    Raises:
        ValueError: the turns have no greedy outcomes.
    """
    if turns.greedy is None:
        raise ValueError("remax needs the outcome of a greedy trajectory of every task, which is not there")
    return turns.scores - turns.greedy


_SIBLINGS = Comparison(peers=("trajectory", "parent"), vote=("trajectory", "node"))
_NODES = Comparison(peers=_TRAJECTORY, vote=("trajectory", "node"))


def tree_baseline(turns: Turns, lam: float) -> tuple[Tensor, Tensor]:
    """(score of each turn's node [n], its baseline [n]): (1-λ)·parent + λ·mean of its other siblings   MARTI, MARS².

    A node's score is the mean over its turns. Without a parent the siblings count alone, without siblings the parent;
    with neither the baseline is the node's own score.
    """
    b = _SIBLINGS.ballot(turns)
    by_node = torch.full((int(turns.keys["node"].max()) + 2,), torch.nan, dtype=torch.float64)
    by_node[turns.keys["node"]] = b.own  # the last place stays empty: it is the root's, which -1 stands for
    parent = by_node[turns.keys["parent"]]
    # the mean of the others is μ - (r - μ) / (n - 1), which leaves equal scores equal
    siblings = torch.where(b.size > 1, b.mean - (b.own - b.mean) / (b.size - 1).clamp(min=1), torch.nan)
    both = (1 - lam) * parent + lam * siblings
    either = torch.where(parent.isnan(), siblings, parent)
    baseline = torch.where(both.isnan(), either, both)
    return b.own, torch.where(baseline.isnan(), b.own, baseline)


def mcts(turns: Turns, *, lam: float = 0.5) -> Tensor:
    """Advantages [n] of tree nodes: A = r - baseline, with `tree_baseline`'s of MARTI."""
    own, baseline = tree_baseline(turns, lam)
    return own - baseline


def mars2(
    turns: Turns,
    *,
    gamma: float = 0.3,
    lam: float = 0.5,
    eps: float = 1e-6,
    ddof: int = 1,
    lone: Lone = "zero",
) -> Tensor:
    """Advantages [n]: rewards shaped by the tree, r + γ (r - baseline), standardised over the nodes of the tree.

    MARS², MARTI's multi-agent tree search; the baseline is `tree_baseline`'s.
    """
    b = _NODES.ballot(_shaped(turns, gamma, lam), ddof)
    return _lone(b, standardise(b, eps), lone)


def _shaped(turns: Turns, gamma: float, lam: float) -> Turns:
    own, baseline = tree_baseline(turns, lam)
    return Turns(scores=own + gamma * (own - baseline), keys=turns.keys, lengths=turns.lengths)


def _lone(b: Ballot, advantages: Tensor, lone: str) -> Tensor:
    return torch.where(b.size > 1, advantages, b.own if lone == "raw" else torch.zeros_like(b.own))


Estimator = Callable[..., Tensor]  # (Turns, **options) -> [n] or [T]

_TEAM = _DRMAS["team"]
ESTIMATORS: dict[str, Estimator] = {
    "grpo": Relative(comparison=_TEAM, baseline=standardise, source="DeepSeekMath, arXiv 2402.03300"),
    "dr_grpo": Relative(comparison=_TEAM, baseline=centre, source="Dr. GRPO, arXiv 2503.20783"),
    "drmas": drmas,
    "at_grpo": Relative(
        comparison=Comparison(peers=("task", "state", "agent", "turn"), vote=_TURN),
        baseline=standardise,
        source="Stronger-MAS, arXiv 2510.11062",
    ),
    "gigpo": gigpo,
    "rloo": Relative(comparison=_TEAM, baseline=leave_one_out, source="RLOO, arXiv 2402.14740"),
    "grpo_passk": Relative(comparison=_TEAM, baseline=best_of_k, source="arXiv 2503.19595"),
    "m_grpo": Relative(
        comparison=Comparison(peers=("task", "agent"), vote=("trajectory", "agent")),
        baseline=standardise,
        source="M-GRPO, arXiv 2511.13288",
    ),
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "mcts": mcts,
    "mars2": mars2,
    "gae": gae,
}
# what must be known before an estimator can run, beyond rewards
NEEDS = {"gae": "values", "remax": "greedy"}
# who compares a turn with something else than its task's other trajectories
UNGROUPED = frozenset({"gae", "remax", "reinforce_pp"})


def compared(name: str, turns: Turns, **options: Any) -> dict[str, tuple[Comparison, Ballot]]:
    """Whom the estimator `name` compares with whom, and the votes it counts, by statistic; {} where with nobody."""
    estimator = ESTIMATORS.get(name)
    ddof = options.get("ddof", 1)
    if isinstance(estimator, Relative):
        rows = {"peers": (estimator.comparison, turns)}
    elif estimator is drmas:
        mean, std = options.get("mean", "agent"), options.get("std", "agent")
        both = {"mean": (_DRMAS[mean], turns), "std": (_DRMAS[std], turns)}
        rows = both if mean != std else {"peers": both["mean"]}
    elif estimator is gigpo:
        anchored = _anchored(turns, options.get("gamma", 0.95), options.get("similarity", 1.0))
        rows = {"episode": (_GIGPO["episode"], turns), "step": (_GIGPO["step"], anchored)}
    elif estimator is mcts:
        rows = {"siblings": (_SIBLINGS, turns)}
    elif estimator is mars2:
        rows = {"tree": (_NODES, _shaped(turns, options.get("gamma", 0.3), options.get("lam", 0.5)))}
    elif estimator is reinforce_pp_baseline:
        rows = {"peers": (Comparison(peers=_TASK, vote=_TURN), turns)}
    else:
        rows = {}
    return {label: (comparison, comparison.ballot(own, ddof)) for label, (comparison, own) in rows.items()}
