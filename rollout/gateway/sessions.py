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
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

import jinja2

from rollout.base.async_tasks import cancel_tasks
from rollout.base.errors import Defect, EngineError, PromptTooLong
from rollout.environments.protocol import after_thought
from rollout.environments.tools import Tool
from rollout.gateway.dialects import ChatReply, ChatRequest, Finish, GatewayError
from rollout.models.tool_calls import CALL_MARKS, thought_and_text
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
    goes_on: bool = False  # whether another reply has come after it in the same chat


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a call stands among the chats of its session."""

    key: bytes  # digest of all that is asked
    said: _Said | None  # the latest reply that it goes on from
    read: int  # messages up to that, itself included


@dataclass(slots=True, kw_only=True, eq=False)
class GatewayCall:
    """A call that is being answered."""

    head: ChatReply  # what is known of the reply before it is whole
    task: asyncio.Task[ChatReply] = field(init=False)  # what the whole reply comes from
    begun: asyncio.Event = field(
        default_factory=asyncio.Event
    )  # set as soon as there is anything to stream
    _grown: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: bool = (
        True  # whether somebody waits for it; sampling of a stream that nobody wants ends
    )
    ended: bool = False  # whether it was ended so
    read: bool = False  # whether a stream of it was, to its end
    turn: int = -1  # its number in the trajectory, once it is whole

    def start(self, work: Coroutine[Any, Any, ChatReply]) -> GatewayCall:
        """Have the reply come from `work`."""
        self.task = asyncio.create_task(work)
        self.task.add_done_callback(lambda _: self._tell())
        return self

    def _tell(self) -> None:
        self.begun.set()
        self._grown.set()

    def hear(self, raw: str, stops: Sequence[str]) -> bool:
        """Take the reply so far, which has been sampled up to `raw`; whether to go on."""
        reasoning, text = settled(raw, stops)
        if (reasoning, text) != (self.head.reasoning, self.head.text) and self.head.begins(
            reasoning, text
        ):
            self.head = replace(self.head, reasoning=reasoning, text=text)
            self._tell()
        self.ended |= not self.wanted
        return not self.ended

    def whole(self) -> ChatReply:
        """The reply, which is there; GatewayError if the trajectory has ended."""
        if self.task.cancelled():
            raise GatewayError(503, "the trajectory has ended")
        return self.task.result()

    async def replies(self) -> AsyncIterator[ChatReply]:
        """The reply as it grows, the last time whole.

        Raises:
            GatewayError: the trajectory has ended, or the reply does not go on as it began.
        """
        while not self.task.done():
            self._grown.clear()
            yield self.head
            await self._grown.wait()
        yield self.whole()


def settled(raw: str, marks: Sequence[str]) -> tuple[str, str]:
    """Thoughts and text of a reply that is not whole, as far as they are sure to stay.

    Args:
        raw: as sampled.
        marks: what ends the text that is sure: the caller's stops, and what calls begin with.
    """
    thought, text = thought_and_text(raw)
    ends = list[int]()
    for mark in (*marks, "</think>"):
        part = next(size for size in range(len(mark) - 1, -1, -1) if text.endswith(mark[:size]))
        ends.append(text.find(mark) if mark in text else len(text) - part)
    return thought, text[: min(ends)].rstrip()


@dataclass(eq=False)
class GatewaySession:
    """A trajectory's session, as HTTP calls of a program use it.

    Attributes:
        failure: what an engine or parser raised, which the trajectory fails by whatever the program makes of it.
        overlong: the latest prompt that left no room for its reply; the program was told, and may go on.
    """

    team: TeamSession  # the trajectory's
    _: KW_ONLY
    aliases: Mapping[str, str] = field(
        default_factory=dict
    )  # agents by programs' names for models; `*` is any other
    most_turns: int = 1000  # calls that are answered
    own_sampling: bool = (
        False  # whether a call's temperature and top_p are heeded; in training they are the agent's
    )

    def __post_init__(self) -> None:
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.overlong: PromptTooLong | None = None
        self._agents = {agent.name: agent for agent in self.team.agents}
        self._name = secrets.token_hex(6)  # of replies' ids
        self._said: dict[
            bytes, _Said
        ] = {}  # by digest of the conversation up to the reply, as the program knows it
        self._given: dict[
            str, tuple[Message, ...]
        ] = {}  # by a reply's id, the conversation up to it
        self._running: set[asyncio.Task[ChatReply]] = set()
        self._calls: dict[bytes, list[GatewayCall]] = defaultdict(
            list
        )  # by digest of all that is asked
        self._asked = 0  # calls so far

    @property
    def models(self) -> list[str]:
        """The names that calls may ask for."""
        return [*self._agents, *(name for name in self.aliases if name != "*")]

    def agent(self, model: str) -> Agent:
        """Who answers as `model`."""
        name = (
            model if model in self._agents else self.aliases.get(model, self.aliases.get("*", ""))
        )
        if name not in self._agents:
            known = ", ".join(self.models)
            raise GatewayError(
                404, f"no model '{model[:80]}'; the agents here: {known}", "model_not_found"
            )
        return self._agents[name]

    async def ask(self, asked: ChatRequest) -> GatewayCall:
        """Have an agent reply; the same call again gets the reply that nobody has read, if there is one.

        So does one whose caller says that it has read no answer. Where the same was asked several times, as for several
        samples, nobody knows whose answer was lost, and it is a new sample.

        The reply is sampled to its end and written down, also where the program does not wait for it, unless that
        leaves a stream.

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
        same = self._calls[place.key]
        for call in reversed(same):
            if not call.ended and (
                not call.wanted or (asked.again and len(same) == 1 and call.turn >= 0)
            ):
                call.wanted = True
                return call
        if self._asked >= self.most_turns:
            raise GatewayError(
                403, "this session has had all the calls that it may make", "turns_exhausted"
            )
        call = GatewayCall(head=ChatReply(id=f"{self._name}_{self._asked}", model=asked.model))
        self._asked += 1
        same.append(call)
        self._running.add(call.start(self._reply(asked, agent, place, call)).task)
        call.task.add_done_callback(self._ended)
        return call

    async def count(self, asked: ChatRequest) -> int:
        """How many tokens an agent would be asked with; GatewayError if nobody can say."""
        agent = self.agent(asked.model)
        chat, news = self._chat(asked, agent, await _maybe_far(self._place, agent.name, asked), "")
        with _refused_templates():
            try:
                return await chat.prompt_tokens(news)
            except EngineError as error:
                raise GatewayError(400, f"agent '{agent.name}': {error}") from None

    def fail(self, error: Exception) -> None:
        """Have the trajectory fail, unless it does already."""
        if not self.failure.done():
            self.failure.set_result(error)

    def unread(self, call: GatewayCall) -> None:
        """Keep a reply that its caller did not wait for, for whoever asks the same again; of a stream, end it."""
        call.wanted = False

    async def close(self) -> None:
        """End the calls that are under way; replies that nobody has read do not train, and have the score `unread`."""
        await cancel_tasks(self._running)
        for call in chain.from_iterable(self._calls.values()):
            if not call.wanted and call.turn >= 0:
                self.team.mask(call.turn)

    def _ended(self, task: asyncio.Task[ChatReply]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, PromptTooLong):
            self.overlong = error
        elif isinstance(error, Exception) and not isinstance(error, GatewayError):
            self.fail(error)

    def _place(self, agent: str, asked: ChatRequest) -> _Place:
        """Find the longest part of a conversation that this session knows."""
        found, read, digest = None, 0, b""
        for number, digest in enumerate(_digests(agent, asked), start=1):
            if (
                asked.messages[number - 1].role == "assistant"
                and (said := self._said.get(digest)) is not None
            ):
                found, read = said, number
        own = repr((asked.max_tokens, asked.stop, asked.sampling))
        return _Place(hashlib.blake2b(digest + own.encode(), digest_size=16).digest(), found, read)

    async def _reply(
        self, asked: ChatRequest, agent: Agent, place: _Place, call: GatewayCall
    ) -> ChatReply:
        goes_on = place.said is not None and not place.said.goes_on
        chat, news = self._chat(
            asked, agent, place, "" if goes_on else self.team.new_chat_id(agent.name)
        )
        if place.said is not None:
            place.said.goes_on = True
        chat.stops = asked.stop
        if asked.stream:
            chat.hear = lambda raw, form: call.hear(
                raw, (*asked.stop, *(CALL_MARKS[form] if asked.tools else ()))
            )
        with _refused_templates():
            reply = await chat.go_on(news)
        if any(message.role == "assistant" for message in news):
            self.team.score(reply.turn, root=1.0)
        call.turn = reply.turn
        given, cut = self._give(asked, reply, call.head)
        if call.ended:
            self.team.mask(reply.turn)
            return given
        whole = replace(asked, messages=(*asked.messages, given.message))
        if asked.kept:
            self._given[given.id] = whole.messages
        if not cut:
            *_, key = await _maybe_far(_digests, agent.name, whole)
            self._said[key] = _Said(chat)
        return given

    def _chat(
        self, asked: ChatRequest, agent: Agent, place: _Place, name: str
    ) -> tuple[Chat, list[Message]]:
        """The chat that a call goes on with, under a `name` or that which it has, and what is new in it."""
        limits: dict[str, Any] = asked.sampling if self.own_sampling else {}
        if asked.max_tokens is not None:
            limits = {**limits, "max_tokens": min(asked.max_tokens, agent.sampling.max_tokens)}
        agent = replace(agent, sampling=replace(agent.sampling, **limits))
        tools = [Tool(schema=schema, run=_elsewhere) for schema in asked.tools]
        said, news = place.said, list(asked.messages[place.read :])
        system = "" if asked.messages[0].role == "system" else agent.role.system
        chat = Chat(self.team, agent, name or (said.chat.id if said else ""), system, tools)
        if said is None:
            return chat, news
        chat.take_over(said.chat)
        theirs, ours = (
            asked.messages[place.read - 1].calls,
            [call for call in said.chat.messages[-1].calls if call.name],
        )
        ids = {their.id: our.id for their, our in zip(theirs, ours, strict=True)}
        return chat, [
            replace(message, answers=ids.get(message.answers, message.answers)) for message in news
        ]

    def _give(
        self, asked: ChatRequest, reply: AgentReply, head: ChatReply
    ) -> tuple[ChatReply, bool]:
        """A reply as the program gets it, and whether that is cut at one of its stops."""
        turn = self.team.turn(reply.turn)
        message = reply.message or Message(role="assistant", content=reply.text)
        text = "\n".join(
            [after_thought(message.content), *(c.arguments for c in message.calls if not c.name)]
        ).strip()
        text += (
            message.text[len(message.text.rstrip()) :] if text else ""
        )  # spaces, which may be of a stop
        said, stop = asked.cut(text)
        said, reasoning = said if stop else said.rstrip(), message.reasoning
        if not head.begins(reasoning, said):  # what was streamed as text proved to be a thought
            said, reasoning = f"{head.text}</think>\n\n{said}", head.reasoning
        calls = tuple(
            replace(call, id=f"call_{call.id.replace('.', '_')}")
            for call in message.calls
            if call.name
        )
        finish: Finish = (
            "length" if turn.finish_reason == "length" else "tool_calls" if calls else "stop"
        )
        given = replace(
            head,
            text=said,
            reasoning=reasoning,
            calls=calls,
            finish="stop_sequence" if stop and not calls else finish,
            stop=stop,
            prompt_tokens=len(turn.prompt_ids),
            completion_tokens=len(turn.completion_ids),
        )
        return given, stop is not None


