"""Types that the HTTP APIs of the gateway share: requests, replies, stream events and errors.

A `Dialect` translates between one API and these types. The dialects are in `completions.py`,
`responses.py` and `messages.py`. A call that cannot be read or answered raises a `GatewayError`.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from rollout.models.tool_calls import ToolSchema
from rollout.records.trajectory import Message, ToolUse

Finish = Literal["stop", "length", "tool_calls", "stop_sequence"]
_Model = TypeVar("_Model", bound=BaseModel)
_TEXT_PARTS = {"text", "input_text", "output_text", "refusal"}
_ERROR_KINDS: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class GatewayError(Exception):
    """A call that cannot be answered.

    Attributes:
        status: HTTP status of the response.
        kind: type of the error in the vendors' APIs, such as "not_found_error".
        code: code of the error in OpenAI's APIs, "" if there is none.
    """

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.kind = _ERROR_KINDS.get(status, "api_error")
        self.code = code


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

    def cut_at_stop(self, text: str) -> tuple[str, str | None]:
        """Return the text before the first stop, and that stop; the whole text and None without."""
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
    """A part of a reply: its thoughts, its text or a tool call."""

    kind: Literal["reasoning", "text", "call"]
    text: str  # of a call: its arguments as JSON
    call: ToolUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """An agent's reply, or as much of it as has been sampled.

    Attributes:
        created: Unix time in seconds.
        finish: reason why the reply ended; None while it is sampled.
        stop_sequence: stop of the request that ended the text, or None.
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

    @property
    def blocks(self) -> list[Block]:
        """Thoughts, text and calls; a complete reply without calls always has a text."""
        blocks = []
        if self.reasoning:
            blocks.append(Block("reasoning", self.reasoning))
        if self.text or (self.finish and not self.calls):
            blocks.append(Block("text", self.text))
        blocks += [Block("call", call.arguments, call) for call in self.calls]
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
        render: writes a complete reply.
        stream: writes the events of one step of a stream.
        render_error: writes an error.
        end_of_stream: text after the last event of a stream.
    """

    path: str
    parse: Callable[[bytes], ChatRequest]
    render: Callable[[ChatReply], dict[str, Any]]
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


class ToolSpec(BaseModel):
    """A tool as a program describes it."""

    type: str = "function"
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def tool_schema(self) -> ToolSchema:
        """Return the tool as models are shown it; raise GatewayError if JSON cannot express it."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        try:
            json.dumps(parameters)
        except ValueError as error:
            raise GatewayError(400, f"the parameters of tool '{self.name}': {error}") from None
        return ToolSchema(name=self.name, description=self.description or "", parameters=parameters)


class TextFormat(BaseModel):
    """Format of a reply; only text is supported, since no grammar constrains the sampling."""

    type: Literal["text"]


class RequestBody(BaseModel):
    """Fields that the requests of all dialects share; unknown fields are ignored."""

    model: str = Field(min_length=1, max_length=200)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None

    def chat_request(
        self,
        messages: Sequence[Message],
        tools: Iterable[ToolSpec] | None,
        *,
        system: str | None = None,
        **fields: Any,
    ) -> ChatRequest:
        """Return the request in the terms that all dialects share.

        Args:
            messages: the conversation.
            tools: tools that the agent may call.
            system: system prompt that precedes the messages.
            fields: further fields of `ChatRequest`, which only this dialect has.

        Raises:
            GatewayError: the conversation does not ask for a reply, or a tool cannot be expressed.
        """
        if system:
            messages = [Message(role="system", content=system), *messages]
        return ChatRequest(
            model=self.model,
            messages=_conversation(messages),
            tools=tuple(tool.tool_schema() for tool in tools or ()),
            sampling=self.model_dump(include={"temperature", "top_p"}, exclude_none=True),
            stream=bool(self.stream),
            **fields,
        )


def parse_body(model: type[_Model], body: bytes) -> _Model:
    """Return a JSON body as an instance of `model`; raise GatewayError with its first problem."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, problem["loc"]))
        message = f"{key}: {problem['msg']}" if key else problem["msg"]
        raise GatewayError(400, message) from None


def tool_arguments(arguments: str | dict[str, Any]) -> str:
    """Return the arguments of a tool call as normalized JSON.

    Args:
        arguments: a JSON object, or its text; "" is an empty object.

    Raises:
        GatewayError: the arguments are not a JSON object.
    """
    try:
        value = from_json(arguments or "{}") if isinstance(arguments, str) else arguments
        if isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False)
    except ValueError:  # no JSON, or an integer with more digits than Python converts
        pass
    raise GatewayError(400, "the arguments of a tool call are not a JSON object")


def openai_error(error: GatewayError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's APIs."""
    return {
        "error": {
            "message": str(error),
            "type": error.kind,
            "param": None,
            "code": error.code or None,
        }
    }


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
    """Return the error text of a tool result that belongs to no call."""
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
