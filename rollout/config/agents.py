"""Section of a config about an agent, and the team that is built from these sections."""

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator

from rollout.base.lookup import lookup
from rollout.base.options import Registry
from rollout.base.section import Section
from rollout.base.signatures import check_call
from rollout.config.choice import OptionsByName, check_options_by_name
from rollout.engines import Engine, EngineClient, PolicyClient
from rollout.environments import TOOLS
from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Sampling
from rollout.teams.roles import ROLES, Agent, ChatRules, Role
from rollout.teams.team import Team

TOOL_REGISTRY = Registry(
    kind="tool",
    registered=TOOLS,
    takes=(),
    supplied=frozenset({"env", "sandbox", "calls"}),
)
ToolOptions = Annotated[
    OptionsByName, AfterValidator(partial(check_options_by_name, TOOL_REGISTRY))
]


class AgentConfig(Section):
    """An agent: everything that changes its behaviour."""

    # Policy that plays the agent.
    policy: str
    # Name in ROLES, or an import path; "": the agent's own name.
    role: str = ""
    # System prompt in place of the role's; "" leaves the message out.
    system: str | None = None
    # Template of the user's messages in place of the role's.
    user: str | None = None
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    # Maximum number of tokens of a reply.
    max_tokens: int = Field(256, ge=1)
    # Tools that the agent's chats may call, by name or import path, with their options.
    tools: ToolOptions = Field(default_factory=dict)
    chats: ChatRules = ChatRules()

    @field_validator("role")
    @classmethod
    def _check_role(cls, role: str) -> str:
        if role:
            lookup("agent role", role, ROLES)
        return role


def build_role(name: str, config: AgentConfig) -> Role:
    """Return the role of an agent, with the prompts of its config in place of the role's own."""
    role_name = config.role or name
    role = lookup("agent role", role_name, ROLES)
    parse = getattr(role, "parse", role)
    check_call(f"agents.{name}.role '{role_name}'", parse, ("text",), keywords=())
    if not isinstance(role, Role):  # a parser alone; the config has the prompts
        role = Role(name=name, system="", user="", parse=parse)
    return replace(
        role,
        system=role.system if config.system is None else config.system,
        user=role.user if config.user is None else config.user,
    )


def build_team(agents: Mapping[str, AgentConfig], players: Mapping[str, PolicyClient]) -> Team:
    """Return the team of these agents; `players` has the client of each policy."""
    return Team({name: _build_agent(name, config) for name, config in agents.items()}, players)


def build_player(
    engine: Engine,
    renderer: Renderer,
    *,
    max_in_flight: int | asyncio.Semaphore | None = None,
    **settings: Any,
) -> EngineClient:
    """Return a client of an engine; calls beyond a bound wait and are made in the order of their arrival.

    Args:
        max_in_flight: bound on the concurrent calls of this client; or a semaphore, which bounds
            those of all clients that share it; None: no bound.
        settings: further settings of `EngineClient`.
    """
    slots = asyncio.Semaphore(max_in_flight) if isinstance(max_in_flight, int) else max_in_flight
    return EngineClient(engine=engine, renderer=renderer, slots=slots or nullcontext(), **settings)


def _build_agent(name: str, config: AgentConfig) -> Agent:
    tools = {
        tool: partial(TOOL_REGISTRY.find(tool), **TOOL_REGISTRY.arguments(tool, options))
        for tool, options in config.tools.items()
    }
    return Agent(
        name=name,
        role=build_role(name, config),
        policy=config.policy,
        sampling=Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_tokens=config.max_tokens,
        ),
        chats=config.chats,
        tools=tools,
    )