@contextmanager
def _refused_templates() -> Iterator[None]:
    """Messages that a model's chat template refuses are the caller's fault."""
    try:
        yield
    except Defect as error:
        if isinstance(error.__cause__, jinja2.TemplateError):
            raise GatewayError(
                400, f"the model's chat template refuses these messages: {error.__cause__}"
            ) from None
        raise


async def _elsewhere(**arguments: object) -> str:
    raise NotImplementedError("the program calls its tools itself")


async def _maybe_far(
    function: Callable[[str, ChatRequest], _T], agent: str, asked: ChatRequest
) -> _T:
    """What a function gives that looks at a whole conversation; of a long one on another thread."""
    if sum(message.size for message in asked.messages) > _OFF_LOOP_CHARS:
        return await asyncio.to_thread(function, agent, asked)
    return function(agent, asked)


def _number(written: str) -> float:
    """A number of JSON; 1.0 is 1, as JavaScript writes it."""
    number = float(written)
    return int(number) if number.is_integer() else number


def _digests(agent: str, asked: ChatRequest) -> list[bytes]:
    """Of an agent's conversation up to each of its messages, by what they say, however it is written."""
    tools = json.dumps([tool.function for tool in asked.tools], sort_keys=True)
    so_far, found = hashlib.blake2b(json.dumps([agent, tools]).encode(), digest_size=16), []
    for message in asked.messages:
        calls = [
            (call.name, json.loads(call.arguments, parse_float=_number)) for call in message.calls
        ]
        content = after_thought(message.content) if message.role == "assistant" else message.content
        so_far.update(json.dumps([message.role, content, calls], sort_keys=True).encode())
        found.append(so_far.digest())
    return found
