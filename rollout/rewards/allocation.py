"""Reward allocation: helpers of all allocators, and allocators that use a trajectory's outcome or answer alone."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from rollout.base.numbers import real_number
from rollout.base.section import Share
from rollout.records.trajectory import REPLAY_OUTCOME, Group, Status, Trajectory, Turn


class RewardError(ValueError):
    """Error in the assignment of rewards; the message names the trajectory and, if known, the turn."""


def allocate(group: Group, rewards: Callable[[Trajectory], Sequence[float | None]]) -> Group:
    """Set the rewards of every completed trajectory of a group; all others are unchanged.

    Args:
        group: trajectories of one task.
        rewards: returns one reward per turn of a trajectory. None masks the turn: it has no reward
            and does not train. Turns that are masked already stay masked.

    Raises:
        RewardError: a trajectory is of another task, or a reward is not a finite number.
    """

    def rewarded(trajectory: Trajectory) -> Trajectory:
        if trajectory.task_id != group.task.id:
            raise RewardError(
                f"{describe_position(trajectory)}: its task is '{trajectory.task_id}', but its group's task is "
                f"'{group.task.id}'; a group holds trajectories of one task"
            )
        if trajectory.status is not Status.COMPLETED:
            return trajectory
        pairs = zip(trajectory.turns, rewards(trajectory), strict=True)
        turns = tuple(_with_reward(trajectory, turn, reward) for turn, reward in pairs)
        return replace(trajectory, turns=turns)

    return replace(
        group, trajectories=tuple(rewarded(trajectory) for trajectory in group.trajectories)
    )


def _with_reward(trajectory: Trajectory, turn: Turn, reward: float | None) -> Turn:
    if turn.masked or reward is None:
        return replace(turn, reward=None, masked=True)
    try:
        number = real_number(reward, "reward")
    except TypeError as error:
        raise RewardError(f"{describe_position(trajectory, turn)}: {error}") from None
    if not math.isfinite(number):
        raise RewardError(
            f"{describe_position(trajectory, turn)}: reward is {number}; expected a finite number"
        )
    return replace(turn, reward=number)


def describe_position(trajectory: Trajectory, turn: Turn | None = None) -> str:
    """Format a trajectory and, if given, a turn for an error message, as "trajectory 0/t/0, turn 3 (solver)"."""
    if turn is None:
        return f"trajectory {trajectory.id}"
    node = f", node {turn.node}" if turn.node else ""
    return f"trajectory {trajectory.id}, turn {turn.index}{node} ({turn.agent})"


def require_no_tree(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory; raise RewardError if it is a tree, whose turns off the path have no outcome."""
    if trajectory.leaf or any(turn.node for turn in trajectory.turns):
        raise RewardError(
            f"{describe_position(trajectory)}: sampled as a tree, whose turns off the path have no outcome; "
            "reward trees by local_team, tree_shaping or coach (with outcome_weight 0)"
        )
    return trajectory


def outcome(trajectory: Trajectory) -> float:
    """Return the outcome of a trajectory.

    Raises:
        RewardError: the trajectory is a tree, or its outcome is missing or not finite.
    """
    value = require_no_tree(trajectory).outcome
    if value is None or not math.isfinite(value):
        raise RewardError(
            f"{describe_position(trajectory)}: completed with outcome {value}; its environment must give a number"
        )
    return value


def score_of(trajectory: Trajectory, turn: Turn, name: str) -> float:
    """Return the score `name` of a turn; raise RewardError if it is missing or not finite."""
    value = turn.scores.get(name)
    if value is None:
        available = ", ".join(turn.scores) or "nothing"
        raise RewardError(
            f"{describe_position(trajectory, turn)}: no score '{name}'; measured: {available}"
        )
    if not math.isfinite(value):
        raise RewardError(
            f"{describe_position(trajectory, turn)}: score '{name}' is {value}; expected a finite number"
        )
    return value


