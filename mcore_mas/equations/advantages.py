"""Advantage estimators: group-relative (GRPO and relatives), tree-based, token-level, and with a critic.

`ESTIMATORS` is the table of all estimators. Each one maps `Turns` and keyword options to
`Advantages`: values in float64, [n] by turn or [T] by token, and the groups that were compared. A
group-relative estimator is defined by its peers (the turns that are compared), its vote (the unit
that counts once), its baseline and its divisor (std).

Options:
    gamma: discount γ, by token; `mars2` and `gigpo` explain theirs.
    lam: λ of GAE; in trees, the weight of the siblings in the baseline, where the parent has the
        weight 1 - λ.
    eps: added to σ, in reward units.
    ddof: σ divides by (votes - ddof).
    lone: advantage of a vote without peers: "zero", or "raw", its score, as in Dr. MAS's released
        code.
    whitened: tokens that are whitened together: the whole "batch", those of a "policy", or of an
        "agent" (MARTI).
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
    grouping,
    mean_by_group,
    reverse_scan,
    sum_by_group,
)
from rollout.base.section import Share

Lone = Literal["zero", "raw"]  # advantage of a vote without peers
Baseline = Literal["mean", "others", "second"]
Spread = Literal["peers", "team", "agent", "none"]  # group whose σ divides; "none": no division


def _lead_over_second(statistics: GroupStatistics) -> Tensor:
    """Return r_max - r_second for the best vote of each group and 0 for all others, [n]."""
    order = torch.argsort(statistics.vote_scores, descending=True, stable=True)
    # Sort by group; within a group the best vote stays first.
    order = order[torch.argsort(statistics.vote_group[order], stable=True)]
    scores = statistics.vote_scores[order]
    group = statistics.vote_group[order]
    is_best = group.diff(prepend=group[:1] - 1) != 0
    has_next = group.diff(append=group[-1:] + 1) == 0
    advantage = torch.empty_like(scores)
    advantage[order] = torch.where(is_best & has_next, scores - scores.roll(-1), 0.0)
    return advantage[statistics.vote_index]


_BASELINES: dict[Baseline, Callable[[GroupStatistics], Tensor]] = {
    "mean": lambda stats: stats.score - stats.mean,
    # r - mean of the other votes = (r - μ) n / (n - 1)
    "others": lambda stats: (stats.score - stats.mean) * stats.size / (stats.size - 1).clamp(min=1),
    "second": _lead_over_second,
}
_STD_GROUPINGS = {"team": grouping("task", "trajectory"), "agent": grouping("agent", "turn")}


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
    """Compute group-relative advantages [n]: A = (r - baseline) / (σ + ε).

    r is the score of the turn's vote; σ is 1 where the votes of a group do not differ.

    Args:
        peers: turns that are compared: those of the same "task"; of the same "agent" on it; or of
            the same agent on it in the same "state", with the same turn index.
        vote: unit that counts once, with the mean of its turns among these peers: a "trajectory" or
            each "turn".
        baseline: "mean" μ; the mean of the "others"; or "second": the best vote gets its lead, all
            others 0.
        std: source of σ: the "peers", the "team"'s trajectories on the task, the "agent"'s turns on
            it, or "none".
    """
    statistics = grouping(peers, vote).statistics(turns, ddof)
    advantages = _BASELINES[baseline](statistics)
    groups = {"peers": statistics}
    if std != "none":
        std_grouping = _STD_GROUPINGS.get(std, statistics.grouping)
        if std_grouping == statistics.grouping:
            std_statistics = statistics
        else:
            std_statistics = std_grouping.statistics(turns, ddof)
            groups = {"mean": statistics, "std": std_statistics}
        advantages = advantages / (std_statistics.scale + eps)
    return Advantages(_replace_lone_votes(statistics, advantages, lone), groups)


def _relative_with(source: str, **defaults: str) -> partial[Advantages]:
    """Return the estimator `relative` with other defaults, and a docstring that names its source."""
    estimator = partial(relative, **defaults)  # type: ignore[arg-type]
    estimator.__doc__ = f"Compute advantages [n] relative to a group. Source: {source}.\n\n{inspect.getdoc(relative)}"
    return estimator


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCredit:
    """Settings of GiGPO's step-level advantages A_S, among turns that start from the same state of a task.

    Args:
        weight: ω, the weight of A_S.
        gamma: discount γ, by environment step.
        similarity: below 1, turns whose prompts have a difflib ratio of at least this, over token ids,
            count as turns from the same state, whatever state the environment names; at 1, the
            environment's state decides, or else the prompt.
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
    """Compute advantages [n] of the episode, plus ω times those among turns from the same state of the task.

    A = A_E(τ) + ω A_S(s, a). A_S compares the discounted returns R_t = Σ_{k≥t} γ^{k-t} r_k of turns,
    from the turn's round on; each turn is a vote.

    Source: GiGPO, arXiv 2505.10978.

    Args:
        peers: turns that are compared: those of a "task", or of an "agent" on it.
        vote: option `vote` of `grpo`, for A_E.
        std: "peers": both parts are divided by their σ (mean_std_norm); "none": they are only
            centred (mean_norm).
        step: settings of A_S.
        lone: advantage of an episode without peers: "zero", or "raw", its score; a step without
            peers gets 0.
    """
    episode = relative(turns, peers=peers, vote=vote, std=std, eps=eps, ddof=ddof, lone=lone)
    by_turn = grouping(peers, "turn")
    same_state = Grouping(
        peer_columns=(*by_turn.peer_columns, "state"), vote_columns=by_turn.vote_columns
    )
    step_statistics = same_state.statistics(_turns_with_returns(turns, step), ddof)
    step_advantages = step_statistics.score - step_statistics.mean
    if std == "peers":
        step_advantages = step_advantages / (step_statistics.scale + eps)
    step_advantages = _replace_lone_votes(step_statistics, step_advantages, "zero")

    values = episode.values + step.weight * step_advantages
    return Advantages(values, {"episode": episode.groups["peers"], "step": step_statistics})


