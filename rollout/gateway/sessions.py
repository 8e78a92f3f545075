"""Sessions of the gateway: an agent program's calls in one trajectory; each call is one turn.

A call carries its whole conversation. `GatewaySession` finds the longest prefix of the
conversation that ends with a reply of this session, and continues that reply's chat with its
sampled token ids. Conversations are compared by content: ids of calls, spaces around a reply,
thoughts and the formatting of JSON do not count. If the program has rewritten a reply, the chat is
tokenized anew, and the turn gets the score `root` = 1: its prompt does not continue the token ids
of an earlier turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypeVar

import jinja2
import numpy as np

from rollout.base.async_tasks import cancel_tasks
from rollout.base.errors import Defect, EngineError, PromptTooLong
from rollout.environments.protocol import after_thought
from rollout.environments.tools import Tool
from rollout.gateway.calls import THOUGHT_END, GatewayCall
from rollout.gateway.dialects import (
    ChatReply,
    ChatRequest,
    Finish,
    TokenLogprob,
    order_tool_results,
)
from rollout.gateway.errors import GatewayError
from rollout.gateway.formats import ReplyFormat
from rollout.gateway.tools import ANY_TOOL, as_text_arguments
from rollout.models.tool_calls import CALL_MARKS, ToolFormat
from rollout.records.trajectory import Message, TokenCandidates, ToolUse, Turn
from rollout.teams.chat import Chat
from rollout.teams.roles import Agent, AgentReply
from rollout.teams.team import TeamSession

_T = TypeVar("_T")
_OFF_LOOP_CHARS = 20_000  # longer conversations are compared on another thread
_DIGEST_BYTES = 16


@dataclass(slots=True)
class _KnownReply:
    """A reply that an agent has given in this session."""

    chat: Chat  # as it was after the reply; it is copied and never continued itself
    reply_format: ReplyFormat | None  # latest format whose instruction is in the chat
    has_successor: bool = False  # True if a later reply of the same chat follows


@dataclass(frozen=True, slots=True)
class _StoredReply:
    """A reply that later calls may refer to by its id, and the conversation that ends with it."""

    reply: ChatReply
    conversation: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class _Match:
    """Result of comparing a call's conversation with the replies of its session."""

    key: bytes  # digest of the conversation and the settings of the reply; a seed does not count
    reply: _KnownReply | None  # latest reply that the conversation continues
    known_messages: int  # number of messages up to that reply, including it


