"""Types that the HTTP APIs of the gateway share: requests, replies and stream events.

A `Dialect` translates between one API and these types. The dialects are in `completions.py`,
`responses.py` and `messages.py`. A call that cannot be read or answered raises a `GatewayError`.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout.gateway.errors import GatewayError
from rollout.gateway.formats import ReplyFormat, schema_problem
from rollout.gateway.tools import ANY_TOOL, TEXT_ARGUMENT, RequestTools, field_name
from rollout.models.grammars import ReplyConstraint
from rollout.models.tool_calls import ToolSchema
from rollout.records.trajectory import Message, ToolUse

Finish = Literal["stop", "length", "tool_calls", "stop_sequence"]
_Model = TypeVar("_Model", bound=BaseModel)
MAX_TOP_LOGPROBS = 20  # as in OpenAI's APIs
_TEXT_PARTS = {"text", "input_text", "output_text", "refusal"}
# Fields of requests that change nothing in a reply.
_FIELDS_WITHOUT_EFFECT = {
    "background",
    "betas",
    "cache_control",
    "client_metadata",
    "include",
    "inference_geo",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "truncation",
    "user",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A call of a program, in the terms that all dialects share.

    Attributes:
        sampling: `temperature` and `top_p`, as far as the call gives them.
        stop: texts that end the reply.
        include_usage: True if a stream ends with the token counts.
        store: True if a later call may refer to the reply by its id.
        previous_id: id of the reply that `messages` follow, "" for none.
        is_retry: True if the caller has sent the same call before and got no answer.
        text_tools: names of the tools that take free text, as their argument `TEXT_ARGUMENT`.
        namespaces: namespace by the name of a tool that is in one; the name begins with it.
        must_call: name of the tool that the reply should call, `ANY_TOOL`, or None.
        parallel_calls: True if the reply may make several calls.
        reply_format: JSON format that the reply should have.
        choices: number of replies.
        logprobs: True if the reply should have the log-probabilities of its tokens.
        top_logprobs: number of likeliest tokens to report at the position of each token.
        seed: seed of the sampling, or None.
        unheeded: names of fields and tools of the call that the gateway ignores.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    max_tokens: int | None = None
    sampling: dict[str, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = True
    store: bool = False
    previous_id: str = ""
    is_retry: bool = False
    text_tools: frozenset[str] = frozenset()
    namespaces: Mapping[str, str] = field(default_factory=dict)
    must_call: str | None = None
    parallel_calls: bool = True
    reply_format: ReplyFormat | None = None
    choices: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    seed: int | None = None
    unheeded: tuple[str, ...] = ()

    @property
    def constraint(self) -> ReplyConstraint | None:
        """Form that the reply must have, or None if any reply will do.

        With a format of the reply, tools may be called in its place. A call of a tool that the
        request does not describe cannot be required.
        """
        tools = self.tools
        if self.must_call not in (None, ANY_TOOL):
            tools = tuple(tool for tool in tools if tool.name == self.must_call)
        must_call = self.must_call is not None and bool(tools)
        reply_format = self.reply_format
        if reply_format is None and not must_call:
            return None

        schema = None
        if reply_format is not None and not must_call:
            schema = {"type": "object"} if reply_format.schema is None else reply_format.schema
        return ReplyConstraint.of(schema, tools, parallel_calls=self.parallel_calls)

    def cut_at_stop(self, text: str) -> tuple[str, str | None]:
        """Return the text before its first stop, and the stop; or the whole text and None."""
        first_end = len(text)
        first_stop = None
        for stop in sorted(self.stop):
            end = text.find(stop)
            if 0 <= end < first_end:
                first_end = end
                first_stop = stop
        return text[:first_end], first_stop


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a reply: its thoughts, its text or a tool call.

    Attributes:
        text: text of the part. Of a tool call: its arguments as JSON, or the free text that its tool
            takes.
        takes_text: True for the call of a tool that takes free text.
    """

    kind: Literal["reasoning", "text", "tool_call"]
    text: str
    tool_call: ToolUse | None = None
    takes_text: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token of a reply, with its log-probability.

    Attributes:
        candidates: the likeliest tokens at its position, with their log-probabilities.
    """

    token: str
    logprob: float
    candidates: tuple[tuple[str, float], ...] = ()

    @property
    def openai(self) -> dict[str, Any]:
        """The token as OpenAI's APIs write it."""
        return {
            **_openai_token(self.token, self.logprob),
            "top_logprobs": [_openai_token(*candidate) for candidate in self.candidates],
        }


