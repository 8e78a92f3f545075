"""Reward allocation: how all allocators put rewards onto turns, and outcome rewards.

Outcome rewards: a trajectory's outcome shared, discounted by place, in fixed shares, or by majority vote.
"""

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from rollout.base.options import Share
from rollout.records.trajectory import Group, Status, Trajectory, Turn


class RewardError(ValueError):
    """Turns cannot be given rewards: names the trajectory, and the turn when it is one turn's fault."""


def allocate(group: Group, rewards: Callable[[Trajectory], Sequence[float | None]]) -> Group:
    """The group with `rewards(trajectory)`, one per turn, on its completed trajectories; failed ones stay as they are.

    None masks a turn: it has no reward and does not train. A turn that is masked already stays so.

    Raises:
        RewardError: a trajectory is of another task, or a reward is not finite.
    """

    def rewarded(trajectory: Trajectory) -> Trajectory:
        if trajectory.task_id != group.task.id:
            raise RewardError(
                f"{locate(trajectory)}: of task '{trajectory.task_id}' in a group of task '{group.task.id}'; "
                "a group holds trajectories of one task"
            )
        if trajectory.status is not Status.COMPLETED:
            return trajectory
        pairs = zip(trajectory.turns, rewards(trajectory), strict=True)
        return replace(
            trajectory, turns=tuple(_reward(trajectory, turn, reward) for turn, reward in pairs)
        )

    return replace(
        group, trajectories=tuple(rewarded(trajectory) for trajectory in group.trajectories)
    )


def _reward(trajectory: Trajectory, turn: Turn, reward: float | None) -> Turn:
    if turn.masked or reward is None:
        return replace(turn, reward=None, masked=True)
    if not math.isfinite(reward):
        raise RewardError(
            f"{locate(trajectory, turn)}: reward is {reward}; expected a finite number"
        )
    return replace(turn, reward=reward)


def locate(trajectory: Trajectory, turn: Turn | None = None) -> str:
    """Where an error is, as "trajectory 0/t/0, turn 3 (solver)"; in a tree with the turn's node."""
    if turn is None:
        return f"trajectory {trajectory.id}"
    node = f", node {turn.node}" if turn.node else ""
    return f"trajectory {trajectory.id}, turn {turn.index}{node} ({turn.agent})"


def unbranched(trajectory: Trajectory) -> Trajectory:
    """The trajectory itself; RewardError if it is a tree, whose turns off the path led to no outcome."""
    if trajectory.leaf or any(turn.node for turn in trajectory.turns):
        raise RewardError(
            f"{locate(trajectory)}: sampled as a tree, whose turns off the path have no outcome; "
            "reward trees by local_team, coach or tree_shaping"
        )
    return trajectory


def outcome(trajectory: Trajectory) -> float:
    """The outcome that all turns led to; RewardError if there is none, it is not finite, or there is a tree."""
    value = unbranched(trajectory).outcome
    if value is None or not math.isfinite(value):
        raise RewardError(
            f"{locate(trajectory)}: completed with outcome {value}; its environment must give a number"
        )
    return value


def score_of(trajectory: Trajectory, turn: Turn, name: str) -> float:
    """What was measured of `turn` by that name; RewardError if it was not measured, or is not finite."""
    value = turn.scores.get(name)
    if value is None:
        known = ", ".join(turn.scores) or "nothing"
        raise RewardError(f"{locate(trajectory, turn)}: no score '{name}'; measured: {known}")
    if not math.isfinite(value):
        raise RewardError(
            f"{locate(trajectory, turn)}: score '{name}' is {value}; expected a finite number"
        )
    return value


def local_score(trajectory: Trajectory, turn: Turn, name: str) -> float | None:
    """`score`, but None when the environment could not decide it: such a turn is to be masked."""
    if name not in turn.scores and "undecided" in turn.scores:
        return None
    return score_of(trajectory, turn, name)


def rounds(turns: Sequence[Turn]) -> list[int]:
    """Each turn's round: how many turns its agent had before."""
    return [
        sum(earlier.agent == turn.agent for earlier in turns[:i]) for i, turn in enumerate(turns)
    ]


