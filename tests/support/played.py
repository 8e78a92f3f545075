"""Turns, trajectories and groups as a team would have left them, for tests of what reads them."""

from collections.abc import Mapping
from typing import Any

from rollout.records.trajectory import Group, Status, Task, Trajectory, Turn

TASK = Task(id="t", prompt="?", answers=("1",), env="math", source="s", split="train")


def turn(
    index: int, agent: str = "solver", scores: Mapping[str, float] | None = None, **fields: Any
) -> Turn:
    """A well-formed turn of one token, at the root."""
    plain: dict[str, Any] = {
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
    return Turn(**plain | {"index": index, "agent": agent, "scores": scores or {}} | fields)


def trajectory(
    *turns: Turn, sample: int = 0, outcome: float | None = 1.0, **fields: Any
) -> Trajectory:
    """A completed trajectory of TASK."""
    plain: dict[str, Any] = {"id": f"0/t/{sample}", "task_id": "t", "source": "s", "step": 0}
    return Trajectory(**plain | {"sample": sample, "turns": turns, "outcome": outcome} | fields)


def failed(*turns: Turn, sample: int = 0) -> Trajectory:
    """A trajectory that an error ended."""
    return trajectory(
        *turns, sample=sample, outcome=None, status=Status.FAILED, error="EngineError"
    )


def group(*trajectories: Trajectory) -> Group:
    """Trajectories of TASK."""
    return Group(task=TASK, trajectories=trajectories)


def rewards(allocated: Group) -> list[list[float | None]]:
    """The rewards by trajectory and turn."""
    return [[turn.reward for turn in trajectory.turns] for trajectory in allocated.trajectories]
