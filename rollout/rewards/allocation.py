"""Reward allocation: how all allocators put rewards onto turns, and the one-line errors when they cannot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from mcore_mas.rollout.records.trajectory import Group, Status, Trajectory, Turn


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
        return replace(trajectory, turns=tuple(_reward(trajectory, turn, reward) for turn, reward in pairs))

    return replace(group, trajectories=tuple(rewarded(trajectory) for trajectory in group.trajectories))


def _reward(trajectory: Trajectory, turn: Turn, reward: float | None) -> Turn:
    if turn.masked or reward is None:
        return replace(turn, reward=None, masked=True)
    if not math.isfinite(reward):
        raise RewardError(f"{locate(trajectory, turn)}: reward is {reward}; expected a finite number")
    return replace(turn, reward=reward)


def locate(trajectory: Trajectory, turn: Turn | None = None) -> str:
    """Where an error is, as "trajectory 0/t/0, turn 3 (solver)"; in a tree with the turn's node."""
    if turn is None:
        return f"trajectory {trajectory.id}"
    node = f", node {turn.node}" if turn.node else ""
    return f"trajectory {trajectory.id}, turn {turn.index}{node} ({turn.agent})"


def unbranched(trajectory: Trajectory) -> Trajectory:
    """The trajectory itself, if it was not sampled as a tree.

    Raises:
        RewardError: it was; turns off its path led to no outcome.
    """
    if trajectory.leaf or any(turn.node for turn in trajectory.turns):
        raise RewardError(
            f"{locate(trajectory)}: sampled as a tree, whose turns off the path have no outcome; "
            "reward trees by local_team, coach or tree_shaping"
        )
    return trajectory


def outcome(trajectory: Trajectory) -> float:
    """The outcome that all turns of `trajectory` led to.

    Raises:
        RewardError: there is none, it is not finite, or the trajectory is a tree.
    """
    value = unbranched(trajectory).outcome
    if value is None or not math.isfinite(value):
        raise RewardError(f"{locate(trajectory)}: completed with outcome {value}; its environment must give a number")
    return value


def score_of(trajectory: Trajectory, turn: Turn, name: str) -> float:
    """What was measured of `turn` by that name.

    Raises:
        RewardError: it was not measured, or is not finite.
    """
    value = turn.scores.get(name)
    if value is None:
        known = ", ".join(turn.scores) or "nothing"
        raise RewardError(f"{locate(trajectory, turn)}: no score '{name}'; measured: {known}")
    if not math.isfinite(value):
        raise RewardError(f"{locate(trajectory, turn)}: score '{name}' is {value}; expected a finite number")
    return value


def local_score(trajectory: Trajectory, turn: Turn, name: str) -> float | None:
    """`score`, but None when the environment could not decide it: such a turn is to be masked.

    Raises:
        RewardError: see `score`.
    """
    if name not in turn.scores and "undecided" in turn.scores:
        return None
    return score_of(trajectory, turn, name)


def rounds(turns: Sequence[Turn]) -> list[int]:
    """Each turn's round: how many turns its agent had before."""
    return [sum(earlier.agent == turn.agent for earlier in turns[:i]) for i, turn in enumerate(turns)]


def judge_undecided(groups: Sequence[Group], most: float) -> list[Group]:
    """The groups, with what cannot be decided counted as wrong where it is more than the share `most` of an agent's.

    An agent is judged by its turns with a score `local` or `undecided`, and by the trajectories in which it spoke last.
    Of a wronged agent a turn has the score `local` 0, and a trajectory is completed with outcome 0.
    """
    judged: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for trajectory in (t for group in groups for t in group.trajectories):
        if trajectory.turns and (trajectory.status is Status.COMPLETED or "undecided" in trajectory.metrics):
            judged[trajectory.turns[-1].agent] += 1
            unknown[trajectory.turns[-1].agent] += trajectory.status is not Status.COMPLETED
        for turn in trajectory.turns:
            judged[turn.agent] += bool({"local", "undecided"} & turn.scores.keys())
            unknown[turn.agent] += "undecided" in turn.scores
    wrong = {agent for agent, count in unknown.items() if count > most * judged[agent]}
    if not wrong:
        return list(groups)
    return [replace(g, trajectories=tuple(_judged(t, wrong) for t in g.trajectories)) for g in groups]


def _judged(trajectory: Trajectory, wrong: Container[str]) -> Trajectory:
    turns = tuple(_graded(turn) if turn.agent in wrong else turn for turn in trajectory.turns)
    if "undecided" not in trajectory.metrics or not turns or turns[-1].agent not in wrong:
        return replace(trajectory, turns=turns)
    turns = tuple(replace(turn, scores={"team": 0.0, **turn.scores}) for turn in turns)
    return replace(trajectory, turns=turns, status=Status.COMPLETED, error="", outcome=0.0, answer="")


def _graded(turn: Turn) -> Turn:
    if "undecided" not in turn.scores:
        return turn
    known = {name: value for name, value in turn.scores.items() if name != "undecided"}
    return replace(turn, scores={**known, "local": 0.0})
