"""Chats: conversations of an agent in a trajectory, with tools and rules for a full context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from rollout.base.async_tasks import gather_or_cancel
from rollout.base.errors import PromptTooLong
from rollout.engines import ChatState
from rollout.environments.protocol import ToolCall
from rollout.environments.tools import Tool, call_tool
from rollout.models.grammars import ReplyConstraint
from rollout.models.tool_calls import ToolFormat
from rollout.records.call_record import CallRecord
from rollout.records.trajectory import Message, ToolUse, Turn
from rollout.teams.roles import Agent, AgentReply, WhenFull

_UNANSWERED = "This tool was not called: there were no turns left for it."
_DROPPED = "[This result was dropped to save space.]"

# (name of the tool, function that makes the call, index of the turn that asked) -> result
ToolRunner = Callable[[str, Callable[[], Awaitable[ToolCall]], int], Awaitable[ToolCall]]


class ChatHost(Protocol):
    """Part of a trajectory's session that a chat needs (see `TeamSession`)."""

    run_tool: ToolRunner
    call_record: CallRecord  # results of tool calls that a restart must not repeat

    async def take_turn(
        self, agent: Agent, messages: tuple[Message, ...], chat: ChatState | None = None
    ) -> tuple[Turn, AgentReply]: ...

    async def act(self, name: str, /, **slots: object) -> AgentReply: ...

    def count_tool_call(self, agent: str) -> int: ...

    def score(self, turn: int, /, **scores: float) -> None: ...

    async def prompt_tokens(
        self, agent: Agent, messages: Sequence[Message], chat: ChatState
    ) -> int: ...