@dataclass(eq=False)
class GatewaySession:
    """A trajectory's session, which answers the HTTP calls of an agent program.

    Attributes:
        team: session of the trajectory with its team.
        aliases: agents by the model names that the program uses; `*` stands for any other name.
        max_turns: maximum number of calls that are answered; each is a turn.
        honor_sampling: True if a call may set `temperature` and `top_p`. In training the agent's
            own values hold, because the trainer must know the sampling distribution.
        failure: future of the error that fails the trajectory, such as an EngineError, even if the
            program handles the error.
        overlong: latest prompt that left no room for a reply. The program gets the error, and may
            continue.
        refused_calls: number of calls that were refused.
        last_refusal: error of the latest of them, "" if there is none.
    """

    team: TeamSession
    _: KW_ONLY
    aliases: Mapping[str, str] = field(default_factory=dict)
    max_turns: int = 1000
    honor_sampling: bool = False

    def __post_init__(self) -> None:
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.overlong: PromptTooLong | None = None
        self.refused_calls = 0
        self.last_refusal = ""
        self._agents = {agent.name: agent for agent in self.team.agents}
        self._id = secrets.token_hex(6)  # prefix of the replies' ids
        # by digest of the conversation that ends with the reply, as the program repeats it
        self._known_replies: dict[bytes, _KnownReply] = {}
        self._stored_replies: dict[str, _StoredReply] = {}  # by id
        self._calls: dict[bytes, list[GatewayCall]] = defaultdict(list)  # by `_Match.key`
        self._running: set[asyncio.Task[ChatReply]] = set()
        self._calls_made = 0

    @property
    def models(self) -> list[str]:
        """Model names that calls may use: those of the agents and their aliases."""
        return [*self._agents, *(name for name in self.aliases if name != "*")]

    def agent(self, model: str) -> Agent:
        """Return the agent that answers under this model name.

        Raises:
            GatewayError: there is none.
        """
        if model in self._agents:
            return self._agents[model]
        name = self.aliases.get(model, self.aliases.get("*", ""))
        if name not in self._agents:
            known_models = ", ".join(self.models)
            raise GatewayError(
                404,
                f"there is no model '{model[:80]}'; agents of this session: {known_models}",
                "model_not_found",
            )
        return self._agents[name]

    async def start_call(self, request: ChatRequest) -> GatewayCall:
        """Start the reply of an agent, or return an earlier call (see `_reusable_call`).

        A reply is sampled to its end and recorded even if the program stops waiting for it. Only
        the sampling of a stream ends when its reader leaves.

        Raises:
            GatewayError: the call cannot be answered.
        """
        agent = self.agent(request.model)
        if request.previous_id:
            request = self._with_stored_messages(request)
        request = replace(request, messages=order_tool_results(request.messages))
        match = await off_loop_if_long(self._match, agent.name, request)

        equal_calls = self._calls[match.key]
        earlier_call = _reusable_call(equal_calls, request.is_retry)
        if earlier_call is not None:
            earlier_call.has_reader = True
            return earlier_call

        if self._calls_made >= self.max_turns:
            raise GatewayError(
                403,
                f"this session has made all of its {self.max_turns} calls",
                "turns_exhausted",
            )
        reply_id = f"{self._id}_{self._calls_made}"
        self._calls_made += 1
        partial_reply = ChatReply(
            id=reply_id,
            model=request.model,
            text_tools=request.text_tools,
            namespaces=request.namespaces,
        )
        call = GatewayCall(partial_reply=partial_reply)
        call.start(self._reply(request, agent, match, call))
        call.task.add_done_callback(self._on_call_done)
        self._running.add(call.task)
        equal_calls.append(call)
        return call

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Raise GatewayError, because a trajectory has no encoder."""
        raise GatewayError(
            404,
            "there are no embeddings in a trajectory; `mcore-mas serve` has them for a run with a "
            "retriever",
        )

    def stored_reply(self, reply_id: str) -> ChatReply:
        """Return an earlier reply; raise GatewayError if it was not stored."""
        return self._find_stored(reply_id).reply

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of prompt tokens of a call; raise GatewayError if it is not known."""
        agent = self.agent(request.model)
        request = replace(request, messages=order_tool_results(request.messages))
        match = await off_loop_if_long(self._match, agent.name, request)
        chat_id = match.reply.chat.id if match.reply is not None else ""
        chat, new_messages = self._open_chat(request, agent, match, chat_id)
        with _template_errors():
            try:
                return await chat.prompt_tokens(new_messages)
            except EngineError as error:
                raise GatewayError(400, f"agent '{agent.name}': {error}") from None

    def fail(self, error: Exception) -> None:
        """Fail the trajectory with this error, unless it has failed already."""
        if not self.failure.done():
            self.failure.set_result(error)

    def abandon(self, call: GatewayCall) -> None:
        """Record that the reader of a call has left.

        The reply is kept for an equal call. The sampling of a stream ends.
        """
        call.has_reader = False

    def note_refusal(self, error: GatewayError) -> None:
        """Record that a call was refused."""
        self.refused_calls += 1
        self.last_refusal = str(error)

    async def close(self) -> None:
        """Cancel running calls; exclude replies that nobody has read from training."""
        await cancel_tasks(self._running)
        for equal_calls in self._calls.values():
            for call in equal_calls:
                if not call.has_reader and call.turn >= 0:
                    self.team.mark_unread(call.turn)

    def _on_call_done(self, task: asyncio.Task[ChatReply]) -> None:
        self._running.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, PromptTooLong):
            self.overlong = error
        elif isinstance(error, Exception) and not isinstance(error, GatewayError):
            self.fail(error)

    def _with_stored_messages(self, request: ChatRequest) -> ChatRequest:
        """Return the request with the conversation that its `previous_id` stands for.

        A new system message replaces that of the stored conversation.
        """
        stored = self._find_stored(request.previous_id).conversation
        if request.messages[0].role != "system":
            return replace(request, messages=stored + request.messages)
        system, *new_messages = request.messages
        stored_dialogue = [message for message in stored if message.role != "system"]
        return replace(request, messages=(system, *stored_dialogue, *new_messages))

    def _find_stored(self, reply_id: str) -> _StoredReply:
        if reply_id not in self._stored_replies:
            raise GatewayError(404, f"there is no response '{reply_id[:80]}' in this session")
        return self._stored_replies[reply_id]

    def _match(self, agent: str, request: ChatRequest) -> _Match:
        """Find the longest beginning of the conversation that ends with a known reply.

        The result also has the key that equal calls share.
        """
        reply = None
        known_messages = 0
        digest = b""
        for number, digest in enumerate(_conversation_digests(agent, request), start=1):
            is_reply = request.messages[number - 1].role == "assistant"
            if is_reply and digest in self._known_replies:
                reply = self._known_replies[digest]
                known_messages = number

        settings = repr(
            (
                request.max_tokens,
                request.stop,
                request.sampling,
                request.reply_format,
                request.must_call,
                request.parallel_calls,
                request.logprobs,
                request.top_logprobs,
            )
        )
        # `digest` is now that of the whole conversation.
        key = hashlib.blake2b(digest + settings.encode(), digest_size=_DIGEST_BYTES).digest()
        return _Match(key, reply, known_messages)

    async def _reply(
        self, request: ChatRequest, agent: Agent, match: _Match, call: GatewayCall
    ) -> ChatReply:
        """Ask the agent for a reply, and score and store the reply."""
        chat_id = self._next_chat_id(agent, match.reply)

        def update_call(raw: str, tool_format: ToolFormat) -> bool:
            call_marks = CALL_MARKS[tool_format] if request.tools else ()
            return call.update(raw, (*request.stop, *call_marks))

        chat, new_messages = self._open_chat(request, agent, match, chat_id)
        on_text = update_call if request.stream else None
        with _template_errors():
            agent_reply = await chat.reply_to(
                new_messages,
                stops=request.stop,
                on_text=on_text,
                constraint=request.constraint,
                candidates=request.top_logprobs,
            )
        # The tokens of a reply among the new messages are unknown, so its text was tokenized anew.
        if any(message.role == "assistant" for message in new_messages):
            self.team.score(agent_reply.turn, root=1.0)

        call.turn = agent_reply.turn
        turn = self.team.turn(agent_reply.turn)
        reply = _chat_reply(request, agent_reply, turn, call.partial_reply)
        scores = self._scores(request, reply, agent)
        if request.top_logprobs and not agent_reply.candidates:
            scores["unheeded/top_logprobs"] = 1.0  # the engine reports none
        self.team.score(turn.index, **scores)
        if request.logprobs and turn.logprobs:
            reply = replace(reply, logprobs=self._token_logprobs(turn, agent_reply.candidates))
        if call.is_aborted:
            self.team.mark_unread(agent_reply.turn)
            return reply

        conversation = (*request.messages, reply.message)
        if request.store:
            self._stored_replies[reply.id] = _StoredReply(reply, conversation)
        # The sampled tokens include a stop sequence, and the text lacks it. So a conversation with a
        # text that was cut there cannot continue the chat's token ids.
        if reply.stop_sequence is None:
            reply_format = request.reply_format
            if reply_format is None and match.reply is not None:
                reply_format = match.reply.reply_format
            answered = replace(request, messages=conversation)
            digests = await off_loop_if_long(_conversation_digests, agent.name, answered)
            self._known_replies[digests[-1]] = _KnownReply(chat, reply_format)
        return reply

    def _next_chat_id(self, agent: Agent, known_reply: _KnownReply | None) -> str:
        """Return the id of the chat that continues from a reply, and record that the reply is continued.

        The first continuation keeps the id of the reply's chat. Further ones are branches and get new
        ids. A conversation without a known reply begins a new chat.
        """
        if known_reply is None or known_reply.has_successor:
            return self.team.new_chat_id(agent.name)
        known_reply.has_successor = True
        return known_reply.chat.id

    def _scores(self, request: ChatRequest, reply: ChatReply, agent: Agent) -> dict[str, float]:
        """Return the scores of a reply's turn.

        Returns:
            `unheeded/PART`: 1.0 for each part of the request that was ignored. `off_schema`, if the
            request asks for JSON and the reply calls no tools: 1.0 if the reply does not have the
            requested format, else 0.0.
        """
        unheeded = [*request.unheeded]
        if not self.honor_sampling:
            unheeded += [
                name
                for name, value in request.sampling.items()
                if value != getattr(agent.sampling, name)
            ]
            if request.seed is not None:
                unheeded.append("seed")
        if request.logprobs and reply.completion_tokens == 0:
            unheeded.append("logprobs")  # the model is behind an API that returns no tokens

        called = [call.name for call in reply.calls]
        if request.must_call == ANY_TOOL:
            is_call_missing = not called
        else:
            is_call_missing = request.must_call is not None and request.must_call not in called
        if is_call_missing:
            unheeded.append("tool_choice")
        if len(called) > 1 and not request.parallel_calls:
            unheeded.append("parallel_tool_calls")
        scores = {f"unheeded/{name}": 1.0 for name in unheeded}
        if request.reply_format is not None and not reply.calls:
            scores["off_schema"] = float(not request.reply_format.accepts(reply.text))
        return scores

    def _token_logprobs(
        self, turn: Turn, candidates: Sequence[TokenCandidates]
    ) -> tuple[TokenLogprob, ...]:
        """Return the sampled tokens of a turn with their log-probabilities.

        A token that ends the reply has the text "".

        Args:
            candidates: likeliest tokens at each position; empty if the call asks for none, or the
                engine reports none.
        """
        texts = self.team.token_texts(turn)
        candidates = candidates or [()] * len(texts)
        tokens = []
        for text, logprob, others in zip(texts, turn.logprobs, candidates, strict=True):
            other_texts = self.team.candidate_texts(turn, others)
            tokens.append(TokenLogprob(text, logprob, tuple(other_texts)))
        return tuple(tokens)

    def _open_chat(
        self, request: ChatRequest, agent: Agent, match: _Match, chat_id: str
    ) -> tuple[Chat, list[Message]]:
        """Return a chat and its new messages.

        It continues from the known reply, if there is one, and the new messages are those after it.
        """
        sampling: dict[str, Any] = dict(request.sampling) if self.honor_sampling else {}
        if request.max_tokens is not None:
            sampling["max_tokens"] = min(request.max_tokens, agent.sampling.max_tokens)
        agent = replace(agent, sampling=replace(agent.sampling, **sampling))

        has_system = request.messages[0].role == "system"
        system = "" if has_system else agent.role.system
        tools = [Tool(schema=schema, run=_run_nowhere) for schema in request.tools]
        chat = Chat(self.team, agent, chat_id, system, tools)

        new_messages = list(request.messages[match.known_messages :])
        known_format = match.reply.reply_format if match.reply is not None else None
        if request.reply_format is not None and request.reply_format != known_format:
            last = new_messages[-1]
            text = f"{last.content}\n\n{request.reply_format.instruction}"
            new_messages[-1] = replace(last, content=text)
        if match.reply is None:
            return chat, new_messages

        chat.take_over(match.reply.chat)
        program_calls = request.messages[match.known_messages - 1].calls
        # The program does not get calls without a name, which could not be read.
        chat_calls = [call for call in match.reply.chat.messages[-1].calls if call.name]
        return chat, _with_chat_ids(new_messages, program_calls, chat_calls)


