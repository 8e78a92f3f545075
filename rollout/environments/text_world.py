"""Text-world environments: what a world of another library promises, and the environment that plays any of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rollout.base.errors import EnvError
from rollout.environments.protocol import Step
from rollout.records.trajectory import Task

_T = TypeVar("_T")

_MOST_CHOICES = 100  # possible actions that are shown; where there are more, none are


class BadAction(ValueError):
    """A text is no action here: says what one looks like, in words for the agent."""


class MissingLibrary(EnvError):
    """The library of a world is not installed: says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a world shows."""

    text: str
    reward: float = 0.0  # of the action that led here
    done: bool = False
    solved: bool = False
    choices: tuple[str, ...] = ()  # actions that are possible now; () where they are not listed


class World(Protocol):
    """A world whose calls block; all of them come from one thread."""

    def start(self, key: str) -> Scene:
        """Begin the game with this key, the same whenever it is begun.

        Raises:
            EnvError: there is no such game.
        """

    def act(self, action: str) -> Scene:
        """Do something.

        Raises:
            BadAction: the text is no action, and nothing was changed.
        """

    def close(self) -> None:
        """Let go of everything."""


class WorldEnv:
    """One game of a world, for one trajectory; the first of a task's `answers` is its key.

    A step is one action. A text that is none changes nothing, has the reward `malformed` and takes a turn. Metrics:
    `solved`, `turns`, `malformed_actions`.
    """

    def __init__(
        self,
        make: Callable[[], World],
        *,
        max_turns: int = 30,
        malformed: float = 0.0,
        deadline_s: float = 60.0,
        executor: Executor | None = None,
    ) -> None:
        """An environment that has not started its world.

        Args:
            max_turns: steps at most.
            malformed: reward of a text that is no action.
            deadline_s: of one call of the world.
            executor: one thread for the world's calls; None: of its own.
        """
        self._make = make
        self._max_turns = max_turns
        self._malformed = malformed
        self._deadline_s = deadline_s
        self._shared = executor
        self._own: ThreadPoolExecutor | None = None
        self._world: World | None = None
        self._scene: Scene | None = None
        self._turns = 0
        self._bad = 0

    async def open(self, task: Task) -> None:
        """Start the world.

        Raises:
            EnvError: its library is missing, it fails, or the task has no key.
        """
        if not task.answers:
            raise EnvError(f"task {task.id} has no answers; the first is the key of a game")
        self._world = await self._call(self._make)
        self._scene = await self._call(self._world.start, task.answers[0])

    async def close(self) -> None:
        """End the world."""
        world, self._world = self._world, None
        try:
            if world is not None:
                await self._call(world.close)
        except EnvError:  # what it held goes with its process
            pass
        finally:
            if self._own is not None:
                self._own.shutdown(wait=False, cancel_futures=True)

    def reset(self, task: Task) -> str:
        """Start `task`; returns its prompt and the first scene."""
        self._turns = self._bad = 0
        return f"{task.prompt}\n\n{self._shown(self._started())}".strip()

    async def step(self, action: str) -> Step:
        """Do what the text says.

        Raises:
            EnvError: the world is not open, has ended, or fails.
        """
        before = self._started()
        if before.done or self._turns == self._max_turns:
            raise EnvError("WorldEnv.step after the end")
        assert self._world is not None
        self._turns += 1
        try:
            scene = await self._call(self._world.act, action.strip())
            shown, reward = self._shown(scene), scene.reward
        except BadAction as error:
            self._bad += 1
            scene, shown, reward = before, f"{error}\n{self._shown(before)}", self._malformed
        self._scene = scene
        counts = {"turns": float(self._turns), "malformed_actions": float(self._bad)}
        return Step(
            observation=shown,
            reward=reward,
            done=scene.done or self._turns == self._max_turns,
            metrics={"solved": float(scene.solved), **counts},
        )

    def _started(self) -> Scene:
        if self._scene is None or self._world is None:
            raise EnvError("WorldEnv is used before open")
        return self._scene

    def _shown(self, scene: Scene) -> str:
        if not scene.choices or len(scene.choices) > _MOST_CHOICES or scene.done:
            return scene.text
        return f"{scene.text}\nPossible actions: {', '.join(scene.choices)}"

    async def _call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        if self._shared is None and self._own is None:
            self._own = ThreadPoolExecutor(1, thread_name_prefix="world")
        future = asyncio.get_running_loop().run_in_executor(self._shared or self._own, function, *arguments)
        try:
            return await asyncio.wait_for(future, self._deadline_s)
        except TimeoutError as error:
            raise EnvError(f"the world did not answer within {self._deadline_s:g} s") from error
        except (BadAction, EnvError):
            raise
        except Exception as error:  # of somebody else's code: it fails this trajectory, not the run
            raise EnvError(f"the world failed ({type(error).__name__}: {error})") from error
