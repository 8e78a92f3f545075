"""Environment of the tasks of chats and served teams, whose answers nobody knows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from rollout.base.errors import Undecided, Unscorable
from rollout.environments.protocol import Env, Step
from rollout.records.trajectory import Task

# Answers of a task without a known answer. Environments of questions need one answer at least; no
# team will give this one.
UNKNOWN_ANSWERS = ("?",)

_UNSCORED_STEP = Step(done=True, unscored=True)
# What each optional method that scores returns if the environment cannot score.
_UNSCORED_RESULTS = {"preview": _UNSCORED_STEP, "check": _UNSCORED_STEP, "agreement": None}


class UnscoredEnv:
    """Wrapper of the environment of a task without a known answer: actions that it cannot score raise no error.

    It has all other methods of the wrapped environment too, such as `preview` and `run`.

    Attributes:
        latest_action: latest action of the team; None before the first.
    """

    def __init__(self, env: Env) -> None:
        self.latest_action: str | None = None
        self._env = env

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._env, name)
        if name in _UNSCORED_RESULTS:
            return _without_scores(method, _UNSCORED_RESULTS[name])
        return method

    def reset(self, task: Task) -> str:
        """Return the first observation."""
        return self._env.reset(task)

    async def step(self, action: str) -> Step:
        """Take a step in the environment.

        An action that the environment cannot score, for which it raises Undecided or Unscorable, counts
        as the team's answer, and ends the task. Other errors are raised.
        """
        self.latest_action = action
        step: Step = await _without_scores(self._env.step, _UNSCORED_STEP)(action)
        return step


def _without_scores(
    method: Callable[..., Awaitable[Any]], unscored: Step | None
) -> Callable[..., Awaitable[Any]]:
    """Wrap a method of an environment to return `unscored` where the environment cannot score."""

    async def call(*arguments: object) -> Any:
        try:
            return await method(*arguments)
        except (Undecided, Unscorable):
            return unscored

    return call
