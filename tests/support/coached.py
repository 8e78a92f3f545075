"""Trajectories for tests of the coach, and its config for a server of the test."""

from __future__ import annotations

from typing import Any

from rollout.records.trajectory import Group, Message, Status, Task, ToolEvent, Trajectory, Turn
from rollout.rewards.coach_config import CoachConfig

TASK = Task(id="t", prompt="What is 6 x 7?", answers=("42",), env="math", source="s", split="train")


def turn(
    index: int, agent: str, text: str, *, node: str = "", prompt: str = "Solve it.", **fields: Any
) -> Turn:
    defaults = {
        "index": index,
        "agent": agent,
        "policy": agent,
        "policy_version": 0,
        "node": node,
        "state_key": "k",
        "messages": (Message(role="user", content=prompt),),
        "prompt_ids": (1,),
        "completion_ids": (2,),
        "logprobs": (-0.5,),
        "temperature": 1.0,
        "text": text,
        "finish_reason": "stop",
        "valid": True,
        "seed": 0,
    }
    return Turn(**{**defaults, **fields})


def trajectory(
    *turns: Turn, tools: tuple[ToolEvent, ...] = (), status: Status = Status.COMPLETED
) -> Trajectory:
    return Trajectory(
        id="0/t/0",
        task_id="t",
        source="s",
        sample=0,
        step=0,
        turns=turns,
        tools=tools,
        outcome=1.0,
        status=status,
    )


def group(*trajectories: Trajectory) -> Group:
    return Group(task=TASK, trajectories=trajectories)


def config(url: str, **fields: Any) -> CoachConfig:
    """Return the config of a coach at `url`, with some fields changed.

    Its verdicts are grades without an answer of the coach, so that a line of a score is a verdict.
    """
    defaults = {
        "form": "grade",
        "model": "judge",
        "url": url,
        "retries": 2,
        "timeout_s": 5.0,
        "deadline_s": 10.0,
    }
    return CoachConfig(**{**defaults, **fields})
