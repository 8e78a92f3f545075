"""Interface between a team and its policies: a chat goes in, a reply comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout.models.grammars import ReplyConstraint
from rollout.models.tool_calls import ToolFormat, ToolSchema
from rollout.records.trajectory import Completion, Message, Sampling, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatState:
    """State of a chat with several turns, besides its messages.

    Attributes:
        id: the chat's name in its trajectory.
        tools: tools that the policy may call, the same in every turn.
        before: the chat's latest turn.
        on_text: called while the reply is sampled, with its text so far (including tool calls and
            thoughts) and the format of the tool calls; returns False to end the reply.
        stops: texts that end the reply, outside of thoughts and tool calls.
        constraint: form that the reply must have, for clients that constrain replies.
        candidates: see `Sampling.candidates`.
    """

    id: str
    tools: tuple[ToolSchema, ...] = ()
    before: Turn | None = None
    on_text: Callable[[str, ToolFormat], bool] | None = None
    stops: tuple[str, ...] = ()
    constraint: ReplyConstraint | None = None
    candidates: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReply:
    """Reply of a policy in a chat.

    Attributes:
        prompt_ids: token ids of the prompt [P].
        trainable: False if the reply is text without tokens.
        shown: messages of the prompt, if they were cut to fit; None if they were not.
        raw: text with special tokens, except the stop token; None for a reply without a chat.
        tool_format: format in which the policy calls tools.
        root: True if the prompt's tokens do not continue those of the chat's latest turn.
        grammar: grammar that constrained the sampling, as in `Sampling`.
    """

    text: str
    prompt_ids: tuple[int, ...]
    completion: Completion
    trainable: bool = True
    shown: tuple[Message, ...] | None = None
    raw: str | None = None
    tool_format: ToolFormat = "fenced"
    root: bool = False
    grammar: str = ""


class PolicyClient(Protocol):
    """A policy that replies in chats."""

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        """Return the policy's next reply.

        Args:
            chat: state of the chat; None if this is its only reply.

        Raises:
            EngineError: there is no reply.
            PromptTooLong: the prompt leaves no room for a reply.
        """