def _turns_with_returns(turns: Turns, step: StepCredit) -> Turns:
    """Replace the rewards of the turns by their discounted returns, and merge similar states."""
    state = turns.keys["state"]
    if step.similarity < 1.0:
        if turns.cluster_states is None:
            raise ValueError(
                "gigpo: step.similarity below 1 needs the prompts of the turns, which are missing"
            )
        state = turns.cluster_states(step.similarity)
    return replace(
        turns, rewards=discounted_returns(turns, step.gamma), keys={**turns.keys, "state": state}
    )


def discounted_returns(turns: Turns, gamma: float) -> Tensor:
    """Compute the discounted return of each turn over the environment's steps, [n].

    R_t = r_t + γ R_{t+1} = Σ_{k≥t} γ^{k-t} r_k, over the rounds k of the trajectory from the turn's
    round on.

    Raises:
        ValueError: the turns have no rewards of environment steps.
    """
    if turns.step_rewards is None:
        raise ValueError("discounted returns need the rewards of environment steps; none are given")
    returns = torch.zeros_like(turns.rewards)
    # Column 0 of `step_rewards` is the reward of the turn's own round.
    for rewards in reversed(turns.step_rewards.unbind(1)):
        returns = rewards + gamma * returns
    return returns


def remax(turns: Turns) -> Advantages:
    """Compute advantages [n]: A = r - mean r of the same agent's turns in the task's greedy trajectory.

    Source: ReMax, arXiv 2310.10505.

    Raises:
        ValueError: the turns have no greedy rewards.
    """
    if turns.greedy_rewards is None:
        raise ValueError(
            "remax needs the rewards of a greedy trajectory of every task; none are given"
        )
    return Advantages(turns.rewards - turns.greedy_rewards)


_DECISION = Grouping(
    peer_columns=("trajectory", "turn"), vote_columns=("trajectory", "node", "turn")
)


def c3(turns: Turns) -> Advantages:
    """Compute advantages [n]: A = r - mean r of the other replies of the same agent to the same prompt.

    The other replies of a turn are its alternatives (`trainer.replays`), and the reply that the
    trajectory continued with. The reward of each is the outcome of the trajectory with this reply.
    The advantage of a turn without alternatives is 0.

    Source: C3, arXiv 2603.06859.
    """
    statistics = _DECISION.statistics(turns)
    values = _BASELINES["others"](statistics)
    return Advantages(_replace_lone_votes(statistics, values, "zero"), {"replies": statistics})


_SIBLINGS = Grouping(peer_columns=("trajectory", "parent"), vote_columns=("trajectory", "node"))
_NODES = Grouping(peer_columns=("trajectory",), vote_columns=("trajectory", "node"))


def tree_baseline(turns: Turns, lam: float) -> tuple[GroupStatistics, Tensor]:
    """Compute the baseline of each turn in a tree: (1-λ)·parent + λ·mean of the other siblings.

    The score of a node is the mean over its turns. Without a parent only the siblings count,
    without siblings only the parent. With neither, the baseline is the node's own score.

    Source: MARTI, MARS².

    Returns:
        Statistics of the siblings, and the baseline [n].
    """
    statistics = _SIBLINGS.statistics(turns)
    node = turns.keys["node"]
    parent = turns.keys["parent"]
    nodes = int(torch.maximum(node, parent).max()) + 1
    # Index -1 is the slot of the root's parent; it stays NaN.
    node_scores = torch.full((nodes + 1,), torch.nan, dtype=torch.float64)
    node_scores[node] = statistics.score
    parent_score = node_scores[parent]

    # The mean of the others is μ - (r - μ) / (n - 1). Written like this, equal scores stay exactly
    # equal.
    deviation = (statistics.score - statistics.mean) / (statistics.size - 1).clamp(min=1)
    siblings_mean = torch.where(statistics.size > 1, statistics.mean - deviation, torch.nan)
    both = (1 - lam) * parent_score + lam * siblings_mean
    either = torch.where(parent_score.isnan(), siblings_mean, parent_score)
    baseline = torch.where(both.isnan(), either, both)
    return statistics, torch.where(baseline.isnan(), statistics.score, baseline)


