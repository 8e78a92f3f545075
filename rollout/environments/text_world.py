"""Text-world environments of other libraries (Gymnasium, ALFWorld, WebShop), imported when a world is opened."""

import asyncio
import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import JsonValue, PositiveFloat, PositiveInt

from rollout.base.errors import EnvError
from rollout.base.yaml_files import read_yaml
from rollout.environments.protocol import AgentMistake, Step
from rollout.records.trajectory import Task

_T = TypeVar("_T")

_MOST_CHOICES = 100  # possible actions that are shown; where there are more, none are
_MARKED = re.compile(r"\x1b\[\d+(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)  # what a terminal highlights
_SESSIONS = count()  # of this process: the shop tells its visitors apart by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a world shows."""

    text: str
    reward: float = 0.0  # of the action that led here
    done: bool = False
    solved: bool = False
    choices: tuple[str, ...] = ()  # actions that are possible now; () where they are not listed


@dataclass(eq=False, kw_only=True)
class WorldEnv:
    """A game of a world whose calls block and come from one thread; the first of a task's `answers` is its key.

    A step is one action. A text that is none changes nothing, has the reward `malformed` and takes a turn. Metrics:
    `solved`, `turns`, `malformed_actions`.

    Args:
        max_turns: steps at most.
        malformed: reward of a text that is no action.
        deadline_s: of one call of the world, in seconds.
    """

    task: Task = field(kw_only=False)
    max_turns: PositiveInt = 30
    malformed: float = 0.0
    deadline_s: PositiveFloat = 60.0
    _env: Any = field(default=None, init=False)  # of the library, once the game has started
    # what makes the calls
    _thread: Executor = field(
        default_factory=partial(ThreadPoolExecutor, 1, thread_name_prefix="world"), init=False
    )
    _scene: Scene | None = field(default=None, init=False)
    _turns: int = field(default=0, init=False)
    _bad: int = field(default=0, init=False)

    def start(self, key: str) -> Scene:
        """Begin the game with this key, always the same; EnvError if there is none, or the library is missing."""
        raise NotImplementedError

    def act(self, action: str) -> Scene:
        """Do something; AgentMistake if the text is no action, and nothing was changed."""
        raise NotImplementedError

    async def open(self, task: Task) -> None:
        """Start the world."""
        if not task.answers:
            raise EnvError(f"task {task.id} has no answers; the first is the key of a game")
        self._scene = await self._call(self.start, task.answers[0])

    async def close(self) -> None:
        env, self._env, self._scene = self._env, None, None
        try:
            with suppress(EnvError):  # what it held goes with its process
                if env is not None:
                    await self._call(env.close)
        finally:
            if self._thread is not _SHOP:
                self._thread.shutdown(wait=False, cancel_futures=True)

    def reset(self, task: Task) -> str:
        self._turns = self._bad = 0
        return f"{task.prompt}\n\n{self._shown(self._started())}".strip()

    async def step(self, action: str) -> Step:
        """Do what the text says."""
        before = self._started()
        if before.done or self._turns == self.max_turns:
            raise EnvError("WorldEnv.step after the end")
        self._turns += 1
        try:
            scene = await self._call(self.act, action.strip())
            shown, reward = self._shown(scene), scene.reward
        except AgentMistake as error:
            self._bad += 1
            scene, shown, reward = before, f"{error}\n{self._shown(before)}", self.malformed
        self._scene = scene
        done = scene.done or self._turns == self.max_turns
        counts = {"turns": float(self._turns), "malformed_actions": float(self._bad)}
        return Step(
            observation=shown,
            reward=reward,
            done=done,
            metrics={"solved": float(scene.solved), **counts},
        )

    def state(self) -> str:
        return self._shown(self._started())

    def _started(self) -> Scene:
        if self._scene is None:
            raise EnvError("WorldEnv is used before open")
        return self._scene

    def _shown(self, scene: Scene) -> str:
        if not scene.choices or len(scene.choices) > _MOST_CHOICES or scene.done:
            return scene.text
        return f"{scene.text}\nPossible actions: {', '.join(scene.choices)}"

    async def _call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        future = asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        try:
            return await asyncio.wait_for(future, self.deadline_s)
        except TimeoutError as error:
            raise EnvError(f"the world did not answer within {self.deadline_s:g} s") from error
        except (AgentMistake, EnvError):
            raise
        except Exception as error:  # of somebody else's code: it fails this trajectory, not the run
            raise EnvError(f"the world failed ({type(error).__name__}: {error})") from error


@dataclass(eq=False, kw_only=True)
class GymnasiumEnv(WorldEnv):
    """A Gymnasium environment whose actions can be written; a game's key is the seed of its reset.

    Args:
        id: of the environment, perhaps with a module to import: `my_package:MyWorld-v0`.
        make: keyword arguments of `gymnasium.make`; with `render_mode: ansi` a scene is what it renders.
        actions: names of a discrete environment's actions; numbers are understood as well.
        goal: the return from which on a game that ended counts as solved; null: the environment's own
            `reward_threshold`, or above 0.
    """

    id: str
    make: Mapping[str, JsonValue] | None = None
    actions: Sequence[str] = ()
    goal: float | None = None
    _return: float = field(default=0.0, init=False)

    def start(self, key: str) -> Scene:
        try:
            import gymnasium
        except ImportError as error:
            raise EnvError("env gymnasium needs `pip install mcore-mas[gymnasium]`") from error
        if not key.isdecimal():
            raise EnvError(
                f"the key of a Gymnasium game is its seed, a number, and not {key[:40]!r}"
            )
        try:
            self._env = gymnasium.make(self.id, **dict[str, Any](self.make or {}))
        except gymnasium.error.Error as error:
            raise EnvError(f"gymnasium cannot make '{self.id}': {error}") from error
        self._check_space()
        observation, _ = self._env.reset(seed=int(key))
        return Scene(text=self._show(observation), choices=tuple(self.actions))

    def act(self, action: str) -> Scene:
        observation, reward, terminated, truncated, _ = self._env.step(self._read(action))
        self._return += float(reward)
        threshold = (
            self._env.spec.reward_threshold if self.goal is None and self._env.spec else self.goal
        )
        reached = self._return > 0 if threshold is None else self._return >= threshold
        text, done, solved = (
            self._show(observation),
            bool(terminated or truncated),
            bool(terminated and reached),
        )
        return Scene(
            text=text, reward=float(reward), done=done, solved=solved, choices=tuple(self.actions)
        )

    def _check_space(self) -> None:
        from gymnasium.spaces import Discrete, MultiDiscrete, Text

        space = self._env.action_space
        if not isinstance(space, Discrete | MultiDiscrete | Text):
            raise EnvError(
                f"'{self.id}' takes {space}, which cannot be written; expected Discrete, MultiDiscrete, Text"
            )
        if self.actions and not (isinstance(space, Discrete) and space.n == len(self.actions)):
            raise EnvError(
                f"'{self.id}' takes {space}, for which there cannot be {len(self.actions)} names of actions"
            )

    def _read(self, text: str) -> Any:
        from gymnasium.spaces import Discrete, Text

        space = self._env.action_space
        if isinstance(space, Text):
            action: Any = text
        elif text.lower() in (lower := [name.lower() for name in self.actions]):
            action = int(space.start) + lower.index(text.lower())
        else:
            numbers = [int(part) for part in re.findall(r"-?\d{1,18}", text)]
            action = numbers[0] if isinstance(space, Discrete) and len(numbers) == 1 else numbers
        if not space.contains(action):
            expected = f"one of {', '.join(self.actions)}" if self.actions else str(space)
            raise AgentMistake(f"This is no action; expected {expected}.")
        return action

    def _show(self, observation: Any) -> str:
        if self._env.render_mode == "ansi":
            return _MARKED.sub(r"[\1]", str(self._env.render())).strip("\n")
        return (
            observation if isinstance(observation, str) else json.dumps(observation, default=_plain)
        )


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


@dataclass(eq=False, kw_only=True)
class AlfworldEnv(WorldEnv):
    """ALFWorld: a household task in TextWorld (arXiv 2010.03768); its key is the path of its `game.tw-pddl`.

    Args:
        config: ALFWorld's own file, such as its `configs/base_config.yaml`.
    """

    config: str
    max_turns: PositiveInt = 50
    deadline_s: PositiveFloat = 120.0
    _score: float = field(default=0.0, init=False)

    def start(self, key: str) -> Scene:
        if not Path(key).is_file():
            raise EnvError(f"{key}: no such game; run `alfworld-download`")
        games = copy.copy(_games(self.config))  # which lists the games of a folder: here it has one
        games.game_files, games.num_games = [key], 1
        self._env = games.init_env(batch_size=1)
        observations, infos = self._env.reset()
        return Scene(text=observations[0].strip(), choices=tuple(infos["admissible_commands"][0]))

    def act(self, action: str) -> Scene:
        observations, scores, dones, infos = self._env.step([action])
        before, self._score = self._score, float(scores[0])  # scores are of the whole game so far
        won, choices = bool(infos["won"][0]), tuple(infos["admissible_commands"][0])
        reward, done = self._score - before, bool(dones[0]) or won
        return Scene(
            text=observations[0].strip(), reward=reward, done=done, solved=won, choices=choices
        )


@cache
def _games(config: str) -> Any:
    """An AlfredTWEnv, which reads a folder of games when it is made."""
    try:
        from alfworld.agents.environment import get_environment
    except ImportError as error:
        raise EnvError(
            "env alfworld needs `pip install alfworld`, and then `alfworld-download`"
        ) from error
    path = Path(config)
    if not path.is_file():
        raise EnvError(f"{config}: no such file; expected ALFWorld's configs/base_config.yaml")
    settings = read_yaml(path)
    # without the handcoded expert, whom only the split `train` has
    return get_environment("AlfredTWEnv")(settings, train_eval="eval_out_of_distribution")


_SHOP = ThreadPoolExecutor(
    1, thread_name_prefix="webshop"
)  # its search engine is one for all trajectories


@dataclass(eq=False, kw_only=True)
class WebshopEnv(WorldEnv):
    """WebShop: an errand, to find and buy a product (arXiv 2207.01206); its key is its goal's number.

    The first one of a process loads the shop, which can take minutes.

    Args:
        num_products: how many the shop has, 100, 1000 or 100000; null: all.
    """

    num_products: Literal[100, 1000, 100000] | None = 1000
    max_turns: PositiveInt = 15
    deadline_s: PositiveFloat = 600.0
    _thread: Executor = field(default=_SHOP, init=False)

    def start(self, key: str) -> Scene:
        if not key.isdecimal():
            raise EnvError(f"the key of an errand is the number of its goal, and not {key[:40]!r}")
        make, server = _shop(self.num_products)
        if int(key) >= len(server.goals):
            raise EnvError(f"the shop has {len(server.goals)} goals, and no goal {key}")
        prefix = f"{next(_SESSIONS)}-"
        self._env = make(
            observation_mode="text",
            num_products=self.num_products,
            server=server,
            session_prefix=prefix,
        )
        text, _ = self._env.reset(session=int(key))
        return Scene(text=text, choices=self._choices())

    def act(self, action: str) -> Scene:
        if not (action.startswith(("search[", "click[")) and action.endswith("]")):
            raise AgentMistake(
                "This is no action; expected search[words] or click[what can be clicked]."
            )
        text, reward, done, _ = self._env.step(action)
        choices = () if done else self._choices()
        return Scene(
            text=text,
            reward=float(reward),
            done=bool(done),
            solved=done and reward == 1,
            choices=choices,
        )

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
        raise EnvError(
            f"env webshop needs the package web_agent_site: install {where} by its setup.sh"
        ) from error
    return WebAgentTextEnv, WebAgentTextEnv(
        observation_mode="text", num_products=num_products
    ).server
