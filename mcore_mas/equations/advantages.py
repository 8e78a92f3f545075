"""Advantage estimators for credit assignment: group-relative (GRPO's kin), of trees, by token, and with a critic.

A group-relative one says whom a turn is compared with (peers), what counts once (vote), against what (baseline), and
what it is divided by (std). Every estimator is a callable from `Turns` and keyword options to `Advantages`: values in
float64, [n] by turn or, where it says so, [T] by token, and the groups that it compared. `ESTIMATORS` is the table.

Args:
    gamma: discount γ, by token.
    lam: λ of GAE; in trees, the weight of the siblings in the baseline, of which the parent has the rest.
    eps: added to σ, in reward units.
    ddof: σ divides by (votes - ddof).
    lone: what a vote without peers gets: "zero", or "raw", its own score, as Dr. MAS's released code does.
    whitened: whose tokens are whitened together: the whole "batch", those of a "policy" or of an "agent" (MARTI).
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat

from mcore_mas.equations.tensors import Tensor, torch
from mcore_mas.equations.turns import (
    Advantages,
    Grouping,
    GroupStatistics,
    Peers,
    Turns,
    Vote,
    average,
    grouping,
    reverse_scan,
    total,
)
from rollout.base.options import Share

Lone = Literal["zero", "raw"]  # what a vote without peers gets
Baseline = Literal["mean", "others", "second"]
Spread = Literal["peers", "team", "agent", "none"]  # whose σ


def _second(b: GroupStatistics) -> Tensor:
    """[n] r_max - r_second for the best vote, 0 for all others."""
    order = torch.argsort(b.votes, descending=True, stable=True)
    order = order[torch.argsort(b.group_of[order], stable=True)]  # by group, best first
    votes, group = b.votes[order], b.group_of[order]
    best = group.diff(prepend=group[:1] - 1) != 0
    has_next = group.diff(append=group[-1:] + 1) == 0
    advantage = torch.empty_like(votes)
    advantage[order] = torch.where(best & has_next, votes - votes.roll(-1), 0.0)
    return advantage[b.vote]


_BASELINES: dict[Baseline, Callable[[GroupStatistics], Tensor]] = {
    "mean": lambda b: b.own - b.mean,
    # r - mean of the other votes = (r - μ) n / (n - 1)
    "others": lambda b: (b.own - b.mean) * b.size / (b.size - 1).clamp(min=1),
    "second": _second,
}
_SPREADS = {"team": grouping("task", "trajectory"), "agent": grouping("agent", "turn")}


def relative(
    turns: Turns,
    *,
    peers: Peers,
    vote: Vote,
    baseline: Baseline = "mean",
    std: Spread = "peers",
    eps: NonNegativeFloat = 1e-6,
    ddof: Literal[0, 1] = 1,
    lone: Lone = "zero",
) -> Advantages:
    """Advantages [n]: A = (r - baseline) / (σ + ε), r the score of a turn's vote; σ is 1 where votes do not differ.

    Args:
        peers: turns that are compared: those of a "task"; of an "agent" on it; of an agent in a "state", in the same
            turn.
        vote: what counts once, by the mean of its turns among these peers: a "trajectory", or each "turn".
        baseline: "mean" μ; the mean of the "others"; or "second": the best vote gets its lead, all others 0.
        std: whose σ: the "peers"' own, that of the "team"'s trajectories on the task, that of the "agent"'s turns on
            it, or "none".
    """
    mu = grouping(peers, vote).statistics(turns, ddof)
    advantages, groups = _BASELINES[baseline](mu), {"peers": mu}
    if std != "none":
        of = _SPREADS.get(std, mu.grouping)
        sigma = mu if of == mu.grouping else of.statistics(turns, ddof)
        advantages = advantages / (sigma.scale + eps)
        groups = groups if sigma is mu else {"mean": mu, "std": sigma}
    return Advantages(_singletons(mu, advantages, lone), groups)


def _row(source: str, **choices: str) -> partial[Advantages]:
    """A row of the table of group-relative estimators: `relative` with other defaults."""
    row = partial(relative, **choices)  # type: ignore[arg-type]
    row.__doc__ = f"Advantages [n] relative to a group   {source}\n\n{inspect.getdoc(relative)}"
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCredit:
    """GiGPO's advantages among turns that stood at the same state of the task, A_S.

    Args:
        weight: ω.
        gamma: γ, by environment step.
        similarity: below 1, states that are at least so alike (difflib's ratio) are one.
    """

    weight: float = 1.0
    gamma: Share = 0.95
    similarity: Annotated[float, Field(gt=0, le=1)] = 1.0


def gigpo(
    turns: Turns,
    *,
    peers: Literal["task", "agent"] = "task",
    vote: Vote = "trajectory",
    std: Literal["peers", "none"] = "peers",
    step: StepCredit = StepCredit(),
    eps: NonNegativeFloat = 1e-6,
    ddof: Literal[0, 1] = 1,
    lone: Lone = "zero",
) -> Advantages:
    """Advantages [n] of the episode, plus ω times those among turns that stood at the same state of the task.

    A = A_E(τ) + ω A_S(s, a)   GiGPO, arXiv 2505.10978. A_S compares discounted returns from the turn's round on,
    R_t = Σ_{k≥t} γ^{k-t} r_k, each turn a vote.

    Args:
        peers: turns that are compared: those of a "task", or of an "agent" on it.
        vote: of A_E, as of `grpo`.
        std: "peers": both parts are divided by their σ (mean_std_norm); "none": they are centred (mean_norm).
        step: ω, and how A_S is made.
        lone: what an episode without peers gets: "zero", or "raw", its own score; a lone step gets 0.
    """
    episode = relative(turns, peers=peers, vote=vote, std=std, eps=eps, ddof=ddof, lone=lone)
    anchored = Grouping(
        peers=(*grouping(peers, "turn").peers, "state"), vote=grouping(peers, "turn").vote
    )
    by_state = anchored.statistics(_anchored(turns, step), ddof)
    of_step = (by_state.own - by_state.mean) / (by_state.scale + eps if std == "peers" else 1.0)
    values = episode.values + step.weight * _singletons(by_state, of_step, "zero")
    return Advantages(values, {"episode": episode.groups["peers"], "step": by_state})


def _anchored(turns: Turns, step: StepCredit) -> Turns:
    """The turns with their discounted returns as scores, and states that are alike as one."""
    state = turns.keys["state"]
    if step.similarity < 1.0:
        if turns.alike is None:
            raise ValueError(
                "gigpo: step.similarity below 1 needs the texts of the states, which are not there"
            )
        state = turns.alike(step.similarity)
    return replace(
        turns, scores=discounted_returns(turns, step.gamma), keys={**turns.keys, "state": state}
    )


def discounted_returns(turns: Turns, gamma: float) -> Tensor:
    """[n] R_t = r_t + γ R_{t+1} = Σ_{k≥t} γ^{k-t} r_k over the rounds k of a turn's trajectory from its own on.

    Raises:
        ValueError: the turns have no rewards of environment steps.
    """
    if turns.steps is None:
        raise ValueError(
            "discounted returns need the rewards of environment steps, which are not there"
        )
    returns = torch.zeros_like(turns.scores)
    for rewards in reversed(turns.steps.unbind(1)):
        returns = rewards + gamma * returns
    return returns


def remax(turns: Turns) -> Advantages:
    """Advantages [n]: A = r - r(greedy trajectory of the same task)   ReMax, arXiv 2310.10505.

    Raises:
        ValueError: the turns have no greedy outcomes.
    """
    if turns.greedy is None:
        raise ValueError(
            "remax needs the outcome of a greedy trajectory of every task, which is not there"
        )
    return Advantages(turns.scores - turns.greedy)


_SIBLINGS = Grouping(peers=("trajectory", "parent"), vote=("trajectory", "node"))
_NODES = Grouping(peers=("trajectory",), vote=("trajectory", "node"))


def tree_baseline(turns: Turns, lam: float) -> tuple[GroupStatistics, Tensor]:
    """(siblings' statistics, each turn's baseline [n]): (1-λ)·parent + λ·mean of the other siblings   MARTI, MARS².

    A node's score is the mean over its turns. Without a parent the siblings count alone, without siblings the parent;
    with neither the baseline is the node's own score.
    """
    b = _SIBLINGS.statistics(turns)
    node, above = turns.keys["node"], turns.keys["parent"]
    by_node = torch.full(
        (int(torch.maximum(node, above).max()) + 2,), torch.nan, dtype=torch.float64
    )
    by_node[node] = b.own  # the last place stays empty: it is the root's, which -1 stands for
    parent = by_node[above]
    # the mean of the others is μ - (r - μ) / (n - 1), which leaves equal scores equal
    siblings = torch.where(
        b.size > 1, b.mean - (b.own - b.mean) / (b.size - 1).clamp(min=1), torch.nan
    )
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
    ddof: Literal[0, 1] = 1,
    lone: Lone = "zero",
) -> Advantages:
    """Advantages [n]: rewards shaped by the tree, r + γ (r - baseline), standardised over the nodes of the tree.

    MARS², MARTI's multi-agent tree search; the baseline is `tree_baseline`'s.

    Args:
        gamma: weight of what a node has over its baseline.
    """
    siblings, baseline = tree_baseline(turns, lam)
    shaped = replace(turns, scores=siblings.own + gamma * (siblings.own - baseline))
    tree = _NODES.statistics(shaped, ddof)
    values = (tree.own - tree.mean) / (tree.scale + eps)
    return Advantages(_singletons(tree, values, lone), {"tree": tree})


def _singletons(b: GroupStatistics, advantages: Tensor, lone: Lone) -> Tensor:
    """The advantages [n], but for votes without peers."""
    return torch.where(b.size > 1, advantages, b.own if lone == "raw" else torch.zeros_like(b.own))


Across = Literal["turn", "agent"]
Whitened = Literal["batch", "policy", "agent"]


def whiten(values: Tensor, group: Tensor, eps: float = 1e-8) -> Tensor:
    """Whitening [T]: (x - mean) / sqrt(var + ε) over the tokens of each `group` [T]; var divides by (tokens - 1)."""
    count = group.bincount()
    centred = values - average(values, group, len(count))[group]
    variance = total(centred**2, group, len(count)) / (count - 1).clamp(min=1)
    return centred * (variance + eps).rsqrt()[group]


def _whitened(turns: Turns, values: Tensor, over: Whitened) -> Tensor:
    return whiten(values, turns.by_token(turns.key(*(() if over == "batch" else (over,)))))


def reinforce_pp(turns: Turns, *, gamma: Share = 1.0, whitened: Whitened = "policy") -> Advantages:
    """Advantages [T]: each token's return to go in its turn, whitened   REINFORCE++, arXiv 2501.03262."""
    returns = reverse_scan(turns.token_rewards(), gamma, turns.lengths)
    return Advantages(_whitened(turns, returns, whitened))


def reinforce_pp_baseline(
    turns: Turns, *, peers: Peers = "task", vote: Vote = "trajectory", whitened: Whitened = "policy"
) -> Advantages:
    """Advantages [T]: the turn's own score less its peers' mean, whitened   REINFORCE++-baseline, arXiv 2501.03262.

    Args:
        peers: turns that share a mean, as of `grpo`.
        vote: what counts once in it; a trajectory in Dr. MAS's and MARTI's code, so that long ones do not set it.
    """
    b = grouping(peers, vote).statistics(turns)
    return Advantages(
        _whitened(turns, turns.by_token(turns.scores - b.mean), whitened), {"peers": b}
    )


def gae(
    turns: Turns,
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    across: Across = "turn",
    whitened: Whitened = "policy",
) -> Advantages:
    """Advantages [T] against a critic, whitened: A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V_{t+1} - V_t.

    GAE, arXiv 1506.02438; for teams as UnityMAS-O uses it. What follows a node of a tree is no single line,
    and never a sibling, so there turns are joined within a node only.

    Args:
        across: an episode is each "turn" (UnityMAS-O), or the turns of one "agent" in a trajectory, in their order; in
            a tree, those in one node.
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
        owner = turns.by_token(turns.key("trajectory", "agent", "node"))
        place = owner * (int(turns.keys["turn"].max()) + 1)
        order = torch.argsort(place + turns.by_token(turns.keys["turn"]), stable=True)
        lengths = owner.bincount()
    rewards, values = rewards[order], values[order]
    after = values.roll(-1)
    after[lengths.cumsum(0) - 1] = 0.0  # an episode is worth nothing beyond its end
    advantages = reverse_scan(rewards + gamma * after - values, gamma * lam, lengths)
    back = order.argsort()
    return advantages[back], (advantages + values)[back]


Estimator = Callable[..., Advantages]  # of (Turns, **options)
ESTIMATORS: dict[str, Estimator] = {
    "grpo": _row("GRPO: DeepSeekMath, arXiv 2402.03300", peers="task", vote="trajectory"),
    "dr_grpo": _row("Dr. GRPO, arXiv 2503.20783", peers="task", vote="trajectory", std="none"),
    "drmas": _row(
        "Dr. MAS, arXiv 2602.08847, eq. 5; Table 3 by peers, vote and std",
        peers="agent",
        vote="turn",
    ),
    "at_grpo": _row("AT-GRPO: Stronger-MAS, arXiv 2510.11062", peers="state", vote="turn"),
    "gigpo": gigpo,
    "rloo": _row(
        "RLOO, arXiv 2402.14740", peers="task", vote="trajectory", baseline="others", std="none"
    ),
    "grpo_passk": _row(
        "arXiv 2503.19595, as verl has it", peers="task", vote="trajectory", baseline="second"
    ),
    # each call of a sub-agent is a sample of its own in the released code (AQ-MedAI/MrlX); with advantage.align
    "m_grpo": _row("M-GRPO, arXiv 2511.13288", peers="agent", vote="turn"),
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "mcts": mcts,
    "mars2": mars2,
    "gae": gae,
}
# what must be known of turns before an estimator can run, beyond rewards: a column of `Turns`
NEEDS = {"gae": "values", "remax": "greedy", "gigpo": "steps"}
# who looks at its own agents' turns only, as others' may lack what it needs
ALONE = frozenset({"gae", "remax"})
# whose advantages are [T]
BY_TOKEN = frozenset({"reinforce_pp", "reinforce_pp_baseline", "gae"})
_OF_TREES = {"mcts": _SIBLINGS, "mars2": _NODES}


def compared(name: str, options: Mapping[str, Any]) -> Grouping | None:
    """Whom estimator `name` compares, and what it needs differences in; None where nobody is, or it is not ours."""
    if name not in ESTIMATORS or name in _OF_TREES:
        return _OF_TREES.get(name)
    defaults = {
        option.name: option.default
        for option in inspect.signature(ESTIMATORS[name]).parameters.values()
    }
    chosen = {**defaults, **options}
    return grouping(chosen["peers"], chosen["vote"]) if "peers" in chosen else None
