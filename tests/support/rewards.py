"""Rewards that a random model gets by chance."""

import time
from dataclasses import replace

from rollout.records.trajectory import Group, Status


def by_first_token(group: Group) -> Group:
    """Every turn of a completed trajectory gets the remainder of its first token by 5."""
    trajectories = (
        replace(
            t,
            turns=tuple(
                replace(turn, reward=float(turn.completion_ids[0] % 5)) for turn in t.turns
            ),
        )
        if t.status is Status.COMPLETED
        else t
        for t in group.trajectories
    )
    return replace(group, trajectories=tuple(trajectories))


def by_number(group: Group) -> Group:
    """Every turn of a group's trajectory gets the trajectory's number, whatever was said."""
    trajectories = (
        replace(t, turns=tuple(replace(turn, reward=float(number)) for turn in t.turns))
        for number, t in enumerate(group.trajectories)
    )
    return replace(group, trajectories=tuple(trajectories))


_held: list[bytes] = []


def hungry(group: Group) -> Group:
    """As `by_first_token`, by a process that then holds 3.6 GB."""
    if not _held:
        _held.append(b"x" * 3_600_000_000)
        time.sleep(10)  # Slurm looks every second
    return by_first_token(group)
