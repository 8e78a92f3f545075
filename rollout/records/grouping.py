"""Grouping of records by a key, and of trajectories by their task."""

from collections.abc import Iterable
from typing import TypeVar

from rollout.records.trajectory import Group, Task, Trajectory

_K = TypeVar("_K")
_T = TypeVar("_T")


def group_pairs(pairs: Iterable[tuple[_K, _T]]) -> dict[_K, list[_T]]:
    """Return the values of each key of (key, value) pairs; keys and values keep their order."""
    groups: dict[_K, list[_T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def group_trajectories(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Return recorded trajectories by task; only the id and the source of the tasks are known."""
    by_task = group_pairs((trajectory.task_id, trajectory) for trajectory in trajectories)
    return [
        Group(
            task=Task(id=id, prompt="", answers=(), env="", source=members[0].source, split=""),
            trajectories=tuple(members),
        )
        for id, members in by_task.items()
    ]