def _reusable_call(equal_calls: Sequence[GatewayCall], is_retry: bool) -> GatewayCall | None:
    """Return the earlier call whose reply answers a new, equal call; None if a reply is to be sampled.

    This is the latest call whose reply nobody has read. A retry also gets a reply that was read,
    because it was lost on its way, but only if there was a single equal call: of several, as for
    several samples, it is not known whose reply was lost.

    Args:
        equal_calls: earlier calls with the same conversation and settings.
        is_retry: True if the client says that it repeats a call.
    """
    for call in reversed(equal_calls):
        if call.is_aborted:
            continue
        is_complete = call.turn >= 0
        if not call.has_reader or (is_retry and is_complete and len(equal_calls) == 1):
            return call
    return None


def _with_chat_ids(
    messages: Sequence[Message], program_calls: Sequence[ToolUse], chat_calls: Sequence[ToolUse]
) -> list[Message]:
    """Replace the program's ids of tool calls by the chat's ids in the results of the calls."""
    chat_ids = {}
    for program_call, chat_call in zip(program_calls, chat_calls, strict=True):
        chat_ids[program_call.id] = chat_call.id
    return [
        replace(message, answers=chat_ids.get(message.answers, message.answers))
        for message in messages
    ]


def _chat_reply(
    request: ChatRequest, agent_reply: AgentReply, turn: Turn, partial_reply: ChatReply
) -> ChatReply:
    """Return the complete reply that the program gets, with its text cut at the request's stops.

    Args:
        partial_reply: reply as it was streamed; the complete reply continues it.
    """
    message = agent_reply.message or Message(role="assistant", content=agent_reply.text)
    # A call that could not be read has no name, and its whole text as arguments.
    unreadable_calls = [call.arguments for call in message.calls if not call.name]
    text = "\n".join([after_thought(message.content), *unreadable_calls]).strip()
    if text:
        trailing_space = message.text[len(message.text.rstrip()) :]
        # The content of a message is stripped, its `text` is as sampled. A stop such as "END\n" is found
        # only with the sampled space; without a stop the space is stripped again below.
        text += trailing_space
    text, stop = request.cut_at_stop(text)
    if stop is None:
        text = text.rstrip()

    reasoning = message.reasoning
    if not partial_reply.is_prefix_of(reasoning, text):
        # Because of a late </think>, text that was already streamed now counts as thoughts. The program
        # keeps it as text, followed by the mark. Only what follows the mark is compared in
        # `_conversation_digests`, so a program may also drop what precedes it.
        text = f"{partial_reply.text}{THOUGHT_END}\n\n{text}"
        reasoning = partial_reply.reasoning

    calls = tuple(_program_call(call, request.text_tools) for call in message.calls if call.name)
    finish: Finish = "stop"
    if stop and not calls:
        finish = "stop_sequence"
    elif turn.finish_reason == "length":
        finish = "length"
    elif calls:
        finish = "tool_calls"
    return replace(
        partial_reply,
        text=text,
        reasoning=reasoning,
        calls=calls,
        finish=finish,
        stop_sequence=stop,
        prompt_tokens=len(turn.prompt_ids),
        completion_tokens=len(turn.completion_ids),
    )


