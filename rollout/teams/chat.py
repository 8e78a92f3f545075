"""Chats: an agent's conversation in a trajectory, with tools, memory, and a stated end of its context."""

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
from rollout.models.tool_calls import ToolFormat
from rollout.records.call_record import CallRecord
from rollout.records.trajectory import Message, ToolUse, Turn
from rollout.teams.roles import Agent, AgentReply, WhenFull

_UNANSWERED = "This tool was not called: there were no turns left for it."
_DROPPED = "[This result was dropped to save space.]"
# (tool, what makes the call, turn that asked for it) -> the call made
ToolRunner = Callable[[str, Callable[[], Awaitable[ToolCall]], int], Awaitable[ToolCall]]


class ChatHost(Protocol):
    """What a chat needs of its trajectory's session."""

    run_tool: ToolRunner
    calls: CallRecord  # of tools that must not be called again

    async def take_turn(
        self, agent: Agent, messages: tuple[Message, ...], chat: ChatState | None = None
    ) -> tuple[Turn, AgentReply]: ...

    async def act(self, name: str, /, **slots: object) -> AgentReply: ...

    def count_call(self, agent: str) -> int: ...

    def score(self, turn: int, /, **scores: float) -> None: ...

    async def prompt_tokens(
        self, agent: Agent, messages: Sequence[Message], chat: ChatState
    ) -> int: ...


