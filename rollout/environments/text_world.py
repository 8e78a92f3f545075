"""Text-world environments of other libraries: Gymnasium, ALFWorld and WebShop.

The libraries are imported when a world is opened.
"""

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
from threading import Lock
from typing import Any, Literal, TypeVar

from pydantic import JsonValue, PositiveFloat, PositiveInt

from rollout.base.errors import EnvError
from rollout.base.yaml_files import read_yaml
from rollout.environments.protocol import AgentMistake, Step
from rollout.records.trajectory import Task

_T = TypeVar("_T")

_MAX_CHOICES = 100  # if more actions are possible, none are listed
_HIGHLIGHTED = re.compile(r"\x1b\[\d+(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)  # terminal colours
_SESSION_NUMBERS = count()  # WebShop distinguishes its visitors by the names of their sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """State of a world after an action, as agents see it.

    Attributes:
        reward: reward of the action.
        choices: actions that are possible now; () if the world does not list them.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    solved: bool = False
    choices: tuple[str, ...] = ()


@dataclass(eq=False, kw_only=True)
class WorldEnv:
    """Base class of text worlds, which play one game for each trajectory.

    The first of a task's `answers` is the key of the game. Subclasses implement `begin`, `carry_out`
    and `end`.

    A step is one action. A text that is no action changes nothing, has the reward `malformed` and
    takes a turn. Metrics are `solved`, `turns` and `malformed_actions`.

    Args:
        max_turns: maximum number of steps; after them the trajectory ends.
        malformed: reward of a text that is not an action.
        deadline_s: seconds that a call of the world may take.
    """

    task: Task = field(kw_only=False)
    max_turns: PositiveInt = 30
    malformed: float = 0.0
    deadline_s: PositiveFloat = 60.0
    _scene: Scene | None = field(default=None, init=False)
    _turns: int = field(default=0, init=False)
    _malformed_actions: int = field(default=0, init=False)

    async def begin(self, key: str) -> Scene:
        """Begin the game with this key; equal keys begin equal games.

        Raises:
            EnvError: there is no such game, or the library or server of the world is missing.
        """
        raise NotImplementedError

    async def carry_out(self, action: str) -> Scene:
        """Carry out an action; return the scene after it.

        Raises:
            AgentMistake: the text is not an action; nothing has changed.
            EnvError: the world failed, or the deadline has passed.
        """
        raise NotImplementedError

    async def end(self) -> None:
        """Free the resources of the game, also if it did not begin."""
        raise NotImplementedError

    async def open(self, task: Task) -> None:
        """Begin the game of a task."""
        if not task.answers:
            raise EnvError(f"task {task.id} has no answers; the first is the key of a game")
        self._scene = await self.begin(task.answers[0])

    async def close(self) -> None:
        self._scene = None
        await self.end()

    def reset(self, task: Task) -> str:
        self._turns = 0
        self._malformed_actions = 0
        return f"{task.prompt}\n\n{_render(self._current_scene())}".strip()

    async def step(self, action: str) -> Step:
        """Carry out the action that an agent has written.

        If the text is not an action, the observation says why.
        """
        scene = self._current_scene()
        if scene.done or self._turns == self.max_turns:
            raise EnvError("WorldEnv.step after the end")
        self._turns += 1
        try:
            scene = await self.carry_out(action.strip())
            reward = scene.reward
            observation = _render(scene)
        except AgentMistake as error:
            self._malformed_actions += 1
            reward = self.malformed
            observation = f"{error}\n{_render(scene)}"
        self._scene = scene
        return Step(
            observation=observation,
            reward=reward,
            done=scene.done or self._turns == self.max_turns,
            metrics={
                "solved": float(scene.solved),
                "turns": float(self._turns),
                "malformed_actions": float(self._malformed_actions),
            },
        )

    def state(self) -> str:
        """Return the current scene as text."""
        return _render(self._current_scene())

    def _current_scene(self) -> Scene:
        if self._scene is None:
            raise EnvError("WorldEnv is used before open")
        return self._scene


@dataclass(eq=False, kw_only=True)
class ThreadWorldEnv(WorldEnv):
    """World of a library whose calls block; they are made in one thread."""

    # Environment of the library, which `start` sets.
    _env: Any = field(default=None, init=False)
    # Thread that makes the calls.
    _thread: Executor = field(
        default_factory=partial(ThreadPoolExecutor, 1, thread_name_prefix="world"), init=False
    )

    def start(self, key: str) -> Scene:
        """Begin the game with this key, as `begin` does; called in the thread."""
        raise NotImplementedError

    def act(self, action: str) -> Scene:
        """Carry out an action, as `carry_out` does; called in the thread."""
        raise NotImplementedError

    async def begin(self, key: str) -> Scene:
        return await self._call(self.start, key)

    async def carry_out(self, action: str) -> Scene:
        return await self._call(self.act, action)

    async def end(self) -> None:
        env = self._env
        self._env = None
        try:
            if env is not None:
                # If closing fails, the world's resources are freed when this process ends.
                with suppress(EnvError):
                    await self._call(env.close)
        finally:
            # The thread of `WebshopEnv` serves the other trajectories, too.
            if self._thread is not _SHOP:
                self._thread.shutdown(wait=False, cancel_futures=True)

    async def _call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function of the world in its thread, within the deadline.

        Raises:
            AgentMistake: the function raised it.
            EnvError: the function raised any other error, or the deadline has passed.
        """
        future = asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        try:
            return await asyncio.wait_for(future, self.deadline_s)
        except TimeoutError as error:
            raise EnvError(f"the world did not answer within {self.deadline_s:g} s") from error
        except (AgentMistake, EnvError):
            raise
        except Exception as error:
            # An error of the library's code fails this trajectory and not the run.
            raise EnvError(f"the world failed ({type(error).__name__}: {error})") from error


def _render(scene: Scene) -> str:
    """Return the text of a scene, with the possible actions if there are not too many."""
    if scene.done or not scene.choices or len(scene.choices) > _MAX_CHOICES:
        return scene.text
    return f"{scene.text}\nPossible actions: {', '.join(scene.choices)}"


@dataclass(eq=False, kw_only=True)
class GymnasiumEnv(ThreadWorldEnv):
    """A Gymnasium environment whose actions can be written; the key of a game is its seed.

    Args:
        id: id of the environment, with a module to import if needed: `my_package:MyWorld-v0`.
        make: keyword arguments of `gymnasium.make`; with `render_mode: ansi` agents see the
            rendered text.
        actions: names of a discrete environment's actions; numbers are understood as well.
        goal: least return with which a game that terminates counts as solved; null: the
            environment's `reward_threshold`, or any return above 0 without one.
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
        keywords: dict[str, Any] = dict(self.make or {})
        try:
            self._env = gymnasium.make(self.id, **keywords)
        except gymnasium.error.Error as error:
            raise EnvError(f"gymnasium cannot make '{self.id}': {error}") from error
        self._check_space()
        observation, _ = self._env.reset(seed=int(key))
        return Scene(text=self._show(observation), choices=tuple(self.actions))

    def act(self, action: str) -> Scene:
        observation, reward, terminated, truncated, _ = self._env.step(self._parse_action(action))
        self._return += float(reward)
        return Scene(
            text=self._show(observation),
            reward=float(reward),
            done=bool(terminated or truncated),
            solved=bool(terminated and self._reached_goal()),
            choices=tuple(self.actions),
        )

    def _reached_goal(self) -> bool:
        goal = self.goal
        if goal is None and self._env.spec:
            goal = self._env.spec.reward_threshold
        return self._return > 0 if goal is None else self._return >= goal

    def _check_space(self) -> None:
        """Raise EnvError if actions cannot be written as text, or if `actions` does not name each one."""
        from gymnasium.spaces import Discrete, MultiDiscrete, Text

        space = self._env.action_space
        if not isinstance(space, Discrete | MultiDiscrete | Text):
            raise EnvError(
                f"'{self.id}' takes {space}, which cannot be written; "
                "expected Discrete, MultiDiscrete, Text"
            )
        if self.actions and not (isinstance(space, Discrete) and space.n == len(self.actions)):
            raise EnvError(
                f"'{self.id}' takes {space}, "
                f"for which there cannot be {len(self.actions)} names of actions"
            )

    def _parse_action(self, text: str) -> Any:
        """Convert a text to an action: as it is, by the name of an action, or by its numbers.

        Raises:
            AgentMistake: the environment has no such action.
        """
        from gymnasium.spaces import Discrete, Text

        space = self._env.action_space
        names = [name.lower() for name in self.actions]
        numbers = [int(number) for number in re.findall(r"-?\d{1,18}", text)]
        action: Any
        if isinstance(space, Text):
            action = text
        elif text.lower() in names:
            action = int(space.start) + names.index(text.lower())
        elif isinstance(space, Discrete) and len(numbers) == 1:
            action = numbers[0]
        else:
            action = numbers
        if not space.contains(action):
            expected = f"one of {', '.join(self.actions)}" if self.actions else str(space)
            raise AgentMistake(f"This is no action; expected {expected}.")
        return action

    def _show(self, observation: Any) -> str:
        """Return the text of a scene: the rendered one in the mode `ansi`, else the observation."""
        if self._env.render_mode == "ansi":
            return _HIGHLIGHTED.sub(r"[\1]", str(self._env.render())).strip("\n")
        if isinstance(observation, str):
            return observation
        return json.dumps(observation, default=_to_json)


def _to_json(value: Any) -> Any:
    """Convert arrays and numbers of NumPy to lists and numbers, and other objects to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


@dataclass(eq=False, kw_only=True)
class AlfworldEnv(ThreadWorldEnv):
    """ALFWorld: a household task in TextWorld (arXiv 2010.03768).

    The key of a game is the path of its `game.tw-pddl`.

    Args:
        config: configuration file of ALFWorld, such as its `configs/base_config.yaml`.
    """

    config: str
    max_turns: PositiveInt = 50
    deadline_s: PositiveFloat = 120.0
    _score: float = field(default=0.0, init=False)

    def start(self, key: str) -> Scene:
        if not Path(key).is_file():
            raise EnvError(f"{key}: no such game; run `alfworld-download`")
        with _ALFWORLD_LOCK:
            shared = load_alfworld(self.config)
        alfworld = copy.copy(shared)  # its list of games is replaced
        alfworld.game_files = [key]
        alfworld.num_games = 1
        self._env = alfworld.init_env(batch_size=1)
        observations, infos = self._env.reset()
        return Scene(text=observations[0].strip(), choices=tuple(infos["admissible_commands"][0]))

    def act(self, action: str) -> Scene:
        observations, scores, dones, infos = self._env.step([action])
        score = float(scores[0])  # of the whole game so far
        reward = score - self._score
        self._score = score
        won = bool(infos["won"][0])
        return Scene(
            text=observations[0].strip(),
            reward=reward,
            done=bool(dones[0]) or won,
            solved=won,
            choices=tuple(infos["admissible_commands"][0]),
        )


# Trajectories run in threads. `cache` alone would let each of those that start together read the folder.
_ALFWORLD_LOCK = Lock()


@cache
def load_alfworld(config: str) -> Any:
    """Return ALFWorld's `AlfredTWEnv`, whose `init_env` makes environments.

    It reads a folder of games when it is created, so all trajectories share it.
    """
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
    # Any split would do, because `AlfworldEnv.start` replaces its games. But with `train`, the library
    # could also compute an expert's plans, and shuffle the numbers in names such as `drawer 3`.
    return get_environment("AlfredTWEnv")(settings, train_eval="eval_out_of_distribution")


# All trajectories share the shop's search engine, which must be called from one thread.
_SHOP = ThreadPoolExecutor(1, thread_name_prefix="webshop")


@dataclass(eq=False, kw_only=True)
class WebshopEnv(ThreadWorldEnv):
    """WebShop: find and buy a product (arXiv 2207.01206); the key of a game is its goal's number.

    The first game of a process loads the shop, which can take minutes.

    Args:
        num_products: number of products of the shop, 100, 1000 or 100000; null: all.
    """

    num_products: Literal[100, 1000, 100000] | None = 1000
    max_turns: PositiveInt = 15
    deadline_s: PositiveFloat = 600.0
    _thread: Executor = field(default=_SHOP, init=False)

    def start(self, key: str) -> Scene:
        if not key.isdecimal():
            raise EnvError(
                f"the key of a WebShop game is the number of its goal, and not {key[:40]!r}"
            )
        environment_class, server = load_shop(self.num_products)
        if int(key) >= len(server.goals):
            raise EnvError(f"the shop has {len(server.goals)} goals, and no goal {key}")
        self._env = environment_class(
            observation_mode="text",
            num_products=self.num_products,
            server=server,
            session_prefix=f"{next(_SESSION_NUMBERS)}-",
        )
        text, _ = self._env.reset(session=int(key))
        return Scene(text=text, choices=self._choices())

    def act(self, action: str) -> Scene:
        if not (action.startswith(("search[", "click[")) and action.endswith("]")):
            raise AgentMistake(
                "This is no action; expected search[words] or click[what can be clicked]."
            )
        text, reward, done, _ = self._env.step(action)
        return Scene(
            text=text,
            reward=float(reward),
            done=bool(done),
            solved=done and reward == 1,
            choices=() if done else self._choices(),
        )

    def _choices(self) -> tuple[str, ...]:
        available = self._env.get_available_actions()
        choices = ["search[words]"] if available["has_search_bar"] else []
        # The search button is listed among the clickables, but `click[search]` does nothing.
        choices += [f"click[{name}]" for name in available["clickables"] if name != "search"]
        return tuple(choices)


@cache
def load_shop(num_products: int | None) -> tuple[Any, Any]:
    """Return the class of the environment, and the shop's server with its products."""
    try:
        from web_agent_site.envs import WebAgentTextEnv
    except ImportError as error:
        repository = "https://github.com/princeton-nlp/WebShop"
        raise EnvError(
            f"env webshop needs the package web_agent_site: install {repository} by its setup.sh"
        ) from error
    server = WebAgentTextEnv(observation_mode="text", num_products=num_products).server
    return WebAgentTextEnv, server
