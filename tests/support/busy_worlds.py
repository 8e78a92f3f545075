"""Environment that worker processes play in tests: on order it blocks, ends its process or raises an error."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.base.errors import EnvError, Undecided
from rollout.environments.protocol import Decision, Step, ToolCall
from rollout.records.trajectory import Task

if TYPE_CHECKING:
    from retrieval.client import RetrievalClient
    from rollout.records.call_record import CallRecord

_HALF: Any = np.float32(0.5)  # a number of NumPy, as environments of users return it
_ERRORS = {"env": EnvError("the world is out"), "undecided": Undecided("who knows")}


@dataclass(eq=False, kw_only=True)
class BusyEnv:
    """Environment whose actions are orders; its metric `process` is the id of its process.

    Args:
        busy_s: seconds of a step in which it keeps a processor busy.
    """

    task: Task = field(kw_only=False)
    busy_s: float = 0.0
    steps: int = 0

    def reset(self, task: Task) -> str:
        return f"{task.prompt} after {self.steps} steps"

    async def step(self, action: str) -> Step:
        self.steps += 1
        order, _, argument = action.partition(" ")
        if order == "exit":
            os._exit(int(argument))
        if order == "sleep":
            time.sleep(float(argument))
        if order == "raise":
            raise _ERRORS[argument]
        if order == "print":
            print(argument)
        end = time.perf_counter() + self.busy_s
        while time.perf_counter() < end:
            pass
        return Step(
            observation=f"step {self.steps}",
            reward=_HALF,
            done=order == "end",
            answer=argument,
            tools=(ToolCall(tool="order", query=order, result=argument),),
            metrics={"process": float(os.getpid())},
        )

    async def decision(self) -> Decision:
        return Decision(player="first", observation=str(self.steps))

    def state(self) -> str:
        """Return the number of steps."""
        return str(self.steps)


class PayingEnv(BusyEnv):
    """Environment whose calls are on record."""

    async def open(self, task: Task, calls: CallRecord) -> None:
        """Begin without a call."""

    async def close(self) -> None:
        """Free nothing."""


def ask_retriever(task: Task, *, retriever: RetrievalClient) -> BusyEnv:
    """Return an environment that cannot do without the retriever of a run."""
    return BusyEnv(task)


def may_ask_retriever(task: Task, *, retriever: RetrievalClient | None = None) -> BusyEnv:
    """Return an environment that uses the retriever of a run if there is one."""
    return BusyEnv(task)
