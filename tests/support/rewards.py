"""Rewards that a random model gets by chance."""

import os
import time
from dataclasses import replace
from pathlib import Path

from rollout.records.trajectory import Group, Status, Turn


def by_first_token(group: Group) -> Group:
    """Reward each turn of a completed trajectory with its first token modulo 5."""
    trajectories = []
    for trajectory in group.trajectories:
        if trajectory.status is Status.COMPLETED:
            turns = [
                replace(turn, reward=float(turn.completion_ids[0] % 5)) for turn in trajectory.turns
            ]
            trajectory = replace(trajectory, turns=tuple(turns))
        trajectories.append(trajectory)
    return replace(group, trajectories=tuple(trajectories))


def first_token(turn: Turn) -> float:
    """Return the first token of a turn modulo 5, as a penalty of the config."""
    return float(turn.completion_ids[0] % 5)


# Environment variable: a file that lets the reward `waiting` wait as long as it exists
WAIT_FILE = "MCORE_MAS_TEST_WAIT"


def waiting(group: Group) -> Group:
    """Reward as `by_first_token`; first block the event loop while the file of `WAIT_FILE` exists."""
    file = Path(os.environ.get(WAIT_FILE, "/nowhere"))
    if file.exists():
        file.with_suffix(".reached").touch()
    while file.exists():
        time.sleep(0.05)
    return by_first_token(group)


def by_number(group: Group) -> Group:
    """Reward each turn of a group with the number of its trajectory, whatever the reply."""
    trajectories = []
    for number, trajectory in enumerate(group.trajectories):
        turns = [replace(turn, reward=float(number)) for turn in trajectory.turns]
        trajectories.append(replace(trajectory, turns=tuple(turns)))
    return replace(group, trajectories=tuple(trajectories))


_large_allocations: list[bytes] = []


def hungry(group: Group) -> Group:
    """Reward as `by_first_token`, and keep 3.6 GB of memory allocated from the first call on."""
    if not _large_allocations:
        _large_allocations.append(b"x" * 3_600_000_000)
        time.sleep(10)  # Slurm checks the memory every second
    return by_first_token(group)