def local_score(trajectory: Trajectory, turn: Turn, name: str) -> float | None:
    """Return the score `name` of a turn, or None if the environment could not decide it and the turn must be masked.

    Raises:
        RewardError: as `score_of`, if the score is not undecided.
    """
    if name not in turn.scores and "undecided" in turn.scores:
        return None
    return score_of(trajectory, turn, name)


def number_turns_by_agent(turns: Sequence[Turn]) -> list[int]:
    """Return for each turn its number among the turns of its agent, from 0."""
    return [
        sum(earlier.agent == turn.agent for earlier in turns[:i]) for i, turn in enumerate(turns)
    ]


def judge_undecided(groups: Sequence[Group], max_share: float) -> list[Group]:
    """Count undecidable answers as wrong for agents that give too many of them.

    An agent is judged by its turns with a score `local` or `undecided`, and by the completed and the
    undecided trajectories in which it spoke last. If more than `max_share` of them are undecided, its
    undecided turns get the score `local` 0, and its undecided trajectories are completed with outcome
    0. The turns of these trajectories that lack the score `team` get `team` 0; in a tree, those that
    lack the score `branch` get the sum of the local scores of their node.

    Args:
        groups: groups of one step.
        max_share: largest share of undecided turns and trajectories, from 0 to 1, that is accepted.
    """
    judged: Counter[str] = Counter()
    undecided: Counter[str] = Counter()
    for trajectory in chain.from_iterable(group.trajectories for group in groups):
        is_undecided = _is_undecided(trajectory)
        if trajectory.turns and (is_undecided or trajectory.status is Status.COMPLETED):
            last_agent = trajectory.turns[-1].agent
            judged[last_agent] += 1
            if is_undecided:
                undecided[last_agent] += 1
        for turn in trajectory.turns:
            if "undecided" in turn.scores:
                undecided[turn.agent] += 1
            if "undecided" in turn.scores or "local" in turn.scores:
                judged[turn.agent] += 1

    agents = {agent for agent, count in undecided.items() if count > max_share * judged[agent]}
    if not agents:
        return list(groups)
    result = []
    for group in groups:
        trajectories = tuple(
            _count_as_wrong(trajectory, agents) for trajectory in group.trajectories
        )
        result.append(replace(group, trajectories=trajectories))
    return result


def _is_undecided(trajectory: Trajectory) -> bool:
    """Return True if a trajectory failed because the environment could not decide its answer.

    The metric `undecided` alone does not say so: trajectories that were completed or failed for
    another reason have it too, if a branch or a replay was dropped because its answer could not be
    decided.
    """
    return trajectory.failure_reason == "undecided"


def _count_as_wrong(trajectory: Trajectory, agents: Container[str]) -> Trajectory:
    """Count undecided turns of these agents as wrong.

    If one of them spoke last, count an undecided outcome as wrong too.
    """
    turns = tuple(
        _with_local_zero(turn) if turn.agent in agents else turn for turn in trajectory.turns
    )
    if not turns or turns[-1].agent not in agents or not _is_undecided(trajectory):
        return replace(trajectory, turns=turns)
    return replace(
        trajectory,
        turns=_with_team_zero(turns),
        status=Status.COMPLETED,
        error="",
        outcome=0.0,
        answer="",
    )


def _with_local_zero(turn: Turn) -> Turn:
    """Replace the score `undecided` of a turn, if it has one, by the score `local` 0."""
    if "undecided" not in turn.scores:
        return turn
    other_scores = {name: value for name, value in turn.scores.items() if name != "undecided"}
    return replace(turn, scores={**other_scores, "local": 0.0})