def _program_call(call: ToolUse, text_tools: Collection[str]) -> ToolUse:
    """Return a tool call as the program gets it."""
    arguments = call.arguments
    if call.name in text_tools:
        arguments = as_text_arguments(arguments)
    return replace(call, id=f"call_{call.id.replace('.', '_')}", arguments=arguments)


@contextmanager
def _template_errors() -> Iterator[None]:
    """Raise a chat template's error about the caller's messages as a GatewayError."""
    try:
        yield
    except Defect as error:
        if isinstance(error.__cause__, jinja2.TemplateError):
            raise GatewayError(
                400, f"the model's chat template refuses these messages: {error.__cause__}"
            ) from None
        raise


async def _run_nowhere(**arguments: object) -> str:
    raise NotImplementedError("the program calls its tools itself")


async def off_loop_if_long(
    function: Callable[[str, ChatRequest], _T], agent: str, request: ChatRequest
) -> _T:
    """Call `function(agent, request)`; use another thread if the request's conversation is long."""
    if sum(message.size for message in request.messages) > _OFF_LOOP_CHARS:
        return await asyncio.to_thread(function, agent, request)
    return function(agent, request)


def _conversation_digests(agent: str, request: ChatRequest) -> list[bytes]:
    """Return a digest of the conversation up to each message, equal if the contents are equal."""
    tools = json.dumps([tool.function for tool in request.tools], sort_keys=True)
    digest = hashlib.blake2b(json.dumps([agent, tools]).encode(), digest_size=_DIGEST_BYTES)
    digests = []
    for message in request.messages:
        calls = [
            (call.name, json.loads(call.arguments, parse_float=_parse_float))
            for call in message.calls
        ]
        content = message.content
        if message.role == "assistant":
            content = after_thought(content)
        digest.update(json.dumps([message.role, content, calls], sort_keys=True).encode())
        digests.append(digest.digest())
    return digests


def _parse_float(literal: str) -> float:
    """Parse a JSON number; 1.0 becomes 1, as JavaScript writes it."""
    number = float(literal)
    return int(number) if number.is_integer() else number