class Chat:
    """A conversation with one agent, opened by `TeamSession.chat`.

    Every reply is a turn. Its prompt is the previous turn's prompt and reply tokens, followed by the
    new text. If the template rewrites earlier messages, or the chat was shortened, all messages are
    tokenized anew, and the turn's score `root` is 1. When a prompt leaves no room for its reply, the
    agent's `when_full` decides:

    - `stop`: the chat is `full`, and every later message gets the latest reply again; `reply_to`
      raises `PromptTooLong` instead. The score `full` of the latest reply's turn is 1.
    - `fold`: `summariser` sums the chat up, and it continues from the summary. The next turn's
      score `folded` is 1.
    - `drop_oldest_results`: a note replaces the older half of the tool results, and if that is not
      enough, the older half of the rest, and so on. The next turn's score `dropped_results` is the
      number of replaced results.

    If the prompt is still too long after that, the chat is full as with `stop`. If the agent has not
    replied yet, `PromptTooLong` is raised instead. Other failures are raised as by
    `TeamSession.take_turn`.

    Attributes:
        id: id of the chat in its trajectory.
        messages: the conversation so far.
        latest: the agent's latest reply, None before the first.
        full: True if there is no room for another reply.
    """

    def __init__(
        self, host: ChatHost, agent: Agent, id: str, system: str, tools: Sequence[Tool]
    ) -> None:
        self.id = id
        self.messages = [Message(role="system", content=system)] if system else []
        self.latest: AgentReply | None = None
        self.full = False
        self._host = host
        self._agent = agent
        self._tools = {tool.schema.name: tool for tool in tools}
        self._state = ChatState(id=id, tools=tuple(tool.schema for tool in tools))
        self._open_calls: tuple[ToolUse, ...] = ()  # tool calls without a result
        self._replying = False
        self._question: tuple[str, ...] = ()  # stored by the first fold (see `_question_texts`)
        # Scores of the next turn that say how room was made for it.
        self._pending_scores: dict[str, float] = {}

    async def say(self, text: str) -> AgentReply:
        """Send a message and return the agent's reply.

        Tool calls of the latest reply that have no result yet are not made: their result says so.
        """
        for call in self._open_calls:
            self._add_result(call, _UNANSWERED)
        self.messages.append(Message(role="user", content=text))
        return await self._reply()

    async def ask(self, **slots: object) -> AgentReply:
        """Send the role's user template filled by `slots`; raise KeyError if a slot is missing."""
        return await self.say(self._agent.role.user.format(**slots))

    async def tool(self, call_id: str, result: str) -> AgentReply | None:
        """Add the result of a tool call of the latest reply; once all have results, continue the chat.

        Returns:
            The agent's next reply, or None while other calls of the latest reply have no result.

        Raises:
            KeyError: no call of this id waits for a result.
        """
        call = next((call for call in self._open_calls if call.id == call_id), None)
        if call is None:
            open_ids = ", ".join(call.id for call in self._open_calls)
            raise KeyError(f"chat {self.id}: no call '{call_id}' waits; open: {open_ids}")
        self._add_result(call, result)
        return None if self._open_calls else await self._reply()

    def take_over(self, other: Chat) -> None:
        """Continue from another chat's messages and latest turn; the other chat does not change."""
        self.messages = list(other.messages)
        self.latest = other.latest
        self._question = other._question
        self._state = replace(self._state, before=other._state.before)

    async def reply_to(
        self,
        messages: Sequence[Message],
        *,
        stops: tuple[str, ...] = (),
        on_text: Callable[[str, ToolFormat], bool] | None = None,
        constraint: ReplyConstraint | None = None,
        candidates: int = 0,
    ) -> AgentReply:
        """Add messages to the conversation and return the agent's reply, for the gateway.

        The gateway's client makes the tool calls itself. Therefore the messages include the tools'
        results, and unlike `say`, this adds no results.

        Args:
            messages: new messages of the conversation.
            stops: texts that end the reply (see `ChatState.stops`).
            on_text: called with the reply as it grows (see `ChatState.on_text`).
            constraint: form of the reply (see `ChatState.constraint`).
            candidates: number of the likeliest tokens that are reported for each sampled one.

        Raises:
            PromptTooLong: the messages leave no room for a reply.
        """
        self._state = replace(
            self._state,
            stops=stops,
            on_text=on_text,
            constraint=constraint,
            candidates=candidates,
        )
        self.messages += messages
        reply = await self._reply()
        if self.full:
            raise PromptTooLong(f"chat {self.id} is full: its messages leave no room for a reply")
        return reply

    async def prompt_tokens(self, messages: Sequence[Message]) -> int:
        """Return the number of prompt tokens of a reply to the conversation with these messages added."""
        return await self._host.prompt_tokens(self._agent, (*self.messages, *messages), self._state)

    async def run(self, max_turns: int) -> AgentReply:
        """Make the latest reply's tool calls and continue, until a reply makes none or the chat is full.

        Calls of one reply are made concurrently if their tools are `parallel`, the others in their
        order, since they may share a session. Results are in the order of the calls. The result of
        a call that cannot be parsed or made describes the problem.

        Args:
            max_turns: maximum number of replies to ask for; calls of the last one stay open.

        Returns:
            The latest reply.

        Raises:
            ValueError: the agent has not replied yet.
            EnvError: a tool failed for good.
        """
        if self.latest is None:
            raise ValueError(
                f"chat {self.id}: there is no reply to continue from; call say() first"
            )
        for _ in range(max_turns):
            if not self._open_calls or self.full:
                break
            calls = self._open_calls
            results = await self._results(calls, self.latest)
            for call, result in zip(calls, results, strict=True):
                self._add_result(call, result)
            await self._reply()
        return self.latest

    def fold(self, summary: str) -> None:
        """Replace the messages up to the latest reply by a summary.

        The system prompt stays. The question, the summary and the messages since the latest reply
        are joined to one user message. Before the first reply, the question follows the summary.
        After a further reply, a later summary replaces the earlier one and the messages that were
        joined to it.

        Tool calls of the latest reply that have no result yet are dropped.
        """
        summarised_count = 0  # number of messages up to the latest reply
        for number, message in enumerate(self.messages, start=1):
            if message.role == "assistant":
                summarised_count = number

        system = [message for message in self.messages[:1] if message.role == "system"]
        summarised = self.messages[:summarised_count]
        new_messages = self.messages[max(summarised_count, len(system)) :]

        # Store the question now: after this fold it is part of the message with the summary, where a
        # later fold could not find it.
        if not self._question:
            self._question = _question_texts(summarised or new_messages)
        parts = list(self._question) if summarised else []
        parts.append(f"What has happened since:\n{summary}")
        parts += [message.content for message in new_messages]
        self.messages = [*system, Message(role="user", content="\n\n".join(parts))]
        # The reply that makes these calls is no message any more, so a result would answer nothing.
        self._open_calls = ()

    def _add_result(self, call: ToolUse, result: str) -> None:
        self.messages.append(Message(role="tool", content=result, answers=call.id))
        self._open_calls = tuple(other for other in self._open_calls if other.id != call.id)

    async def _reply(self) -> AgentReply:
        """Return the agent's reply to the messages so far, or its latest reply if the chat is full.

        Raises:
            RuntimeError: another task waits for a reply of this chat.
        """
        if self.full and self.latest is not None:
            return self.latest
        if self._replying:
            raise RuntimeError(
                f"chat {self.id} waits for a reply already; await that call, or open another chat"
            )
        self._replying = True
        try:
            return await self._take_turn()
        finally:
            self._replying = False

    async def _take_turn(self) -> AgentReply:
        """Add the agent's next reply to the chat and return it, after making room if needed.

        If no room can be made, the chat becomes `full`, and the latest reply is returned again.

        Raises:
            PromptTooLong: no room can be made for the first reply.
        """
        while True:
            try:
                turn, reply = await self._host.take_turn(
                    self._agent, tuple(self.messages), self._state
                )
                break
            except PromptTooLong:
                if await self._make_room():
                    continue
                if self.latest is None:
                    raise
                self.full = True
                self._host.score(self.latest.turn, full=1.0)
                return self.latest

        if self._pending_scores:
            self._host.score(reply.turn, **self._pending_scores)
            self._pending_scores = {}
        self._state = replace(self._state, before=turn)
        self.latest = reply
        self._open_calls = reply.calls
        self.messages.append(reply.message or Message(role="assistant", content=reply.text))
        return reply

    async def _make_room(self) -> bool:
        """Shorten the chat as the agent's `when_full` says; return False if that is not possible."""
        make_room = WHEN_FULL.get(self._agent.chats.when_full)
        return make_room is not None and await make_room(self)

    async def _results(self, calls: Sequence[ToolUse], reply: AgentReply) -> list[str]:
        """Make the tool calls of a reply; return their results.

        The result of a call that is not made says why.
        """
        results = [self._refusal(number, call, reply) for number, call in enumerate(calls)]
        allowed = [number for number, refusal in enumerate(results) if not refusal]
        parallel = [number for number in allowed if self._is_parallel(calls[number])]
        in_order = [number for number in allowed if number not in parallel]

        async def make_calls(numbers: Iterable[int]) -> None:
            for number in numbers:
                results[number] = await self._call(calls[number], reply)

        sequences = [in_order]
        sequences += [[number] for number in parallel]
        await gather_or_cancel(make_calls(numbers) for numbers in sequences)
        return results

    def _is_parallel(self, call: ToolUse) -> bool:
        return call.name in self._tools and self._tools[call.name].parallel

    def _refusal(self, number: int, call: ToolUse, reply: AgentReply) -> str:
        """Return the reason why a call is not made; "" if it is made.

        A call that is well-formed and within `calls_per_turn` counts towards the agent's `calls`.

        Args:
            number: position of the call in the reply, from 0.
        """
        rules = self._agent.chats
        if call.id in reply.problems:
            return reply.problems[call.id]
        if number >= rules.calls_per_turn:
            return f"This call was not made: a reply may make {rules.calls_per_turn}."
        if self._host.count_tool_call(self._agent.name) > rules.calls:
            return (
                f"This call was not made: all {rules.calls} calls are spent. Answer without tools."
            )
        return ""

    async def _call(self, call: ToolUse, reply: AgentReply) -> str:
        """Make a tool call and return its result; if the call is wrong or fails, the result says why.

        Raises:
            EnvError: the tool failed for good.
        """
        rules = self._agent.chats
        tool = self._tools.get(call.name)
        make_call = partial(
            call_tool, self._tools, call, call_s=rules.call_s, max_chars=rules.result_chars
        )
        # The episode adds the tool event of a step of the environment, so `run_tool` must not add
        # another. The step is made again after a restart, so it is not in the call record either.
        if tool is not None and tool.recorded_by_env:
            return (await make_call()).result
        if tool is not None and tool.repeat_on_replay:
            call_or_recall = make_call
        else:
            # A call that was answered before a restart gets its recorded result.
            call_or_recall = partial(
                self._host.call_record.once,
                ToolCall,
                make_call,
                self.id,
                call.name,
                call.arguments,
            )
        return (await self._host.run_tool(call.name, call_or_recall, reply.turn)).result

    async def drop_results(self) -> bool:
        """Replace the older half of the remaining tool results by a note; return False if there are none."""
        remaining = []  # indices of the messages with these results
        for index, message in enumerate(self.messages):
            if message.role == "tool" and message.content != _DROPPED:
                remaining.append(index)
        if not remaining:
            return False
        dropped = remaining[: (len(remaining) + 1) // 2]
        for index in dropped:
            self.messages[index] = replace(self.messages[index], content=_DROPPED)
        earlier = self._pending_scores.get("dropped_results", 0.0)
        self._pending_scores["dropped_results"] = earlier + len(dropped)
        return True

    async def sum_up(self) -> bool:
        """Replace the chat by the summariser's summary; return False if that is not possible.

        It is not if the chat has no reply to sum up, or if the summariser has no room for any of it. If
        the chat is too long for the summariser, only its newer half is summed up, and so on.
        """
        if not any(message.role == "assistant" for message in self.messages):
            return False
        spoken = [message for message in self.messages if message.role != "system"]
        conversation = "\n\n".join(f"{message.role}: {message.text}" for message in spoken)
        summariser = self._agent.chats.summariser or self._agent.name
        while True:
            try:
                reply = await self._host.act(summariser, conversation=conversation)
                break
            except PromptTooLong:
                if len(conversation) < 2:
                    return False
                conversation = conversation[len(conversation) // 2 :]  # the newer half
        self.fold(reply.value or reply.text)
        self._pending_scores["folded"] = 1.0
        return True


def _question_texts(messages: Iterable[Message]) -> tuple[str, ...]:
    """Return the texts of a chat's question: the user messages before the first reply to one.

    An assistant message that opens the chat is no reply, so it does not end the question.
    """
    texts = []
    for message in messages:
        if message.role == "user":
            texts.append(message.content)
        elif message.role == "assistant" and texts:
            break
    return tuple(texts)


# Functions that make room for a reply and return True if they did, by `when_full`; `stop` has none.
WHEN_FULL: dict[WhenFull, Callable[[Chat], Awaitable[bool]]] = {
    "fold": Chat.sum_up,
    "drop_oldest_results": Chat.drop_results,
}
