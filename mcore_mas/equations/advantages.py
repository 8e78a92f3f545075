"""Credit assignment: estimators of advantages, group-relative (GRPO's kin), of trees, by token, and with a critic.

A group-relative one says whom a turn is compared with (peers), what counts once (vote), and against what (baseline).
Every estimator is a callable from `Turns` and keyword options to `Advantages`: values in float64, [n] by turn or, where
it says so, [T] by token, and the groups that it compared. `ESTIMATORS` is the table of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt
from torch import Tensor

from mcore_mas.equations.turns import Advantages, Grouping, GroupStatistics, Turns, average, reverse_scan, total
from rollout.base.options import Share

Lone = Literal["zero", "raw"]  # what a vote without peers gets
_TURN = ("trajectory", "node", "turn")


def standardise(b: GroupStatistics, eps: float) -> Tensor:
    """[n] A = (r - μ) / (σ + ε)   GRPO: DeepSeekMath, arXiv 2402.03300."""
    return (b.own - b.mean) / (b.scale + eps)


def centre(b: GroupStatistics, _eps: float) -> Tensor:
    """[n] A = r - μ   Dr. GRPO, arXiv 2503.20783."""
    return b.own - b.mean


def leave_one_out(b: GroupStatistics, _eps: float) -> Tensor:
    """[n] A = r - mean of the other votes = (r - μ) n / (n - 1)   RLOO, arXiv 2402.14740."""
    return (b.own - b.mean) * b.size / (b.size - 1).clamp(min=1)


def best_of_k(b: GroupStatistics, eps: float) -> Tensor:
    """[n] The best vote alone: A = (r_max - r_second) / (σ + ε), all others 0   arXiv 2503.19595, as verl has it."""
    order = torch.argsort(b.votes, descending=True, stable=True)
    order = order[torch.argsort(b.group_of[order], stable=True)]  # by group, best first
    first = torch.ones(len(order), dtype=torch.bool)
    first[1:] = b.group_of[order][1:] != b.group_of[order][:-1]
    best = order[first]
    follows = torch.nonzero(first).flatten() + 1
    has_second = (follows < len(order)) & (b.group_of[order[follows.clamp(max=len(order) - 1)]] == b.group_of[best])
    second = b.votes[order[follows.clamp(max=len(order) - 1)]]
    advantage = torch.zeros_like(b.votes)
    advantage[best] = torch.where(has_second, b.votes[best] - second, 0.0)
    return advantage[b.vote] / (b.scale + eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relative:
    """One row of the table of group-relative estimators."""

    grouping: Grouping
    baseline: Callable[[GroupStatistics, float], Tensor]
    source: str

    def __call__(
        self, turns: Turns, *, eps: NonNegativeFloat = 1e-6, ddof: NonNegativeInt = 1, lone: Lone = "zero"
    ) -> Advantages:
        """Advantages [n].

        Args:
            eps: added to σ, in reward units.
            ddof: σ divides by (votes - ddof).
            lone: what a vote without peers gets: "zero", or "raw", its own score, as Dr. MAS's released code does.
        """
        b = self.grouping.statistics(turns, ddof)
        return Advantages(_singletons(b, self.baseline(b, eps), lone), {"peers": b})


_TEAM = Grouping(peers=("task",), vote=("trajectory",))
_DRMAS = {"agent": Grouping(peers=("task", "agent"), vote=_TURN), "team": _TEAM}


def drmas(
    turns: Turns,
    *,
    mean: Literal["agent", "team"] = "agent",
    std: Literal["agent", "team"] = "agent",
    eps: NonNegativeFloat = 1e-6,
    ddof: NonNegativeInt = 1,
    lone: Lone = "zero",
) -> Advantages:
    """Advantages [n] normalised agent by agent: A^k = (r - μ_k) / (σ_k + ε)   Dr. MAS, arXiv 2602.08847, eq. 5.

    `mean` and `std` choose each statistic's key by itself, which gives the four rows of its Table 3: "agent" takes the
    agent's turns on the task, every turn a vote; "team" the task's trajectories, each a vote by the mean of its turns,
    and ("team", "team") is GRPO.
    """
    mu = _DRMAS[mean].statistics(turns, ddof)
    sigma = mu if std == mean else _DRMAS[std].statistics(turns, ddof)
    groups = {"peers": mu} if std == mean else {"mean": mu, "std": sigma}
    return Advantages(_singletons(mu, (mu.own - mu.mean) / (sigma.scale + eps), lone), groups)


_STEP = Grouping(peers=("task", "state"), vote=_TURN)


def gigpo(
    turns: Turns,
    *,
    weight: float = 1.0,
    gamma: Share = 0.95,
    scale: bool = True,
    similarity: Annotated[float, Field(gt=0, le=1)] = 1.0,
    eps: NonNegativeFloat = 1e-6,
    ddof: NonNegativeInt = 1,
    lone: Lone = "zero",
) -> Advantages:
    """Advantages [n] of the episode, plus `weight` times those among turns that stood at the same state of the task.

    A = A_E(τ) + ω A_S(s, a)   GiGPO, arXiv 2505.10978. A_S compares discounted returns from the turn's round on,
    R_t = Σ_{k≥t} γ^{k-t} r_k. `scale` divides both by σ (its mean_std_norm), else they are centred.
    `similarity` < 1 joins states that are at least so alike (difflib's ratio).
    """
    baseline = standardise if scale else centre
    episode = _TEAM.statistics(turns, ddof)
    step = _STEP.statistics(_anchored(turns, gamma, similarity), ddof)
    of_episode = _singletons(episode, baseline(episode, eps), lone)
    of_step = _singletons(step, baseline(step, eps), "zero")
    return Advantages(of_episode + weight * of_step, {"episode": episode, "step": step})


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


def remax(turns: Turns) -> Advantages:
    """Advantages [n]: A = r - r(greedy trajectory of the same task)   ReMax, arXiv 2310.10505.

    Raises:
        ValueError: the turns have no greedy outcomes.
    """
    if turns.greedy is None:
        raise ValueError("remax needs the outcome of a greedy trajectory of every task, which is not there")
    return Advantages(turns.scores - turns.greedy)


_SIBLINGS = Grouping(peers=("trajectory", "parent"), vote=("trajectory", "node"))
_NODES = Grouping(peers=("trajectory",), vote=("trajectory", "node"))


def tree_baseline(turns: Turns, lam: float) -> tuple[GroupStatistics, Tensor]:
    """(siblings' statistics, each turn's baseline [n]): (1-λ)·parent + λ·mean of the other siblings   MARTI, MARS².

    A node's score is the mean over its turns. Without a parent the siblings count alone, without siblings the parent;
    with neither the baseline is the node's own score.
    """
    b = _SIBLINGS.statistics(turns)
    by_node = torch.full((int(turns.keys["node"].max()) + 2,), torch.nan, dtype=torch.float64)
    by_node[turns.keys["node"]] = b.own  # the last place stays empty: it is the root's, which -1 stands for
    parent = by_node[turns.keys["parent"]]
    # the mean of the others is μ - (r - μ) / (n - 1), which leaves equal scores equal
    siblings = torch.where(b.size > 1, b.mean - (b.own - b.mean) / (b.size - 1).clamp(min=1), torch.nan)
    both = (1 - lam) * parent + lam * siblings
    either = torch.where(parent.isnan(), siblings, parent)
    baseline = torch.where(both.isnan(), either, both)
    return b, torch.where(baseline.isnan(), b.own, baseline)


def mcts(turns: Turns, *, lam: Share = 0.5) -> Advantages:
    """Advantages [n] of tree nodes: A = r - baseline, with `tree_baseline`'s of MARTI."""
    siblings, baseline = tree_baseline(turns, lam)
    return Advantages(siblings.own - baseline, {"siblings": siblings})


def mars2(
    turns: Turns,
    *,
    gamma: NonNegativeFloat = 0.3,
    lam: Share = 0.5,
    eps: NonNegativeFloat = 1e-6,
    ddof: NonNegativeInt = 1,
    lone: Lone = "zero",
) -> Advantages:
    """Advantages [n]: rewards shaped by the tree, r + γ (r - baseline), standardised over the nodes of the tree.

    MARS², MARTI's multi-agent tree search; the baseline is `tree_baseline`'s.
    """
    siblings, baseline = tree_baseline(turns, lam)
    shaped = replace(turns, scores=siblings.own + gamma * (siblings.own - baseline))
    tree = _NODES.statistics(shaped, ddof)
    return Advantages(_singletons(tree, standardise(tree, eps), lone), {"tree": tree})


def _singletons(b: GroupStatistics, advantages: Tensor, lone: Lone) -> Tensor:
    """The advantages [n], but for votes without peers."""
    return torch.where(b.size > 1, advantages, b.own if lone == "raw" else torch.zeros_like(b.own))


Across = Literal["turn", "agent"]
Whitened = Literal["batch", "policy", "agent"]
# whose tokens are whitened together
_WHITEN: dict[str, tuple[str, ...]] = {"batch": (), "policy": ("policy",), "agent": ("agent",)}


def whiten(values: Tensor, group: Tensor, eps: float = 1e-8) -> Tensor:
    """[T] (x - mean) / sqrt(var + ε) over the tokens of each `group` [T]; var divides by (tokens - 1)."""
    count = group.bincount()
    centred = values - average(values, group, len(count))[group]
    variance = total(centred**2, group, len(count)) / (count - 1).clamp(min=1)
    return centred * (variance + eps).rsqrt()[group]


def _whitened(turns: Turns, values: Tensor, over: Whitened) -> Tensor:
    return whiten(values, turns.by_token(turns.key(*_WHITEN[over])))


_TURNS_OF_TASK = Grouping(peers=("task",), vote=_TURN)


def reinforce_pp(turns: Turns, *, gamma: Share = 1.0, whitened: Whitened = "policy") -> Advantages:
    """Advantages [T]: each token's return to go in its turn, whitened   REINFORCE++, arXiv 2501.03262.

    `whitened` says over whose tokens: the whole "batch", those of a "policy" or of an "agent" (MARTI).
    """
    returns = reverse_scan(turns.token_rewards(), gamma, turns.lengths)
    return Advantages(_whitened(turns, returns, whitened))


def reinforce_pp_baseline(turns: Turns, *, whitened: Whitened = "policy") -> Advantages:
    """Advantages [T]: the turn's score less its task's mean, whitened   REINFORCE++-baseline, arXiv 2501.03262."""
    task = turns.key("task")
    mean = average(turns.scores, task, int(task.max()) + 1)
    values = _whitened(turns, turns.by_token(turns.scores - mean[task]), whitened)
    return Advantages(values, {"peers": _TURNS_OF_TASK.statistics(turns)})


def gae(
    turns: Turns,
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    across: Across = "turn",
    whitened: Whitened = "policy",
) -> Advantages:
    """Advantages [T] against a critic, whitened: A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V_{t+1} - V_t.

    GAE, arXiv 1506.02438; for teams as UnityMAS-O uses it. `across` ends an episode at the end of each "turn"
    (UnityMAS-O), or joins the turns of one "agent" in a trajectory in their order.
    """
    advantages, returns = advantages_and_returns(turns, gamma=gamma, lam=lam, across=across)
    return Advantages(_whitened(turns, advantages, whitened), returns=returns)


def advantages_and_returns(
    turns: Turns, *, gamma: float = 1.0, lam: float = 1.0, across: Across = "turn"
) -> tuple[Tensor, Tensor]:
    """(A_t [T] before whitening, the critic's targets A_t + V_t [T]).

    Raises:
        ValueError: the turns have no values.
    """
    if turns.values is None:
        raise ValueError("gae needs a critic's values, which are not there")
    rewards, values = turns.token_rewards(), turns.values
    order = torch.arange(len(values))
    lengths = turns.lengths
    if across == "agent":  # tokens of an agent's turns in a trajectory, one after the other
        place = turns.by_token(turns.key("trajectory", "agent")) * (int(turns.keys["turn"].max()) + 1)
        order = torch.argsort(place + turns.by_token(turns.keys["turn"]), stable=True)
        owner = turns.by_token(turns.key("trajectory", "agent"))
        lengths = owner.bincount()
    rewards, values = rewards[order], values[order]
    after = torch.zeros_like(values)
    after[:-1] = values[1:]
    after[lengths.cumsum(0) - 1] = 0.0  # an episode is worth nothing beyond its end
    advantages = reverse_scan(rewards + gamma * after - values, gamma * lam, lengths)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return advantages[back], (advantages + values)[back]


Estimator = Callable[..., Advantages]  # of (Turns, **options)
ESTIMATORS: dict[str, Estimator] = {
    "grpo": Relative(grouping=_TEAM, baseline=standardise, source="DeepSeekMath, arXiv 2402.03300"),
    "dr_grpo": Relative(grouping=_TEAM, baseline=centre, source="Dr. GRPO, arXiv 2503.20783"),
    "drmas": drmas,
    "at_grpo": Relative(
        grouping=Grouping(peers=("task", "state", "agent", "turn"), vote=_TURN),
        baseline=standardise,
        source="Stronger-MAS, arXiv 2510.11062",
    ),
    "gigpo": gigpo,
    "rloo": Relative(grouping=_TEAM, baseline=leave_one_out, source="RLOO, arXiv 2402.14740"),
    "grpo_passk": Relative(grouping=_TEAM, baseline=best_of_k, source="arXiv 2503.19595"),
    "m_grpo": Relative(
        grouping=Grouping(peers=("task", "agent"), vote=("trajectory", "agent")),
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
