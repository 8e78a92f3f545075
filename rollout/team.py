"""A team: agents by name, bound to the engines of the policies they play."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollout.agent import Role
from rollout.engines.protocol import Engine, Sampling
from rollout.records import Turn
from rollout.renderer import Renderer
from rollout.seeds import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A role with its sampling and the policy it plays."""

    name: str
    role: Role
    policy: str
    sampling: Sampling  # stop and seed are filled in per call


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """A policy's rollout side: where its tokens come from and how its chats are written."""

    engine: Engine
    renderer: Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an agent said."""

    text: str
    value: str | None  # the parser's result, None when the reply is malformed
    turn: int  # index of the turn


@dataclass(frozen=True, slots=True)
class Team:
    """Who can act, shared by all trajectories of a run."""

    agents: Mapping[str, Agent]
    players: Mapping[str, Player]  # by policy

    def seat(self, *place: int | str) -> Seat:
        """The team as one trajectory sees it; `place` is where in the run it happens and seeds its sampling."""
        return Seat(self, place)


class Seat:
    """A team in one trajectory: `act` asks one agent and writes down the turn."""

    def __init__(self, team: Team, place: tuple[int | str, ...]) -> None:
        self._team = team
        self._place = place
        self.turns: list[Turn] = []

    async def act(self, name: str, /, **slots: object) -> Reply:
        """Ask agent `name`, with its user template's slots filled by `slots`.

        Raises:
            KeyError: the team has no such agent, or its template has a slot that was not given.
            EngineError: the engine could not answer.
        """
        agent = self._team.agents[name]
        player = self._team.players[agent.policy]
        messages = agent.role.messages(**slots)
        prompt_ids = player.renderer.render(messages)
        index = len(self.turns)
        seed = derive_seed(*self._place, name, index)
        sampling = replace(agent.sampling, stop=player.renderer.stop, seed=seed)
        completion = await player.engine.generate(prompt_ids, sampling)
        text = player.renderer.decode(completion.token_ids)
        value = agent.role.parse(text) if completion.finish_reason == "stop" else None
        state = hashlib.blake2b(repr(messages).encode(), digest_size=8).hexdigest()
        self.turns.append(
            Turn(
                index=index,
                agent=name,
                policy=agent.policy,
                policy_version=completion.versions[-1].version,
                node="",
                state_key=state,
                messages=messages,
                prompt_ids=tuple(prompt_ids),
                completion_ids=completion.token_ids,
                logprobs=completion.logprobs,
                temperature=sampling.temperature,
                text=text,
                finish_reason=completion.finish_reason,
                valid=value is not None,
                seed=seed,
            )
        )
        return Reply(text=text, value=value, turn=index)
