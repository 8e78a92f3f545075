"""Recorded turns, trajectories and groups, for tests of their readers."""

from collections.abc import Mapping
from typing import Any

from rollout.records.trajectory import Group, Status, Task, Trajectory, Turn

TASK = Task(id="t", prompt="?", answers=("1",), env="math", source="s", split="train")


def turn(
    index: int, agent: str = "solver", scores: Mapping[str, float] | None = None, **fields: Any
) -> Turn:
    """Return a well-formed turn of one token at the root, with some fields changed."""
    defaults: dict[str, Any] = {
        "policy": "p",
        "policy_version": 0,
        "node": "",
        "state_key": "k",
        "messages": (),
        "prompt_ids": (1,),
        "completion_ids": (2,),
        "logprobs": (0.0,),
        "temperature": 1.0,
        "text": "",
        "finish_reason": "stop",
        "valid": True,
        "seed": 0,
    }
    return Turn(**defaults | {"index": index, "agent": agent, "scores": scores or {}} | fields)


def trajectory(
    *turns: Turn, sample: int = 0, outcome: float | None = 1.0, **fields: Any
) -> Trajectory:
    """Return a completed trajectory of `TASK`, with some fields changed."""
    defaults: dict[str, Any] = {"id": f"0/t/{sample}", "task_id": "t", "source": "s", "step": 0}
    return Trajectory(**defaults | {"sample": sample, "turns": turns, "outcome": outcome} | fields)


def failed(*turns: Turn, sample: int = 0) -> Trajectory:
    """Return a trajectory that failed with an EngineError."""
    return trajectory(
        *turns, sample=sample, outcome=None, status=Status.FAILED, error="EngineError"
    )


def group(*trajectories: Trajectory) -> Group:
    """Return a group of trajectories of `TASK`."""
    return Group(task=TASK, trajectories=trajectories)


def rewards(allocated: Group) -> list[list[float | None]]:
    """Return the rewards by trajectory and turn."""
    return [[turn.reward for turn in trajectory.turns] for trajectory in allocated.trajectories]
