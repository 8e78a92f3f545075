"""Factory of live objects from config sections: a team, its orchestra, its environments, its rewards."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from rollout.base.options import lookup
from rollout.config.sections import AgentConfig, EnvConfig, OrchestraConfig, RewardConfig
from rollout.engines import Engine
from rollout.environments import ENVS
from rollout.environments.protocol import Env
from rollout.models.chat_template import Renderer
from rollout.orchestras import ORCHESTRAS
from rollout.records.completion import Sampling
from rollout.records.trajectory import Group, Task, Turn
from rollout.rewards import ALLOCATORS
from rollout.rewards.penalties import PENALTIES, apply_penalties
from rollout.teams.episode import Orchestra
from rollout.teams.team import ROLES, Agent, EngineClient, PolicyClient, Role, Team


def build_role(name: str, config: AgentConfig) -> Role:
    """The agent's role with the config's prompts in place of the role's own."""
    role = lookup("agent role", config.role or name, ROLES)
    system = role.system if config.system is None else config.system
    return replace(role, system=system, user=role.user if config.user is None else config.user)


def build_team(agents: Mapping[str, AgentConfig], players: Mapping[str, PolicyClient]) -> Team:
    """The team of `agents`, each playing its policy's player."""
    return Team(
        {
            name: Agent(
                name=name,
                role=build_role(name, config),
                policy=config.policy,
                sampling=Sampling(
                    temperature=config.temperature,
                    top_p=config.top_p,
                    top_k=config.top_k,
                    max_tokens=config.max_tokens,
                ),
            )
            for name, config in agents.items()
        },
        players,
    )


def build_player(
    engine: Engine, renderer: Renderer, *, max_in_flight: int | None = None, **settings: Any
) -> EngineClient:
    """A player with at most `max_in_flight` calls under way at once, first come, first served, and its own settings."""
    slots = asyncio.Semaphore(max_in_flight) if max_in_flight else nullcontext()
    return EngineClient(engine=engine, renderer=renderer, slots=slots, **settings)


def build_orchestra(config: OrchestraConfig) -> Orchestra:
    """The orchestra with its options filled in."""
    return partial(lookup("orchestra", config.name, ORCHESTRAS), **config.arguments)


def build_env(config: EnvConfig, **tools: Any) -> Callable[[Task], Env]:
    """A maker of fresh environments; `tools` are the live things an environment needs, such as a retriever."""
    return partial(lookup("env", config.name, ENVS), **config.arguments, **tools)


def build_allocator(config: RewardConfig, agents: Mapping[str, AgentConfig]) -> Callable[[Group], Group]:
    """The allocator with its options, and after it the penalties; every reward is checked on its way out."""
    allocator = partial(lookup("reward", config.name, ALLOCATORS), **config.arguments)
    limits = {name: agent.max_tokens for name, agent in agents.items()}
    penalties = [_penalty(name, options, limits) for name, options in config.penalties.items()]
    return lambda group: apply_penalties(allocator(group), penalties)


def _penalty(name: str, options: Mapping[str, Any], limits: Mapping[str, int]) -> Callable[[Turn], float | None]:
    penalty = lookup("penalty", name, PENALTIES)
    if "max_tokens" in inspect.signature(penalty).parameters:  # the agents' own, where the config sets no other
        options = {**options, "max_tokens": {**limits, **options.get("max_tokens", {})}}
    return partial(penalty, **options)