class Chat:
    """A conversation of one agent, who remembers it; opened by `TeamSession.chat`.

    Every reply is a turn. Its prompt is the earlier turn's own tokens and the new text; a template that rewrites what
    came before begins anew (score `root`). When a prompt leaves no room for its reply, the agent's `when_full` says
    what becomes of the chat:

    - `stop`: it is `full`; nothing more is said, and the latest reply stays the last. The turn's score `full` is 1.
    - `fold`: `summariser` sums it up, and it goes on from the summary. The next turn's score `folded` is 1.
    - `drop_oldest_results`: the older half of the results of tools is left out. The next turn's score
      `dropped_results` says how many.

    Where that is not enough, or nothing was said yet, `PromptTooLong` is raised; where there is no reply for another
    reason, an EngineError.
    """

    def __init__(
        self, host: ChatHost, agent: Agent, id: str, system: str, tools: Sequence[Tool]
    ) -> None:
        self.id = id  # in the trajectory
        self.messages = [Message(role="system", content=system)] if system else []
        self.latest: AgentReply | None = None
        self.full = False
        self.hear: Callable[[str, ToolFormat], bool] | None = (
            None  # told of replies as they grow (see `ChatState`)
        )
        self.stops: tuple[str, ...] = ()  # that end replies (see `ChatState`)
        self._host = host
        self._agent = agent
        self._tools = {tool.schema.name: tool for tool in tools}
        self._state = ChatState(id=id, tools=tuple(tool.schema for tool in tools))
        self._open: tuple[ToolUse, ...] = ()  # calls without a result
        self._replying = False
        self._changes: dict[str, float] = {}  # made for room, to be written down with the next turn

    async def say(self, text: str) -> AgentReply:
        """Say something to the agent; calls that it had made and nobody answered are told to be so."""
        for call in self._open:
            self._answer(call, _UNANSWERED)
        self.messages.append(Message(role="user", content=text))
        return await self._reply()

    async def ask(self, **slots: object) -> AgentReply:
        """Say what the role's user template makes of `slots`; KeyError if it has one that was not given."""
        return await self.say(self._agent.role.user.format(**slots))

    async def tool(self, call_id: str, result: str) -> AgentReply | None:
        """Give the result of a tool call; the agent goes on when all of a turn's are there, and until then it is None.

        Raises:
            KeyError: no call of this id waits for a result.
        """
        call = next((call for call in self._open if call.id == call_id), None)
        if call is None:
            raise KeyError(
                f"chat {self.id}: no call '{call_id}' waits; open: {', '.join(c.id for c in self._open)}"
            )
        self._answer(call, result)
        return None if self._open else await self._reply()

    def take_over(self, other: Chat) -> None:
        """Go on from where another chat stands, which does not change."""
        self.messages, self.latest = list(other.messages), other.latest
        self._state = replace(self._state, before=other._state.before)

    async def go_on(self, news: Sequence[Message]) -> AgentReply:
        """Reply to messages of somebody who keeps the conversation, and who makes the calls of tools."""
        self.messages += news
        reply = await self._reply()
        if self.full:
            raise PromptTooLong(f"chat {self.id} is full: its messages leave no room for a reply")
        return reply

    async def prompt_tokens(self, news: Sequence[Message]) -> int:
        """How many tokens the agent would be asked with if it were to go on with these messages; nothing changes."""
        return await self._host.prompt_tokens(self._agent, (*self.messages, *news), self._state)

    async def run(self, max_turns: int) -> AgentReply:
        """Make the calls of the latest reply and go on, until a reply makes none, for at most `max_turns` replies.

        Calls of one reply are made side by side where their tools are `parallel`, the others in their order: they may
        share a session. Results are in the order of the calls. A call that cannot be read or made has what is wrong as
        its result.

        Raises:
            ValueError: nothing was said yet.
            EnvError: a tool failed for good.
        """
        if self.latest is None:
            raise ValueError(
                f"chat {self.id}: there is no reply to go on from; say something first"
            )
        for _ in range(max_turns):
            if not self._open or self.full:
                break
            calls, latest = self._open, self.latest
            for call, result in zip(calls, await self._results(calls, latest), strict=True):
                self._answer(call, result)
            await self._reply()
        return self.latest

    def fold(self, summary: str) -> None:
        """Go on from a summary: of what was said, the system prompt, the first question and news stay."""
        read = max(
            (i for i, message in enumerate(self.messages) if message.role == "assistant"),
            default=-1,
        )
        head, news = self.messages[:2], self.messages[read + 1 :]
        opening = [message for message in head if message.role == "system"]
        asked = [
            message.content for message in head if message.role == "user" and message not in news
        ]
        parts = [
            *asked,
            f"What has happened since:\n{summary}",
            *(message.content for message in news),
        ]
        self.messages = [*opening, Message(role="user", content="\n\n".join(parts))]

    def _answer(self, call: ToolUse, result: str) -> None:
        self.messages.append(Message(role="tool", content=result, answers=call.id))
        self._open = tuple(other for other in self._open if other.id != call.id)

    async def _reply(self) -> AgentReply:
        if self.full and self.latest is not None:
            return self.latest
        if self._replying:
            raise RuntimeError(
                f"chat {self.id} is at a reply already; wait for that, or open another chat"
            )
        self._replying = True
        try:
            return await self._said()
        finally:
            self._replying = False

    async def _said(self) -> AgentReply:
        while True:
            try:
                state = replace(self._state, hear=self.hear, stops=self.stops)
                turn, reply = await self._host.take_turn(self._agent, tuple(self.messages), state)
                break
            except PromptTooLong:
                make_room = WHEN_FULL.get(self._agent.chats.when_full)
                if make_room is None or not await make_room(self):
                    if self.latest is None:
                        raise
                    self.full = True
                    self._host.score(self.latest.turn, full=1.0)
                    return self.latest
        if self._changes:
            self._host.score(reply.turn, **self._changes)
            self._changes = {}
        self._state = replace(self._state, before=turn)
        self.latest, self._open = reply, reply.calls
        self.messages.append(reply.message or Message(role="assistant", content=reply.text))
        return reply

    async def _results(self, calls: Sequence[ToolUse], reply: AgentReply) -> list[str]:
        results = [self._problem(number, call, reply) for number, call in enumerate(calls)]
        free = [number for number, result in enumerate(results) if not result]
        alone = [
            n for n in free if calls[n].name in self._tools and self._tools[calls[n].name].parallel
        ]

        async def make(numbers: Iterable[int]) -> None:
            for number in numbers:
                results[number] = await self._call(calls[number], reply)

        await gather_or_cancel(
            map(make, ([number for number in free if number not in alone], *([n] for n in alone)))
        )
        return results

    def _problem(self, number: int, call: ToolUse, reply: AgentReply) -> str:
        """Why a call is not made; "" if it is, and counts."""
        rules = self._agent.chats
        if call.id in reply.problems:
            return reply.problems[call.id]
        if number >= rules.calls_per_turn:
            return f"This call was not made: a reply may make {rules.calls_per_turn}."
        if self._host.count_call(self._agent.name) > rules.calls:
            return (
                f"This call was not made: all {rules.calls} calls are spent. Answer without tools."
            )
        return ""

    async def _call(self, call: ToolUse, reply: AgentReply) -> str:
        rules, tool = self._agent.chats, self._tools.get(call.name)
        make = partial(
            call_tool, self._tools, call, call_s=rules.call_s, most_chars=rules.result_chars
        )
        if (
            tool is not None and tool.noted
        ):  # a step of the environment, which is timed and written down as any
            return (await make()).result
        if tool is None or not tool.again:
            make = partial(
                self._host.calls.once, ToolCall, make, self.id, call.name, call.arguments
            )
        return (await self._host.run_tool(call.name, make, reply.turn)).result

    async def drop_results(self) -> bool:
        """Leave out the older half of the results of tools that are still there; False where there are none."""
        places = [
            i for i, m in enumerate(self.messages) if m.role == "tool" and m.content != _DROPPED
        ]
        gone = places[: (len(places) + 1) // 2]
        for i in gone:
            self.messages[i] = replace(self.messages[i], content=_DROPPED)
        self._changes["dropped_results"] = self._changes.get("dropped_results", 0.0) + len(gone)
        return bool(gone)

    async def sum_up(self) -> bool:
        """Have the summariser sum the chat up and fold it; False where nothing was said since the last time."""
        if not any(message.role == "assistant" for message in self.messages):
            return False
        text = "\n\n".join(
            f"{message.role}: {message.text}"
            for message in self.messages
            if message.role != "system"
        )
        while True:
            try:
                reply = await self._host.act(
                    self._agent.chats.summariser or self._agent.name, conversation=text
                )
                self.fold(reply.value or reply.text)
                break
            except PromptTooLong:
                if len(text) < 2:
                    raise
                text = text[len(text) // 2 :]  # the newer half
        self._changes["folded"] = 1.0
        return True


# what makes room when a prompt leaves none for its reply, and whether it did; of `stop` nothing does
WHEN_FULL: dict[WhenFull, Callable[[Chat], Awaitable[bool]]] = {
    "fold": Chat.sum_up,
    "drop_oldest_results": Chat.drop_results,
}
