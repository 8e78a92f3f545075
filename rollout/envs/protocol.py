"""What every environment promises."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from rollout.records import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call that a step made."""

    tool: str
    query: str
    result: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an environment answers to an action."""

    observation: str = ""
    reward: float = 0.0  # summed over the steps, this is the trajectory's outcome
    done: bool = False
    tools: tuple[ToolCall, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)


class EnvError(RuntimeError):
    """An environment or one of its tools failed: the trajectory is masked, never scored 0."""


class Env(Protocol):
    """One task's world, used by one trajectory."""

    def reset(self, task: Task) -> str:
        """Start `task`; returns the problem as the agents see it."""

    async def step(self, action: str) -> Step:
        """Apply an agent's text.

        Raises:
            EnvError: a tool failed for good.
        """
