"""Reward allocators: from a trajectory's outcome to a reward per turn.

shared_outcome   every turn of every agent gets the outcome (Dr.MAS)
"""

from __future__ import annotations

from collections.abc import Callable

from rollout.records import Group
from rollout.rewards.shared_outcome import shared_outcome

Allocator = Callable[..., Group]  # (group, **options) -> the group with rewards on its turns

ALLOCATORS: dict[str, Allocator] = {"shared_outcome": shared_outcome}
