"""Sessions of a gateway: the calls that an agent program makes in one trajectory, each a turn of a chat.

A call repeats the whole conversation. The longest part of it that ends with a reply of an agent here, compared by what
is said (not by ids of calls, spaces around a reply, thoughts, or how JSON is written), is gone on from, token by token:
the sampled ids stand for the reply. Where a program has rewritten a reply the call is a `root`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jinja2

from rollout.base.errors import Defect, PromptTooLong
from rollout.base.task_group import cancel_tasks
from rollout.environments.protocol import after_thought
from rollout.environments.tools import Tool
from rollout.gateway.dialects import ChatReply, ChatRequest, Finish, GatewayError
from rollout.records.trajectory import Message
from rollout.teams.chat import Chat
from rollout.teams.roles import Agent, AgentReply
from rollout.teams.team import TeamSession

_T = TypeVar("_T")
_OFF_LOOP_CHARS = 20_000  # of a conversation, from which on another thread compares it


@dataclass(slots=True)
class _Said:
    """A reply that an agent gave."""

    chat: Chat  # as it stood then; it is not moved on
    message: Message  # as the chat has it
    goes_on: bool = False  # whether another reply has come after it in the same chat


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a call stands among the chats of its session."""

    key: bytes  # digest of all that is asked
    said: _Said | None  # the latest reply that it goes on from
    read: int  # messages up to that, itself included