def mcts(turns: Turns, *, lam: Share = 0.5) -> Advantages:
    """Compute advantages [n] of tree nodes: A = r - baseline, with MARTI's `tree_baseline`."""
    siblings, baseline = tree_baseline(turns, lam)
    return Advantages(siblings.score - baseline, {"siblings": siblings})


def mars2(
    turns: Turns,
    *,
    gamma: NonNegativeFloat = 0.3,
    lam: Share = 0.5,
    eps: NonNegativeFloat = 1e-6,
    ddof: Literal[0, 1] = 1,
    lone: Lone = "zero",
) -> Advantages:
    """Compute advantages [n] from rewards shaped by the tree, r + γ (r - baseline), standardised over its nodes.

    Source: MARS², MARTI's multi-agent tree search, with the baseline of `tree_baseline`.

    Args:
        gamma: weight of the difference between a node's score and its baseline.
    """
    siblings, baseline = tree_baseline(turns, lam)
    shaped = replace(turns, rewards=siblings.score + gamma * (siblings.score - baseline))
    tree = _NODES.statistics(shaped, ddof)
    values = (tree.score - tree.mean) / (tree.scale + eps)
    return Advantages(_replace_lone_votes(tree, values, lone), {"tree": tree})


def _replace_lone_votes(statistics: GroupStatistics, advantages: Tensor, lone: Lone) -> Tensor:
    """Replace the advantages [n] of votes without peers by 0 or by their score."""
    replacement = statistics.score if lone == "raw" else torch.zeros_like(statistics.score)
    return torch.where(statistics.size > 1, advantages, replacement)


Across = Literal["turn", "agent"]
Whitened = Literal["batch", "policy", "agent"]


def whiten(values: Tensor, group: Tensor, eps: float = 1e-8) -> Tensor:
    """Whiten values [T] within each `group` [T] of tokens: (x - mean) / sqrt(var + ε).

    The variance divides by (tokens - 1).
    """
    count = group.bincount()
    centred = values - mean_by_group(values, group, len(count))[group]
    variance = sum_by_group(centred**2, group, len(count)) / (count - 1).clamp(min=1)
    return centred * (variance + eps).rsqrt()[group]


def _whitened(turns: Turns, values: Tensor, over: Whitened) -> Tensor:
    columns = () if over == "batch" else (over,)  # without columns, all turns have the same id
    return whiten(values, turns.by_token(turns.joint_ids(*columns)))


def reinforce_pp(turns: Turns, *, gamma: Share = 1.0, whitened: Whitened = "policy") -> Advantages:
    """Compute advantages [T]: the return to go of each token in its turn, whitened.

    Source: REINFORCE++, arXiv 2501.03262.
    """
    returns = reverse_scan(turns.token_rewards(), gamma, turns.lengths)
    return Advantages(_whitened(turns, returns, whitened))


def reinforce_pp_baseline(
    turns: Turns, *, peers: Peers = "task", vote: Vote = "trajectory", whitened: Whitened = "policy"
) -> Advantages:
    """Compute advantages [T]: the turn's reward minus its peers' mean, whitened.

    Source: REINFORCE++-baseline, arXiv 2501.03262.

    Args:
        peers: turns that share a mean, as in `grpo`.
        vote: unit that counts once in the mean. Dr. MAS's and MARTI's code uses trajectories, so
            that long ones do not dominate it.
    """
    statistics = grouping(peers, vote).statistics(turns)
    advantages = turns.by_token(turns.rewards - statistics.mean)
    return Advantages(_whitened(turns, advantages, whitened), {"peers": statistics})


def gae(
    turns: Turns,
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    across: Across = "turn",
    whitened: Whitened = "policy",
) -> Advantages:
    """Compute advantages [T] against a critic, whitened: A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V_{t+1} - V_t.

    In a tree several branches follow a node, so turns are joined to an episode within a node only.

    Source: GAE, arXiv 1506.02438; for teams, UnityMAS-O.

    Args:
        across: an episode is each "turn" (UnityMAS-O), or the turns of one "agent" in a trajectory,
            in their order; in a tree, those in one node.
    """
    advantages, returns = advantages_and_returns(turns, gamma=gamma, lam=lam, across=across)
    return Advantages(_whitened(turns, advantages, whitened), returns=returns)


