"""Rewards of the Python API: functions of a trajectory or of a group of trajectories."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mcore_mas.api.references import ArgumentError, reference_to
from rollout.base.error_location import describe_with_location
from rollout.base.errors import OptionsError
from rollout.base.lookup import lookup
from rollout.base.signatures import check_call
from rollout.records.trajectory import Group, Status, Trajectory
from rollout.rewards.allocation import RewardError


def reward_section(reward: Callable[..., Any] | str, label: str) -> dict[str, Any]:
    """Return the section `reward` of a config.

    Args:
        reward: the name of an allocator, or a function of a trajectory or a group.
        label: name of a function that cannot be imported, see `reference_to`.

    Raises:
        ArgumentError: the reward is neither a name nor a function of one argument.
    """
    if isinstance(reward, str):
        return {"name": reward}
    try:
        check_call(f"reward {label}", reward, ("trajectory",), keywords=())
    except OptionsError as error:
        raise ArgumentError(
            f"{error}; expected a function of a trajectory or a group, or the name of an allocator"
        ) from error

    reference = reference_to(reward, label)
    if _takes_group(reward):
        return {"name": reference}
    return {"name": f"{__name__}:by_trajectory", "options": {"reward": reference}}


def by_trajectory(group: Group, *, reward: str) -> Group:
    """Allocate the rewards of a group by a function of one trajectory.

    Args:
        group: trajectories of a task.
        reward: reference to the function, as `reference_to` returns it.
    """
    return allocator_of(lookup("reward", reward, {}))(group)


def allocator_of(reward: Callable[..., Any]) -> Callable[[Group], Group]:
    """Return an allocator of rewards.

    Args:
        reward: an allocator, whose first argument is called `group`, or a function of a trajectory
            that returns a number or a number for each agent.
    """
    if _takes_group(reward):
        return reward

    def allocate(group: Group) -> Group:
        trajectories = [_with_rewards(trajectory, reward) for trajectory in group.trajectories]
        return Group(task=group.task, trajectories=tuple(trajectories))

    return allocate


def _takes_group(reward: Callable[..., Any]) -> bool:
    """Return True if the first argument is called `group`."""
    with suppress(ValueError):  # the signatures of some functions in C cannot be read
        return next(iter(inspect.signature(reward).parameters), "") == "group"
    return False


def _with_rewards(trajectory: Trajectory, reward: Callable[..., Any]) -> Trajectory:
    """Return the trajectory with rewards on its turns, unchanged if it was not completed."""
    if trajectory.status is not Status.COMPLETED:
        return trajectory
    name = getattr(reward, "__name__", repr(reward))
    try:
        result = reward(trajectory)
    except Exception as error:
        raise RewardError(
            f"trajectory {trajectory.id}: reward {name} raised {describe_with_location(error)}"
        ) from error

    turns = []
    for turn in trajectory.turns:
        try:
            value = float(result[turn.agent] if isinstance(result, Mapping) else result)
        except (KeyError, TypeError, ValueError) as error:
            raise RewardError(
                f"trajectory {trajectory.id}: reward {name} returned {result!r:.80} for a turn of "
                f"agent '{turn.agent}'; expected a number, or a number for each agent"
            ) from error
        turns.append(replace(turn, reward=value))
    return replace(trajectory, turns=tuple(turns))
