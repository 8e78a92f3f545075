"""Environments of OpenEnv, which a server plays over OpenEnv's WebSocket protocol."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from string import Formatter
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue, PositiveFloat, PositiveInt

from rollout.base.errors import EnvError
from rollout.base.event_loop import per_loop
from rollout.environments.protocol import AgentMistake
from rollout.environments.text_world import Scene, WorldEnv

if TYPE_CHECKING:
    from rollout.environments.openenv_session import OpenEnvSession


def openenv_sessions(*, url: str = "", servers: int = 1, sessions: int = 1, **_: Any) -> int:
    """Return the number of games that can be played at a time with these options of `OpenEnvEnv`."""
    return sessions if url else sessions * servers


@dataclass(eq=False, kw_only=True)
class OpenEnvEnv(WorldEnv):
    """Environment of a server that speaks OpenEnv's protocol.

    The key of a game is a JSON object with the arguments of the reset, such as `{"seed": 7}`. Equal
    arguments must begin equal games. Every trajectory has a session of its own, and the sum of the
    rewards of its steps is the outcome.

    Args:
        url: base URL of a running server.
        command: program and arguments that start a server, in which `{port}` is the port that it
            listens on; give this or `url`. It runs until the run ends.
        servers: number of processes of the command.
        sessions: number of sessions that one server plays at a time; OpenEnv's default is 1.
        action: fields of an action. `{text}` in a value is the agent's text, and the value
            `{json}` is the text read as JSON. null: the text itself is the action, a JSON object.
        observation: text that agents see, with fields of the observation in braces, such as
            `{question}` or `{messages[0][content]}`; "": all fields as JSON.
        goal: least sum of rewards with which a game counts as solved; null: any above 0.
        start_s: seconds within which a server must have started, or have a free session.
    """

    url: str = ""
    command: Sequence[str] = ()
    servers: PositiveInt = 1
    sessions: PositiveInt = 1
    action: Mapping[str, JsonValue] | None = None
    observation: str = ""
    goal: float | None = None
    start_s: PositiveFloat = 120.0
    _session: "OpenEnvSession | None" = field(default=None, init=False)
    _slot: AsyncExitStack = field(default_factory=AsyncExitStack, init=False)
    _return: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if bool(self.url) == bool(self.command):
            raise ValueError("env openenv needs either `url` or `command`")
        if self.command and not any("{port}" in part for part in self.command):
            raise ValueError("env openenv: `command` has no '{port}', the port to listen on")
        if self.action is not None:
            form = json.dumps(self.action)
            if "{text}" not in form and '"{json}"' not in form:
                raise ValueError("env openenv: no value of `action` has '{text}' or '{json}'")
        try:
            list(Formatter().parse(self.observation))
        except ValueError as error:
            raise ValueError(f"env openenv: `observation` is no format: {error}") from error

    async def begin(self, key: str) -> Scene:
        # aiohttp is imported only where it is used; that takes 0.2 s.
        from rollout.environments.openenv_session import open_session

        reset = _json_object(key)
        if reset is None:
            raise EnvError(
                f'the key of an OpenEnv game is the arguments of its reset, such as {{"seed": 7}}, '
                f"and not {key[:40]!r}"
            )
        server = self.url or tuple(self.command)
        slots = openenv_sessions(url=self.url, servers=self.servers, sessions=self.sessions)
        # Waiting here and not at the server keeps the order in which trajectories began.
        free_slots = per_loop(("openenv", server, slots), partial(asyncio.Semaphore, slots))
        await self._slot.enter_async_context(free_slots)
        self._session, data = await open_session(
            self._find_url,
            reset,
            deadline_s=self.deadline_s,
            patience_s=self.start_s,
            restarts=not self.url,
        )
        scene = self._scene_of(data)
        self._check_beginning(server, key, scene)
        return scene

    async def carry_out(self, action: str) -> Scene:
        assert self._session is not None
        data = await self._session.ask("step", self._action_of(action))
        self._return += _finite_reward(data.get("reward"))
        return self._scene_of(data)

    async def end(self) -> None:
        try:
            if self._session is not None:
                await self._session.close()
        finally:
            await self._slot.aclose()

    async def _find_url(self) -> str:
        """Return the option `url`, or the URL of a server that `command` starts."""
        from rollout.environments.openenv_session import servers_of

        if self.url:
            return self.url.rstrip("/")
        return await servers_of(tuple(self.command), self.servers).url(self.start_s)

    def _check_beginning(self, server: Any, key: str, scene: Scene) -> None:
        """Raise EnvError if a game with these arguments began differently before."""
        digests: dict[tuple[str, str], bytes] = per_loop(("openenv beginnings", server), dict)
        digest = sha256(scene.text.encode()).digest()
        if digests.setdefault((key, self.observation), digest) != digest:
            raise EnvError(
                f"openenv: two resets with {key[:100]} began with different observations, so the "
                "trajectories of a task cannot be compared; let the environment choose its game by "
                "the arguments of reset, or leave out of `observation` what is always different"
            )

    def _action_of(self, text: str) -> dict[str, Any]:
        """Return the action that an agent's text stands for; raise AgentMistake if it is none."""
        if self.action is not None:
            return {name: _fill(value, text) for name, value in self.action.items()}
        action = _json_object(text)
        if action is None:
            raise AgentMistake("This is no action; expected a JSON object.")
        return action

    def _scene_of(self, data: Mapping[str, Any]) -> Scene:
        """Return the scene of a reply; it is solved if the rewards so far reach the goal."""
        observation = data.get("observation")
        if not isinstance(observation, dict):
            raise EnvError("openenv: the server's reply has no observation")
        return Scene(
            text=self._render_observation(observation),
            reward=_finite_reward(data.get("reward")),
            done=bool(data.get("done")),
            solved=self._return > 0 if self.goal is None else self._return >= self.goal,
        )

    def _render_observation(self, observation: Mapping[str, Any]) -> str:
        if not self.observation:
            fields = {name: value for name, value in observation.items() if name != "metadata"}
            return json.dumps(fields, ensure_ascii=False)
        try:
            return self.observation.format_map(observation)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise EnvError(
                f"openenv: the option `observation` does not fit ({type(error).__name__}: {error}); "
                f"the observation has the fields {', '.join(observation)}"
            ) from error


def _fill(value: JsonValue, text: str) -> JsonValue:
    """Return a value of the option `action`, with an agent's text in place of `{text}` or `{json}`.

    Raises:
        AgentMistake: the value is `{json}`, and the text is not JSON, or is null.
    """
    if isinstance(value, dict):
        return {name: _fill(part, text) for name, part in value.items()}
    if isinstance(value, list):
        return [_fill(part, text) for part in value]
    if value == "{json}":
        parsed: JsonValue = _parse_json(text)
        if parsed is None:
            raise AgentMistake("This is no action; expected JSON.")
        return parsed
    return value.replace("{text}", text) if isinstance(value, str) else value


def _finite_reward(value: Any) -> float:
    """Return the reward in a server's reply as a float; null is 0.

    Raises:
        EnvError: the value is not a number, or not a finite float.
    """
    if value is None:
        return 0.0
    if isinstance(value, int | float):
        with suppress(OverflowError):  # raised for an integer above 1e308
            reward = float(value)
            if math.isfinite(reward):
                return reward
    raise EnvError(f"openenv: the reward {repr(value)[:40]} is not a finite number")


def _json_object(text: str) -> dict[str, Any] | None:
    value = _parse_json(text)
    return value if isinstance(value, dict) else None


def _parse_json(text: str) -> Any:
    """Return the value of a JSON text; None if it is malformed, or has numbers that JSON lacks."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