class GatewaySession:
    """A trajectory's session, as HTTP calls of a program use it.

    Attributes:
        failure: what an engine or parser raised, which the trajectory fails by whatever the program makes of it.
        overlong: the latest prompt that left no room for its reply; the program was told, and may go on.
    """

    def __init__(
        self,
        team: TeamSession,
        *,
        aliases: Mapping[str, str] | None = None,
        most_turns: int = 1000,
        own_sampling: bool = False,
    ) -> None:
        """`team` is the trajectory's.

        Args:
            aliases: agents by further names that programs have for their models; `*` is any other name.
            most_turns: calls that are answered.
            own_sampling: whether a call's temperature and top_p are heeded; in training they are the agent's.
        """
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.overlong: PromptTooLong | None = None
        self._team = team
        self._agents = {agent.name: agent for agent in team.agents}
        self._aliases = dict(aliases or {})
        self._left = most_turns
        self._name = secrets.token_hex(6)  # of replies' ids
        self._own_sampling = own_sampling
        self._said: dict[bytes, _Said] = {}  # by digest of the conversation up to the reply, as the program knows it
        self._given: dict[str, tuple[Message, ...]] = {}  # by a reply's id, the conversation up to it
        self._running: set[asyncio.Task[ChatReply]] = set()
        self._unread: dict[bytes, list[asyncio.Task[ChatReply]]] = {}  # by what was asked

    @property
    def models(self) -> list[str]:
        """The names that calls may ask for."""
        return [*self._agents, *(name for name in self._aliases if name != "*")]

    def agent(self, model: str) -> Agent:
        """Who answers as `model`.

        Raises:
            GatewayError: nobody does.
        """
        name = model if model in self._agents else self._aliases.get(model, self._aliases.get("*", ""))
        if name not in self._agents:
            known = ", ".join(self.models)
            raise GatewayError(404, f"no model '{model[:80]}'; the agents here: {known}", "model_not_found")
        return self._agents[name]

    async def ask(self, asked: ChatRequest) -> tuple[bytes, asyncio.Task[ChatReply]]:
        """Have an agent reply; the same call again gets the reply that nobody has read, if there is one.

        The reply is sampled to its end and written down, also where the program does not wait for it.

        Returns:
            The call's key, for `unread`, and the task that the reply comes from.

        Raises:
            GatewayError: nobody can answer it.
        """
        agent = self.agent(asked.model)
        if asked.previous:
            if asked.previous not in self._given:
                raise GatewayError(404, f"no response '{asked.previous[:80]}' in this session")
            earlier, news = self._given[asked.previous], asked.messages
            if news[0].role == "system":  # in place of the earlier one
                earlier, news = (news[0], *(m for m in earlier if m.role != "system")), news[1:]
            asked = replace(asked, messages=earlier + news)
        place = await _maybe_far(self._place, agent.name, asked)
        waiting = self._unread.get(place.key)
        if waiting:
            return place.key, waiting.pop()
        if self._left < 1:
            raise GatewayError(429, "this session has had all the calls that it may make", "turns_exhausted")
        self._left -= 1
        task = asyncio.create_task(self._reply(asked, agent, place))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return place.key, task

    def unread(self, key: bytes, task: asyncio.Task[ChatReply]) -> None:
        """Keep a reply that its caller did not wait for, for whoever asks the same again."""
        self._unread.setdefault(key, []).append(task)

    async def close(self) -> None:
        """End the calls that are under way; replies that nobody has read do not train, and have the score `unread`."""
        await cancel_tasks(self._running)
        for task in (task for tasks in self._unread.values() for task in tasks):
            if task.done() and not task.cancelled() and task.exception() is None:
                self._team.mask(int(task.result().id.rpartition("_")[2]))

    def _ended(self, task: asyncio.Task[ChatReply]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, PromptTooLong):
            self.overlong = error
        elif isinstance(error, Exception) and not isinstance(error, GatewayError) and not self.failure.done():
            self.failure.set_result(error)

    def _place(self, agent: str, asked: ChatRequest) -> _Place:
        """Find the longest part of a conversation that this session knows."""
        found, read, digest = None, 0, b""
        for number, digest in enumerate(_digests(agent, asked), start=1):
            if asked.messages[number - 1].role == "assistant" and (said := self._said.get(digest)) is not None:
                found, read = said, number
        own = repr((asked.max_tokens, asked.stop, asked.sampling))
        return _Place(hashlib.blake2b(digest + own.encode(), digest_size=16).digest(), found, read)

    async def _reply(self, asked: ChatRequest, agent: Agent, place: _Place) -> ChatReply:
        chat, news = self._chat(asked, agent, place)
        try:
            reply = await chat.go_on(news)
        except Defect as error:
            if isinstance(error.__cause__, jinja2.TemplateError):
                raise GatewayError(
                    400, f"the model's chat template refuses these messages: {error.__cause__}"
                ) from None
            raise
        if any(message.role == "assistant" for message in news):
            self._team.score(reply.turn, root=1.0)
        given, cut = self._give(asked, reply)
        whole = replace(asked, messages=(*asked.messages, given.message))
        if asked.kept:
            self._given[given.id] = whole.messages
        if not cut:
            *_, key = await _maybe_far(_digests, agent.name, whole)
            self._said[key] = _Said(chat, chat.messages[-1])
        return given

    def _chat(self, asked: ChatRequest, agent: Agent, place: _Place) -> tuple[Chat, list[Message]]:
        """The chat that a call goes on with, and what is new in it."""
        limits: dict[str, Any] = asked.sampling if self._own_sampling else {}
        if asked.max_tokens is not None:
            limits = {**limits, "max_tokens": min(asked.max_tokens, agent.sampling.max_tokens)}
        agent = replace(agent, sampling=replace(agent.sampling, **limits))
        tools = [Tool(schema=schema, run=_elsewhere) for schema in asked.tools]
        said, news = place.said, list(asked.messages[place.read :])
        name = self._team.chat_id(agent.name) if said is None or said.goes_on else said.chat.id
        system = "" if asked.messages[0].role == "system" else agent.role.system
        chat = Chat(self._team, agent, name, system, tools)
        if said is None:
            return chat, news
        said.goes_on = True
        chat.take_over(said.chat)
        theirs, ours = asked.messages[place.read - 1].calls, [call for call in said.message.calls if call.name]
        ids = {their.id: our.id for their, our in zip(theirs, ours, strict=True)}
        return chat, [replace(message, answers=ids.get(message.answers, message.answers)) for message in news]

    def _give(self, asked: ChatRequest, reply: AgentReply) -> tuple[ChatReply, bool]:
        """A reply as the program gets it, and whether that is cut at one of its stops."""
        turn = self._team.turn(reply.turn)
        message = reply.message or Message(role="assistant", content=reply.text)
        text = "\n".join([after_thought(message.content), *(c.arguments for c in message.calls if not c.name)]).strip()
        ends = [(end, stop) for stop in asked.stop if (end := text.find(stop)) >= 0]
        end, stop = min(ends, default=(len(text), None))
        calls = tuple(replace(call, id=f"call_{call.id.replace('.', '_')}") for call in message.calls if call.name)
        finish: Finish = "length" if turn.finish_reason == "length" else "tool_calls" if calls else "stop"
        given = ChatReply(
            id=f"{self._name}_{reply.turn}",
            model=asked.model,
            created=int(time.time()),
            text=text[:end],
            reasoning=message.reasoning,
            calls=calls,
            finish="stop_sequence" if stop and not calls else finish,
            stop=stop,
            prompt_tokens=len(turn.prompt_ids),
            completion_tokens=len(turn.completion_ids),
        )
        return given, stop is not None


async def _elsewhere(**arguments: object) -> str:
    raise NotImplementedError("the program calls its tools itself")


async def _maybe_far(function: Callable[[str, ChatRequest], _T], agent: str, asked: ChatRequest) -> _T:
    """What a function gives that looks at a whole conversation; of a long one on another thread."""
    if sum(len(message.content) for message in asked.messages) > _OFF_LOOP_CHARS:
        return await asyncio.to_thread(function, agent, asked)
    return function(agent, asked)


def _digests(agent: str, asked: ChatRequest) -> list[bytes]:
    """Of an agent's conversation up to each of its messages, by what they say, however it is written."""
    tools = json.dumps([tool.function for tool in asked.tools], sort_keys=True)
    so_far, found = hashlib.blake2b(json.dumps([agent, tools]).encode(), digest_size=16), []
    for message in asked.messages:
        calls = [(call.name, json.loads(call.arguments)) for call in message.calls]
        content = after_thought(message.content) if message.role == "assistant" else message.content
        so_far.update(json.dumps([message.role, content, calls], sort_keys=True).encode())
        found.append(so_far.digest())
    return found