def _with_team_zero(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Set missing scores that include the team's reward, as if that reward were 0.

    These are `team` and, in a tree, `branch`: the sum of the node's local scores and the team's
    reward. The turns of a tree's last round lack `branch` if all branches of that round failed. So
    does the undecided attempt of `ab_mcts`.
    """
    local_by_node: dict[str, float] = defaultdict(float)  # sums of local scores
    for turn in turns:
        local_by_node[turn.node] += turn.scores.get("local", 0.0)
    result = []
    for turn in turns:
        scores = {"team": 0.0, **turn.scores}
        if turn.node and "branch" not in scores:
            scores["branch"] = local_by_node[turn.node]
        result.append(replace(turn, scores=scores))
    return tuple(result)


def shared_outcome(group: Group) -> Group:
    """Reward every turn with the outcome of its trajectory, and alternatives with the outcome of their replay.

    An alternative is a turn with the score `replay_outcome`. Its reply was sampled in place of one of
    the trajectory's replies, and the trajectory was played again from there, to another outcome.
    """

    # r_i = R. Source: Dr.MAS (arXiv 2602.08847), EpisodeRewardManager.
    def rewards(trajectory: Trajectory) -> list[float]:
        # `outcome` refuses trees, which it recognises by turns with a node. Alternatives have nodes
        # too, but make no tree, so they are left out.
        original_turns = tuple(
            turn for turn in trajectory.turns if REPLAY_OUTCOME not in turn.scores
        )
        team_outcome = outcome(replace(trajectory, turns=original_turns))
        return [turn.scores.get(REPLAY_OUTCOME, team_outcome) for turn in trajectory.turns]

    return allocate(group, rewards)


Mode = Literal[
    "hop_weighted", "hop_discount", "turn_weighted", "discount", "binary", "normalized", "shaped"
]


def discounts(
    group: Group,
    *,
    mode: Mode,
    gamma: Share = 0.99,
    max_hops: PositiveInt = 10,
    max_turns: PositiveInt = 8,
    threshold: float = 0.5,
) -> Group:
    """Reward every turn with the outcome R of its trajectory, changed by `mode`.

    Below, hop_n is the number of all earlier turns of the trajectory, and turn_n that of the earlier
    turns of the same agent.

    - `hop_weighted`: R min(1, (hop_n + 1) / max_hops)
    - `hop_discount`: R gamma^max(0, max_hops - hop_n)
    - `turn_weighted`: R min(1, (turn_n + 1) / max_turns)
    - `discount`: R gamma^max(0, max_turns - turn_n)
    - `binary`: 1 if R is above `threshold`, else 0
    - `normalized`: R clipped to [-1, 1]
    - `shaped`: as `turn_weighted`, then clipped to [-1, 1]

    Turns beyond `max_turns` weigh 1, as hops beyond `max_hops` do. In Stronger-MAS's released code
    such turns weigh more than 1.

    Args:
        mode: rule that changes the outcome R.
        gamma: discount of `hop_discount` and `discount`.
        max_hops: number of turns of all agents, in `hop_weighted` and `hop_discount`.
        max_turns: number of turns of one agent, in `turn_weighted`, `discount` and `shaped`.
        threshold: outcome above which `binary` pays 1.
    """

    # (R, hop_n, turn_n) -> reward of the turn.
    # Source: Stronger-MAS (arXiv 2510.11062), core_algo.calculate_reward.
    reward_by_mode: dict[Mode, Callable[[float, int, int], float]] = {
        "hop_weighted": lambda r, hop_n, turn_n: r * min(1.0, (hop_n + 1) / max_hops),
        "hop_discount": lambda r, hop_n, turn_n: r * gamma ** max(0, max_hops - hop_n),
        "turn_weighted": lambda r, hop_n, turn_n: r * min(1.0, (turn_n + 1) / max_turns),
        "discount": lambda r, hop_n, turn_n: r * gamma ** max(0, max_turns - turn_n),
        "binary": lambda r, hop_n, turn_n: float(r > threshold),
        "normalized": lambda r, hop_n, turn_n: min(max(r, -1.0), 1.0),
        "shaped": lambda r, hop_n, turn_n: min(
            max(r * min(1.0, (turn_n + 1) / max_turns), -1.0), 1.0
        ),
    }

    def rewards(trajectory: Trajectory) -> list[float]:
        team_outcome = outcome(trajectory)
        turn_numbers = number_turns_by_agent(trajectory.turns)
        return [
            reward_by_mode[mode](team_outcome, hop_n, turn_n)
            for hop_n, turn_n in enumerate(turn_numbers)
        ]

    return allocate(group, rewards)


def shares(
    group: Group,
    *,
    split: Literal["full", "turns", "agents"] = "full",
    weights: Mapping[str, NonNegativeFloat] | None = None,
) -> Group:
    """Reward every turn with a share of the outcome R of its trajectory.

    Args:
        split: `full`: each turn gets R times the weight of its agent. `turns`: R is divided among
            the turns in proportion to the weights of their agents. `agents`: R is divided among the
            agents that spoke, and the part of an agent equally among its turns. With `turns` and
            `agents`, the parts of all turns of a trajectory sum to R; a masked turn has a part too,
            which nobody gets.
        weights: weight of each agent, 1 by default; an agent with weight 0 gets no share.

    Raises:
        RewardError: with `turns` or `agents`, all weights in a trajectory are 0; or a completed
            trajectory has no outcome or is a tree.
    """
    weights = weights or {}

    def turn_share_by_agent(trajectory: Trajectory) -> dict[str, float]:
        """Return the share of the outcome that each single turn of an agent gets, by agent."""
        turn_counts = Counter(turn.agent for turn in trajectory.turns)
        agent_weights = {agent: float(weights.get(agent, 1.0)) for agent in turn_counts}
        if split == "full":
            return agent_weights
        if turn_counts and not any(agent_weights.values()):
            raise RewardError(
                f"{describe_position(trajectory)}: no agent has a share of the outcome, because the weights of "
                f"{list(agent_weights)} are 0"
            )
        # Source: UnityMAS-O, outcome_share_mode: split.
        if split == "turns":
            # w_a / sum_i w_a(i), over the turns i, where a(i) is the agent of turn i
            total = sum(agent_weights[agent] * count for agent, count in turn_counts.items())
            return {agent: weight / total for agent, weight in agent_weights.items()}
        # w_a / sum_b w_b / n_a, over the agents b that spoke, where n_a is the number of turns of a
        total = sum(agent_weights.values())
        return {
            agent: weight / total / turn_counts[agent] for agent, weight in agent_weights.items()
        }

    def rewards(trajectory: Trajectory) -> list[float]:
        turn_shares = turn_share_by_agent(trajectory)
        team_outcome = outcome(trajectory)
        return [team_outcome * turn_shares[turn.agent] for turn in trajectory.turns]

    return allocate(group, rewards)


def majority(group: Group) -> Group:
    """Reward every turn with 1 if its trajectory gave the most frequent answer of the group, else with 0.

    Each completed trajectory votes once, with its final answer as normalised by the environment. Of
    equally frequent answers the first one in the group wins, as in TTRL's released code. An empty
    answer neither votes nor wins.

    Raises:
        RewardError: a completed trajectory has no answer (None), or is a tree.
    """
    votes = Counter(
        _answer(trajectory)
        for trajectory in group.trajectories
        if trajectory.status is Status.COMPLETED
    )
    del votes[""]  # no error without empty answers: a Counter ignores a missing key
    # r_i = 1 if the answer is the most frequent one, else 0. Source: TTRL (arXiv 2504.16084); MARTI, `ttrl`.
    most_frequent = max(votes, key=votes.__getitem__, default=None)  # max keeps the first of equals
    return allocate(
        group,
        lambda trajectory: [float(trajectory.answer == most_frequent)] * len(trajectory.turns),
    )


def _answer(trajectory: Trajectory) -> str:
    """Return the final answer of a trajectory; raise RewardError if it has none or is a tree."""
    answer = require_no_tree(trajectory).answer
    if answer is None:
        raise RewardError(
            f"{describe_position(trajectory)}: its environment reports no answer, so it cannot vote"
        )
    return answer
