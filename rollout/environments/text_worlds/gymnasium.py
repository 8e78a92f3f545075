"""Any Gymnasium environment as a text world, if its actions can be written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.environments.text_worlds.world import BadAction, EnvError, MissingLibrary, Scene

_MARKED = re.compile(r"\x1b\[\d+(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)  # what a terminal highlights


class GymnasiumWorld:
    """`gymnasium.make(id)`; a game's key is the seed of its reset."""

    def __init__(
        self,
        id: str,
        options: Mapping[str, Any],
        actions: Sequence[str] = (),
        goal: float | None = None,
    ) -> None:
        """A world that has not started.

        Args:
            id: of the environment, perhaps with a module to import: `my_package:MyWorld-v0`.
            options: keyword arguments of `gymnasium.make`; with `render_mode: ansi` a scene is what it renders.
            actions: names of a discrete environment's actions; numbers are understood as well.
            goal: the return from which on a game that ended counts as solved; None: the environment's own
                `reward_threshold`, or above 0.
        """
        self._id = id
        self._options = dict(options)
        self._actions = tuple(actions)
        self._goal = goal
        self._env: Any = None
        self._return = 0.0

    def start(self, key: str) -> Scene:
        try:
            import gymnasium
        except ImportError as error:
            raise MissingLibrary("env gymnasium needs `pip install mcore-mas[gymnasium]`") from error
        if not key.isdecimal():
            raise EnvError(f"the key of a Gymnasium game is its seed, a number, and not {key[:40]!r}")
        try:
            self._env = gymnasium.make(self._id, **self._options)
        except gymnasium.error.Error as error:
            raise EnvError(f"gymnasium cannot make '{self._id}': {error}") from error
        self._check_space()
        observation, _ = self._env.reset(seed=int(key))
        return Scene(text=self._show(observation), choices=self._actions)

    def act(self, action: str) -> Scene:
        observation, reward, terminated, truncated, _ = self._env.step(self._read(action))
        self._return += float(reward)
        threshold = self._env.spec.reward_threshold if self._goal is None and self._env.spec else self._goal
        reached = self._return > 0 if threshold is None else self._return >= threshold
        return Scene(
            text=self._show(observation),
            reward=float(reward),
            done=bool(terminated or truncated),
            solved=bool(terminated and reached),
            choices=self._actions,
        )

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _check_space(self) -> None:
        from gymnasium.spaces import Discrete, MultiDiscrete, Text

        space = self._env.action_space
        if not isinstance(space, Discrete | MultiDiscrete | Text):
            raise EnvError(
                f"'{self._id}' takes {space}, which cannot be written; expected Discrete, MultiDiscrete, Text"
            )
        if self._actions and not (isinstance(space, Discrete) and space.n == len(self._actions)):
            raise EnvError(
                f"'{self._id}' takes {space}, for which there cannot be {len(self._actions)} names of actions"
            )

    def _read(self, text: str) -> Any:
        from gymnasium.spaces import Discrete, Text

        space = self._env.action_space
        if isinstance(space, Text):
            action: Any = text
        elif text.lower() in (lower := [name.lower() for name in self._actions]):
            action = int(space.start) + lower.index(text.lower())
        else:
            numbers = [int(part) for part in re.findall(r"-?\d{1,18}", text)]
            action = numbers[0] if isinstance(space, Discrete) and len(numbers) == 1 else numbers
        if not space.contains(action):
            expected = f"one of {', '.join(self._actions)}" if self._actions else str(space)
            raise BadAction(f"This is no action; expected {expected}.")
        return action

    def _show(self, observation: Any) -> str:
        if self._env.render_mode == "ansi":
            return _MARKED.sub(r"[\1]", str(self._env.render())).strip("\n")
        return observation if isinstance(observation, str) else json.dumps(observation, default=_plain)


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