def advantages_and_returns(
    turns: Turns, *, gamma: float = 1.0, lam: float = 1.0, across: Across = "turn"
) -> tuple[Tensor, Tensor]:
    """Compute GAE before whitening, and the targets of the critic.

    Args:
        turns: turns with the values of a critic.
        gamma, lam, across: options of `gae`.

    Returns:
        A_t [T], and the targets A_t + V_t [T].

    Raises:
        ValueError: the turns have no values.
    """
    if turns.values is None:
        raise ValueError("gae needs the values of a critic; none are given")
    order = torch.arange(len(turns.values))
    lengths = turns.lengths
    if across == "agent":
        # Put the tokens of an agent's turns in a trajectory one after the other.
        episode = turns.by_token(turns.joint_ids("trajectory", "agent", "node"))
        turn = turns.by_token(turns.keys["turn"])
        order = torch.argsort(episode * (int(turns.keys["turn"].max()) + 1) + turn, stable=True)
        lengths = episode.bincount()

    rewards = turns.token_rewards()[order]
    values = turns.values[order]
    next_values = values.roll(-1)
    next_values[lengths.cumsum(0) - 1] = 0.0  # V is 0 after the last token of an episode
    deltas = rewards + gamma * next_values - values
    advantages = reverse_scan(deltas, gamma * lam, lengths)

    original_order = order.argsort()
    return advantages[original_order], (advantages + values)[original_order]


Estimator = Callable[..., Advantages]  # (Turns, **options)
ESTIMATORS: dict[str, Estimator] = {
    "grpo": _relative_with("GRPO: DeepSeekMath, arXiv 2402.03300", peers="task", vote="trajectory"),
    "dr_grpo": _relative_with(
        "Dr. GRPO, arXiv 2503.20783", peers="task", vote="trajectory", std="none"
    ),
    "drmas": _relative_with(
        "Dr. MAS, arXiv 2602.08847, eq. 5; Table 3 by peers, vote and std",
        peers="agent",
        vote="turn",
    ),
    "at_grpo": _relative_with(
        "AT-GRPO: Stronger-MAS, arXiv 2510.11062", peers="state", vote="turn"
    ),
    "gigpo": gigpo,
    "rloo": _relative_with(
        "RLOO, arXiv 2402.14740", peers="task", vote="trajectory", baseline="others", std="none"
    ),
    "grpo_passk": _relative_with(
        "arXiv 2503.19595, as verl has it", peers="task", vote="trajectory", baseline="second"
    ),
    # In the released code (AQ-MedAI/MrlX) each call of a sub-agent is a sample; use it with
    # advantage.align.
    "m_grpo": _relative_with("M-GRPO, arXiv 2511.13288", peers="agent", vote="turn"),
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "c3": c3,
    "mcts": mcts,
    "mars2": mars2,
    "gae": gae,
}
# Optional column of `Turns` that an estimator requires, by name of the estimator.
REQUIRED_COLUMN: dict[str, Literal["values", "greedy_rewards", "step_rewards"]] = {
    "gae": "values",
    "remax": "greedy_rewards",
    "gigpo": "step_rewards",
}
# Estimators that are given only the turns of their own agents, because other turns may lack the
# required column.
AGENT_LOCAL_ESTIMATORS = frozenset({"gae", "remax"})
# Estimators that compare a turn with its alternatives; all others are not given the alternatives.
REPLAY_ESTIMATORS = frozenset({"c3"})
# Estimators whose advantages have shape [T].
TOKEN_LEVEL_ESTIMATORS = frozenset({"reinforce_pp", "reinforce_pp_baseline", "gae"})
_TREE_GROUPINGS = {"mcts": _SIBLINGS, "mars2": _NODES}


def estimator_grouping(name: str, options: Mapping[str, Any]) -> Grouping | None:
    """Return the grouping by which an estimator compares turns.

    Args:
        name: name of the estimator.
        options: options that differ from the estimator's defaults.

    Returns:
        None if the estimator compares no turns or is not in `ESTIMATORS`. Also None for `c3`, whose
        peers are not other trajectories, but the alternatives that `trainer.replays` samples.
    """
    if name in _TREE_GROUPINGS:
        return _TREE_GROUPINGS[name]
    if name not in ESTIMATORS:
        return None
    parameters = inspect.signature(ESTIMATORS[name]).parameters.values()
    settings = {parameter.name: parameter.default for parameter in parameters} | dict(options)
    if "peers" not in settings:
        return None
    return grouping(settings["peers"], settings["vote"])
