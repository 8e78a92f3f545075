"""Text worlds of other libraries (Gymnasium, ALFWorld, WebShop), which are imported when a world is opened."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from rollout.base.errors import EnvError
from rollout.environments.text_world import BadAction, MissingLibrary, Scene

_MARKED = re.compile(r"\x1b\[\d+(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)  # what a terminal highlights
_SESSIONS = count()  # of this process: the shop tells its visitors apart by name


class _Library:
    """What the worlds share: an environment of the library, once the game has started."""

    _env: Any = None

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


class GymnasiumWorld(_Library):
    """Any Gymnasium environment whose actions can be written; a game's key is the seed of its reset."""

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


class AlfworldWorld(_Library):
    """ALFWorld: one household task in TextWorld (arXiv 2010.03768); its key is the path of its `game.tw-pddl`."""

    def __init__(self, config: str) -> None:
        """`config` is ALFWorld's own file, such as its `configs/base_config.yaml`."""
        self._config = config
        self._score = 0.0

    def start(self, key: str) -> Scene:
        if not Path(key).is_file():
            raise EnvError(f"{key}: no such game; run `alfworld-download`")
        games = copy.copy(_games(self._config))  # which lists the games of a folder: here it has one
        games.game_files, games.num_games = [key], 1
        self._env = games.init_env(batch_size=1)
        observations, infos = self._env.reset()
        return Scene(text=observations[0].strip(), choices=_choices(infos))

    def act(self, action: str) -> Scene:
        observations, scores, dones, infos = self._env.step([action])
        before, self._score = self._score, float(scores[0])  # scores are of the whole game so far
        won = bool(infos["won"][0])
        return Scene(
            text=observations[0].strip(),
            reward=self._score - before,
            done=bool(dones[0]) or won,
            solved=won,
            choices=_choices(infos),
        )


def _choices(infos: Any) -> tuple[str, ...]:
    return tuple(infos["admissible_commands"][0])


@cache
def _games(config: str) -> Any:
    """An AlfredTWEnv, which reads a folder of games when it is made."""
    try:
        from alfworld.agents.environment import get_environment
    except ImportError as error:
        raise MissingLibrary("env alfworld needs `pip install alfworld`, and then `alfworld-download`") from error
    path = Path(config)
    if not path.is_file():
        raise EnvError(f"{config}: no such file; expected ALFWorld's configs/base_config.yaml")
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    # without the handcoded expert, whom only the split `train` has
    return get_environment("AlfredTWEnv")(settings, train_eval="eval_out_of_distribution")


@cache
def shop_thread() -> ThreadPoolExecutor:
    """The thread of the shop, whose search engine is one for all trajectories."""
    return ThreadPoolExecutor(1, thread_name_prefix="webshop")


class WebshopWorld(_Library):
    """WebShop: one errand, to find and buy a product (arXiv 2207.01206); its key is its goal's number."""

    def __init__(self, num_products: int | None) -> None:
        """`num_products` is how many the shop has, 100, 1000 or 100000; None: all."""
        self._num_products = num_products

    def start(self, key: str) -> Scene:
        if not key.isdecimal():
            raise EnvError(f"the key of an errand is the number of its goal, and not {key[:40]!r}")
        make, server = _shop(self._num_products)
        if int(key) >= len(server.goals):
            raise EnvError(f"the shop has {len(server.goals)} goals, and no goal {key}")
        prefix = f"{next(_SESSIONS)}-"
        self._env = make(observation_mode="text", num_products=self._num_products, server=server, session_prefix=prefix)
        text, _ = self._env.reset(session=int(key))
        return Scene(text=text, choices=self._choices())

    def act(self, action: str) -> Scene:
        if not (action.startswith(("search[", "click[")) and action.endswith("]")):
            raise BadAction("This is no action; expected search[words] or click[what can be clicked].")
        text, reward, done, _ = self._env.step(action)
        choices = () if done else self._choices()
        return Scene(text=text, reward=float(reward), done=bool(done), solved=done and reward == 1, choices=choices)

    def _choices(self) -> tuple[str, ...]:
        able = self._env.get_available_actions()
        search = ("search[words]",) if able["has_search_bar"] else ()
        return (*search, *(f"click[{what}]" for what in able["clickables"] if what != "search"))


@cache
def _shop(num_products: int | None) -> tuple[Any, Any]:
    """The class of the environment and the shop behind it, which reads its products when it is made."""
    try:
        from web_agent_site.envs import WebAgentTextEnv
    except ImportError as error:
        where = "https://github.com/princeton-nlp/WebShop"
        raise MissingLibrary(
            f"env webshop needs the package web_agent_site: install {where} by its setup.sh"
        ) from error
    return WebAgentTextEnv, WebAgentTextEnv(observation_mode="text", num_products=num_products).server
