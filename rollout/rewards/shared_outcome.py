"""Dr.MAS's allocation: every turn gets the team's outcome, less a penalty when its reply was malformed."""

from __future__ import annotations

from dataclasses import replace

from rollout.records import Group, Status, Trajectory


def shared_outcome(group: Group, *, invalid_penalty: float = 0.0) -> Group:
    """The same group with a reward on every turn of its completed trajectories; failed ones stay as they are.

    Raises:
        ValueError: a completed trajectory has no outcome.
    """

    def allocate(trajectory: Trajectory) -> Trajectory:
        if trajectory.status is not Status.COMPLETED:
            return trajectory
        if trajectory.outcome is None:
            raise ValueError(f"trajectory {trajectory.id} is completed without an outcome: its environment gave none")
        # r = R - penalty * [malformed]   Dr.MAS, apply_invalid_action_penalty
        turns = (
            replace(turn, reward=trajectory.outcome - (0.0 if turn.valid else invalid_penalty))
            for turn in trajectory.turns
        )
        return replace(trajectory, turns=tuple(turns))

    return replace(group, trajectories=tuple(allocate(trajectory) for trajectory in group.trajectories))
