"""Roles and agents: prompts with slots, the parser of the reply, and the policy that plays them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, model_validator

from rollout.base.section import Section
from rollout.environments.tools import ToolMaker
from rollout.records.trajectory import Message, Sampling, TokenCandidates, ToolUse

WhenFull = Literal["stop", "fold", "drop_oldest_results"]


class ChatRules(Section):
    """Limits of an agent's chats: tool calls, and what happens when a chat is full."""

    # Action when a chat is full, because its prompt leaves no room for a reply: end the chat; fold it into a summary;
    # or drop the older half of the tool results.
    when_full: WhenFull = "stop"
    # Agent that sums up a full chat, with when_full: fold.
    summariser: str | None = None
    # Most tool calls of one reply; further ones are not made.
    calls_per_turn: int = Field(8, ge=1)
    # Most tool calls of the agent in a trajectory; further ones are not made.
    calls: int = Field(64, ge=1)
    # Deadline of a tool call in seconds; a call that takes longer gets a result that says so. A call that is a step of
    # the environment has collection.tool_s instead. If collection.tool_s is lower than call_s, it ends every tool call,
    # and fails the trajectory.
    call_s: float = Field(30.0, gt=0)
    # Characters of a tool result that the agent reads; the middle of a longer one is left out.
    result_chars: int = Field(4000, ge=2)

    @model_validator(mode="after")
    def _check_summariser(self) -> ChatRules:
        if (self.when_full == "fold") != (self.summariser is not None):
            raise ValueError(
                "when_full: fold needs summariser, the agent that sums up, and summariser needs "
                "when_full: fold; set both or neither"
            )
        return self


Parser = Callable[[str], str | None]  # text of a reply -> its value, None if it is malformed


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A system prompt, a user template with named slots, and the parser of the reply."""

    name: str
    system: str
    user: str  # str.format template; the orchestra fills the slots
    parse: Parser

    def messages(self, **slots: object) -> tuple[Message, ...]:
        """Return the system prompt and the filled user template; an empty one is left out.

        Raises:
            KeyError: the template has a slot that was not given.
        """
        messages = []
        if self.system:
            messages.append(Message(role="system", content=self.system))
        if text := self.user.format(**slots):
            messages.append(Message(role="user", content=text))
        return tuple(messages)


ROLES: dict[str, Role] = {}  # registered roles by name


def register_agent(name: str, *, system: str, user: str) -> Callable[[Parser], Parser]:
    """Register the decorated parser, with its prompts, as the role `name`.

    A user's role replaces the built-in role of the same name, also in built-in teams, whichever of
    the two is registered first.

    Raises:
        ValueError: the user's code has registered another role of this name.
    """

    def register(parse: Parser) -> Parser:
        role = Role(name=name, system=system, user=user, parse=parse)
        registered = ROLES.get(name)
        if registered is None or _is_built_in(registered):
            ROLES[name] = role
        elif not _is_built_in(role):
            raise ValueError(
                f"agent role '{name}' is registered twice, in {registered.parse.__module__} and in "
                f"{parse.__module__}; give one of them another name"
            )
        return parse

    return register


def _is_built_in(role: Role) -> bool:
    """Return True if a role is part of this package."""
    return role.parse.__module__.partition(".")[0] == "rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A role with its sampling and the policy that plays it."""

    name: str
    role: Role
    policy: str
    # Sampling of the calls. Each call sets stop, seed and session itself, and in a chat also grammar and candidates.
    sampling: Sampling
    chats: ChatRules = field(default_factory=ChatRules)
    tools: Mapping[str, ToolMaker] = field(default_factory=dict)  # opened for each trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReply:
    """A reply of an agent."""

    text: str
    value: str | None  # the parser's result, None if the reply is malformed
    turn: int  # index of the turn
    message: Message | None = None  # reply as a chat records it; None outside of chats
    problems: Mapping[str, str] = field(default_factory=dict)  # error of each malformed call, by id
    candidates: tuple[TokenCandidates, ...] = ()  # likeliest tokens at each position, if asked for

    @property
    def calls(self) -> tuple[ToolUse, ...]:
        """The tool calls of the reply, in their order."""
        return self.message.calls if self.message else ()