def judge_undecided(groups: Sequence[Group], most: float) -> list[Group]:
    """The groups, with what cannot be decided counted as wrong where it is more than the share `most` of an agent's.

    An agent is judged by its turns with a score `local` or `undecided`, and by the trajectories in which it spoke last.
    Of a wronged agent a turn has the score `local` 0, and a trajectory is completed with outcome 0.
    """
    judged: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for trajectory in (t for group in groups for t in group.trajectories):
        if trajectory.turns and (
            trajectory.status is Status.COMPLETED or "undecided" in trajectory.metrics
        ):
            judged[trajectory.turns[-1].agent] += 1
            unknown[trajectory.turns[-1].agent] += trajectory.status is not Status.COMPLETED
        for turn in trajectory.turns:
            judged[turn.agent] += bool({"local", "undecided"} & turn.scores.keys())
            unknown[turn.agent] += "undecided" in turn.scores
    wrong = {agent for agent, count in unknown.items() if count > most * judged[agent]}
    if not wrong:
        return list(groups)
    return [
        replace(g, trajectories=tuple(_judged(t, wrong) for t in g.trajectories)) for g in groups
    ]


def _judged(trajectory: Trajectory, wrong: Container[str]) -> Trajectory:
    turns = tuple(_graded(turn) if turn.agent in wrong else turn for turn in trajectory.turns)
    if "undecided" not in trajectory.metrics or not turns or turns[-1].agent not in wrong:
        return replace(trajectory, turns=turns)
    turns = tuple(replace(turn, scores={"team": 0.0, **turn.scores}) for turn in turns)
    return replace(
        trajectory, turns=turns, status=Status.COMPLETED, error="", outcome=0.0, answer=""
    )


def _graded(turn: Turn) -> Turn:
    if "undecided" not in turn.scores:
        return turn
    known = {name: value for name, value in turn.scores.items() if name != "undecided"}
    return replace(turn, scores={**known, "local": 0.0})


def shared_outcome(group: Group) -> Group:
    """The group with each trajectory's outcome on all of its turns."""
    # r_i = R   Dr.MAS (arXiv 2602.08847), EpisodeRewardManager
    return allocate(group, lambda trajectory: [outcome(trajectory)] * len(trajectory.turns))


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
    """

    # (R, hop, round) -> r   Stronger-MAS (arXiv 2510.11062), core_algo.calculate_reward
    rules: dict[Mode, Callable[[float, int, int], float]] = {
        "hop_weighted": lambda r, hop, turn: r * min(1.0, (hop + 1) / max_hops),
        "hop_discount": lambda r, hop, turn: r * gamma ** max(0, max_hops - hop),
        "turn_weighted": lambda r, hop, turn: r * min(1.0, (turn + 1) / max_turns),
        "discount": lambda r, hop, turn: r * gamma ** max(0, max_turns - turn),
        "binary": lambda r, hop, turn: float(r > threshold),
        "normalized": lambda r, hop, turn: min(max(r, -1.0), 1.0),
        "shaped": lambda r, hop, turn: min(max(r * min(1.0, (turn + 1) / max_turns), -1.0), 1.0),
    }

    def rewards(trajectory: Trajectory) -> list[float]:
        team = outcome(trajectory)
        return [rules[mode](team, hop, turn) for hop, turn in enumerate(rounds(trajectory.turns))]

    return allocate(group, rewards)


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
            share = {
                agent: part / total / (1 if split == "turns" else calls[agent])
                for agent, part in share.items()
            }
        team = outcome(trajectory)
        return [team * share[turn.agent] for turn in trajectory.turns]

    return allocate(group, rewards)


def majority(group: Group) -> Group:
    """The group with 1 on every turn of the trajectories that gave the most frequent answer, 0 on the others.

    Completed trajectories vote, each once, with the final answer as the environment wrote it down. Among answers given
    equally often the one that comes first in the group is taken, as in the released code. An empty answer neither
    votes nor is ever right.
    """
    votes = Counter(
        _answer(trajectory)
        for trajectory in group.trajectories
        if trajectory.status is Status.COMPLETED
    )
    del votes[""]
    # g = the most frequent answer; r_i = [answer = g]   TTRL (arXiv 2504.16084); MARTI, `ttrl`
    gold = max(votes, key=votes.__getitem__, default=None)  # max keeps the first of equals
    return allocate(
        group, lambda trajectory: [float(trajectory.answer == gold)] * len(trajectory.turns)
    )


def _answer(trajectory: Trajectory) -> str:
    answer = unbranched(trajectory).answer
    if answer is None:
        raise RewardError(
            f"{locate(trajectory)}: its environment reports no answer, so there is nothing to vote on"
        )
    return answer