def _openai_token(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """An agent's reply, or as much of it as has been sampled.

    Attributes:
        created: Unix time in seconds.
        finish: reason why the reply ended; None while it is sampled.
        stop_sequence: stop of the request that ended the text, or None.
        text_tools, namespaces: see `ChatRequest`.
        logprobs: sampled tokens with those of thoughts and calls; None if the call does not ask for
            them, or the model returns none.
    """

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolUse, ...] = ()
    finish: Finish | None = None
    stop_sequence: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    text_tools: frozenset[str] = frozenset()
    namespaces: Mapping[str, str] = field(default_factory=dict)
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def blocks(self) -> list[Block]:
        """Thoughts, text and calls; a complete reply without calls always has a text."""
        blocks = []
        if self.reasoning:
            blocks.append(Block("reasoning", self.reasoning))
        if self.text or (self.finish and not self.calls):
            blocks.append(Block("text", self.text))
        for call in self.calls:
            takes_text = call.name in self.text_tools
            text = json.loads(call.arguments)[TEXT_ARGUMENT] if takes_text else call.arguments
            blocks.append(Block("tool_call", text, call, takes_text))
        return blocks

    def is_prefix_of(self, reasoning: str, text: str) -> bool:
        """Return True if this partial reply is a prefix of one with this reasoning and text."""
        if self.text:
            return reasoning == self.reasoning and text.startswith(self.text)
        return reasoning.startswith(self.reasoning)

    @property
    def message(self) -> Message:
        """The reply as the program repeats it in its next call."""
        return Message(role="assistant", content=self.text, calls=self.calls)


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A server-sent event of a stream; its name is "" in a dialect without names."""

    name: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDelta:
    """New text of one block of a streamed reply."""

    index: int  # of the block in the reply
    block: Block  # with all of its text so far
    text: str  # new
    opens: bool  # True at the first delta of the block
    closes: bool  # True at the last delta of the block


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStep:
    """One step of a stream: the reply as it was streamed so far, and as it is now."""

    previous: ChatReply | None  # None at the first step
    reply: ChatReply
    events_sent: int

    def block_deltas(self) -> list[BlockDelta]:
        """Return the blocks that are new or have grown; only the last block of a reply grows.

        Raises:
            GatewayError: the reply does not begin with the text that was streamed.
        """
        old_blocks = self.previous.blocks if self.previous else []
        new_blocks = self.reply.blocks
        last_old = len(old_blocks) - 1
        last_new = len(new_blocks) - 1

        deltas = []
        for index, block in enumerate(new_blocks):
            is_new = index > last_old
            is_closed = index < last_old
            old_text = "" if is_new else old_blocks[index].text
            if not block.text.startswith(old_text) or (is_closed and block != old_blocks[index]):
                raise GatewayError(503, "the reply does not continue the text that was streamed")
            if is_closed:
                continue
            deltas.append(
                BlockDelta(
                    index=index,
                    block=block,
                    text=block.text[len(old_text) :],
                    opens=is_new,
                    closes=bool(self.reply.finish) or index < last_new,
                )
            )
        return deltas


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Translation between one HTTP API and the terms of this module.

    Attributes:
        path: URL path of the API, below a session's address.
        parse: reads a request's body; raises GatewayError.
        render: writes the complete replies of a call, one for each of its choices.
        stream: writes the events of one step of a stream.
        render_error: writes an error.
        end_of_stream: text after the last event of a stream.
    """

    path: str
    parse: Callable[[bytes], ChatRequest]
    render: Callable[[Sequence[ChatReply]], dict[str, Any]]
    stream: Callable[[StreamStep, ChatRequest], Iterator[StreamEvent]]
    render_error: Callable[[GatewayError], dict[str, Any]]
    end_of_stream: str = ""


class ContentPart(BaseModel):
    """A part of a message's content; a dialect reads the fields of the types that it knows."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str = ""


Content = str | list[ContentPart] | None


def content_text(content: Content) -> str:
    """Return the text of a message's content; raise GatewayError if a part is not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in _TEXT_PARTS:
            raise GatewayError(
                400,
                f"a content part has the type '{part.type[:40]}'; the agents of this gateway read "
                "text only",
            )
    return "\n".join(part.text for part in content)


def result_text(content: Content, unheeded: list[str]) -> str:
    """Return the text of a tool's result, in which a note stands for each part that is not text.

    Args:
        content: the result.
        unheeded: list to which `result.TYPE` is added for each of these parts.
    """
    if not isinstance(content, list):
        return content or ""
    texts = []
    for part in content:
        if part.type in _TEXT_PARTS:
            texts.append(part.text)
        else:
            kind = field_name(part.type)
            texts.append(f"[{kind}: left out, because this model reads text only]")
            unheeded.append(f"result.{kind}")
    return "\n".join(texts)


