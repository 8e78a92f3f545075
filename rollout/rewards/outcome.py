"""Outcome rewards: a trajectory's outcome shared, discounted by place, in fixed shares, or by majority vote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from mcore_mas.rollout.base.options import Share
from mcore_mas.rollout.records.trajectory import Group, Status, Trajectory
from mcore_mas.rollout.rewards.allocation import RewardError, allocate, locate, outcome, rounds, unbranched


def shared_outcome(group: Group) -> Group:
    """The group with each trajectory's outcome on all of its turns.

    Raises:
        RewardError: a completed trajectory has no outcome, or is a tree.
    """
    # r_i = R   Dr.MAS (arXiv 2602.08847), EpisodeRewardManager
    return allocate(group, lambda trajectory: [outcome(trajectory)] * len(trajectory.turns))


Mode = Literal["hop_weighted", "hop_discount", "turn_weighted", "discount", "binary", "normalized", "shaped"]


def discounts(
    group: Group,
    *,
    mode: Mode,
    gamma: Share = 0.99,
    max_hops: PositiveInt = 10,
    max_turns: PositiveInt = 8,
    threshold: float = 0.5,
) -> Group:
    """The group with each trajectory's outcome R on its turns, changed by `mode`.

    A hop is a call of any agent, a turn one round of the team; both count from 0, so with n the turn's hop or round and
    N `max_hops` or `max_turns`:

    `hop_weighted`, `turn_weighted`: R min(1, (n + 1) / N). `hop_discount`, `discount`: R gamma^max(0, N - n).
    `binary`: 1 if R is above `threshold`, else 0. `normalized`: R clipped to [-1, 1].
    `shaped`: as `turn_weighted`, then clipped to [-1, 1].

    The released code lets rounds beyond `max_turns` weigh more than 1; here they weigh 1, as hops do there.

    Args:
        mode: rule that changes the outcome R.
        gamma: discount of `hop_discount` and `discount`.
        max_hops: N of the hop rules.
        max_turns: N of the turn rules.
        threshold: outcome above which `binary` pays 1.

    Raises:
        RewardError: a completed trajectory has no outcome or is a tree.
    """

    def weighted(value: float, n: int, limit: int) -> float:
        return value * min(1.0, (n + 1) / limit)

    def discounted(value: float, n: int, limit: int) -> float:
        return value * gamma ** max(0, limit - n)

    # (R, hop, round) -> r   Stronger-MAS (arXiv 2510.11062), core_algo.calculate_reward
    rules: dict[Mode, Callable[[float, int, int], float]] = {
        "hop_weighted": lambda r, hop, turn: weighted(r, hop, max_hops),
        "hop_discount": lambda r, hop, turn: discounted(r, hop, max_hops),
        "turn_weighted": lambda r, hop, turn: weighted(r, turn, max_turns),
        "discount": lambda r, hop, turn: discounted(r, turn, max_turns),
        "binary": lambda r, hop, turn: float(r > threshold),
        "normalized": lambda r, hop, turn: _clip(r),
        "shaped": lambda r, hop, turn: _clip(weighted(r, turn, max_turns)),
    }

    def rewards(trajectory: Trajectory) -> list[float]:
        team = outcome(trajectory)
        return [rules[mode](team, hop, turn) for hop, turn in enumerate(rounds(trajectory.turns))]

    return allocate(group, rewards)


def _clip(value: float) -> float:
    return min(max(value, -1.0), 1.0)


def shares(
    group: Group,
    *,
    split: Literal["full", "turns", "agents"] = "full",
    weights: Mapping[str, NonNegativeFloat] | None = None,
) -> Group:
    """The group with each turn's share of its trajectory's outcome R.

    Args:
        split: `full`, each turn gets R times its agent's weight; `turns`, R is divided among the turns in proportion
            to their agents' weights; `agents`, R is divided among the agents who spoke, and an agent's part equally
            among its turns. In the last two a trajectory's rewards sum to R.
        weights: by agent, 1 where not given; 0 takes an agent out.

    Raises:
        RewardError: nobody in a trajectory has a share of R, or a completed trajectory has no outcome or is a tree.
    """
    weights = weights or {}

    def rewards(trajectory: Trajectory) -> list[float]:
        calls = Counter(turn.agent for turn in trajectory.turns)
        share = {agent: float(weights.get(agent, 1.0)) for agent in calls}
        if split != "full":
            # w_a / sum_i w_a(i) over turns; w_a / (n_a sum_b w_b) over agents   UnityMAS-O, outcome_share_mode: split
            total = sum(share[agent] * (n if split == "turns" else 1) for agent, n in calls.items())
            if calls and not total:
                raise RewardError(
                    f"{locate(trajectory)}: nobody has a share of the outcome; weights of {list(share)} are 0"
                )
            share = {agent: part / total / (1 if split == "turns" else calls[agent]) for agent, part in share.items()}
        team = outcome(trajectory)
        return [team * share[turn.agent] for turn in trajectory.turns]

    return allocate(group, rewards)


def majority(group: Group) -> Group:
    """The group with 1 on every turn of the trajectories that gave the most frequent answer, 0 on the others.

    Completed trajectories vote, each once, with the final answer as the environment wrote it down. Among answers given
    equally often the one that comes first in the group is taken, as in the released code. An empty answer neither
    votes nor is ever right.

    Raises:
        RewardError: the environment reports no answers, or a trajectory is a tree.
    """
    votes = Counter(_answer(trajectory) for trajectory in group.trajectories if trajectory.status is Status.COMPLETED)
    del votes[""]
    # g = the most frequent answer; r_i = [answer = g]   TTRL (arXiv 2504.16084); MARTI, `ttrl`
    gold = max(votes, key=votes.__getitem__, default=None)  # max keeps the first of equals
    return allocate(group, lambda trajectory: [float(trajectory.answer == gold)] * len(trajectory.turns))


def _answer(trajectory: Trajectory) -> str:
    answer = unbranched(trajectory).answer
    if answer is None:
        raise RewardError(f"{locate(trajectory)}: its environment reports no answer, so there is nothing to vote on")
    return answer
