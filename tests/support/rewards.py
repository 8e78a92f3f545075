"""A reward that a random model gets by chance."""

from dataclasses import replace

from rollout.records.trajectory import Group, Status


def by_first_token(group: Group) -> Group:
    """Every turn of a completed trajectory gets the remainder of its first token by 5."""
    trajectories = (
        replace(t, turns=tuple(replace(turn, reward=float(turn.completion_ids[0] % 5)) for turn in t.turns))
        if t.status is Status.COMPLETED
        else t
        for t in group.trajectories
    )
    return replace(group, trajectories=tuple(trajectories))