class FormatSpec(BaseModel):
    """Format of a reply as a program asks for it, in the Responses and in the Messages API."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_value: dict[str, Any] | None = Field(None, alias="schema")

    def reply_format(self) -> ReplyFormat | None:
        """Return the format, or None for text; raise GatewayError if its schema is invalid."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return ReplyFormat(schema=None)
        schema = self.json_value or {}
        problem = schema_problem(schema)
        if problem:
            raise GatewayError(400, f"the schema of the reply's format is invalid: {problem}")
        return ReplyFormat(schema=schema, name=self.name or "", description=self.description or "")


class RequestBody(BaseModel):
    """Fields that the requests of all dialects share.

    Other fields are ignored; `ChatRequest.unheeded` names those that would change a reply.
    """

    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1, max_length=200)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None

    def chat_request(
        self,
        messages: Sequence[Message],
        tools: RequestTools,
        *,
        system: str | None = None,
        unheeded: Iterable[str] = (),
        **fields: Any,
    ) -> ChatRequest:
        """Return the request in the terms that all dialects share.

        Args:
            messages: the conversation.
            tools: tools of the request.
            system: system prompt that precedes the messages.
            unheeded: names of known parts of the request that are ignored.
            fields: further fields of `ChatRequest`.

        Raises:
            GatewayError: there are no messages, or the last one is the assistant's.
        """
        if system:
            messages = [Message(role="system", content=system), *messages]
        return ChatRequest(
            model=self.model,
            messages=_conversation(messages),
            tools=tuple(tools.schemas),
            text_tools=frozenset(tools.text_tools),
            namespaces=tools.namespaces,
            must_call=tools.must_call if tools.schemas else None,
            parallel_calls=tools.parallel_calls,
            unheeded=tuple(dict.fromkeys([*self._unknown_fields(), *tools.unheeded, *unheeded])),
            sampling=self.model_dump(include={"temperature", "top_p"}, exclude_none=True),
            stream=bool(self.stream),
            **fields,
        )

    def _unknown_fields(self) -> list[str]:
        """Return the names of unknown fields that have a value and would change a reply."""
        return [
            field_name(name)
            for name, value in (self.model_extra or {}).items()
            if value and name not in _FIELDS_WITHOUT_EFFECT
        ]


def parse_body(model: type[_Model], body: bytes) -> _Model:
    """Return a JSON body as an instance of `model`; raise GatewayError with its first problem."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, problem["loc"]))
        message = f"{key}: {problem['msg']}" if key else problem["msg"]
        raise GatewayError(400, message) from None


def order_tool_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Put the results of consecutive tool messages into the order of their calls.

    The APIs bind a result to its call by an id and allow any order. Most chat templates write no
    ids, so a model takes the first result for that of the first call.

    Raises:
        GatewayError: a result has no id, or the id of no call before it.
    """
    ordered: list[Message] = []
    results: list[Message] = []
    call_positions: dict[str, int] = {}
    calls_so_far = 0
    for message in messages:
        if message.role == "tool":
            if message.answers not in call_positions:
                raise GatewayError(400, _unknown_call(message.answers, call_positions))
            results.append(message)
            continue
        ordered += sorted(results, key=lambda result: call_positions[result.answers])
        ordered.append(message)
        results = []
        for call in message.calls:
            call_positions[call.id] = calls_so_far
            calls_so_far += 1
    ordered += sorted(results, key=lambda result: call_positions[result.answers])
    return tuple(ordered)


def _unknown_call(call_id: str, earlier_ids: Iterable[str]) -> str:
    """Return the error message for a tool result that belongs to no call."""
    if not call_id:
        return "a tool result has no id of its call; send the id with which the call came"
    calls = ", ".join(f"'{earlier_id}'" for earlier_id in earlier_ids) or "none"
    return (
        f"a tool result answers call '{call_id}', which no assistant message before it makes; "
        f"calls so far: {calls}"
    )


def _conversation(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Merge the system messages at the beginning into one, since most chat templates allow one.

    Raises:
        GatewayError: there are no messages, or the assistant has the last word.
    """
    start = 0
    while start < len(messages) and messages[start].role == "system":
        start += 1
    system_prompt = "\n\n".join(message.content for message in messages[:start])

    conversation = tuple(messages[start:])
    if system_prompt:
        conversation = (Message(role="system", content=system_prompt), *conversation)
    if not conversation or conversation[-1].role == "assistant":
        raise GatewayError(400, "the last message must be of the user, of a tool or of the system")
    return conversation
