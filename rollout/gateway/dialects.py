"""Dialects of a gateway: what is asked and what is answered, in terms that the dialects share.

What cannot be read, or not be answered, raises a GatewayError that says so.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from rollout.models.tool_calls import ToolSchema
from rollout.records.trajectory import Message, ToolUse

Finish = Literal["stop", "length", "tool_calls", "stop_sequence"]
Event = tuple[str, Any]  # of a stream: its name, "" where the dialect gives it none, and its data


class GatewayError(Exception):
    """A call that cannot be answered, with its HTTP status and the name that a dialect's errors have for it."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.kind = _ERROR_KINDS.get(status, "api_error")
        self.code = code  # OpenAI's


# what an error of a status is called
_ERROR_KINDS: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A call of a program, as its dialect's parser read it."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    max_tokens: int | None = None
    sampling: dict[str, float] = field(
        default_factory=dict
    )  # temperature and top_p, where they are given
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = True  # whether a stream ends with the number of tokens
    kept: bool = False  # whether a later call may name the reply as the one it comes after
    previous: str = ""  # id of the reply that `messages` come after
    again: bool = False  # whether the caller has made this call before, and read no answer

    def cut(self, text: str) -> tuple[str, str | None]:
        """The text up to the first of the stops in it, and that stop; all of it, and None, where there is none."""
        ends = [(end, stop) for stop in self.stop if (end := text.find(stop)) >= 0]
        end, stop = min(ends, default=(len(text), None))
        return text[:end], stop


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a reply."""

    kind: Literal["reasoning", "text", "call"]
    text: str  # of a call its arguments
    call: ToolUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """An agent's reply, as the dialects write it, or as much of one as is known while it is sampled."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolUse, ...] = ()
    finish: Finish | None = None  # None: it is not whole
    stop: str | None = None  # of the call's stops the one that cut the text
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def blocks(self) -> list[Block]:
        """Its thoughts, its text and its calls; of a whole reply without calls always a text."""
        thoughts = [Block("reasoning", self.reasoning)] if self.reasoning else []
        texts = [Block("text", self.text)] if self.text or (self.finish and not self.calls) else []
        return [*thoughts, *texts, *(Block("call", call.arguments, call) for call in self.calls)]

    def begins(self, reasoning: str, text: str) -> bool:
        """Whether a reply with these thoughts and words goes on from this one."""
        return text.startswith(self.text) and (
            reasoning == self.reasoning if self.text else reasoning.startswith(self.reasoning)
        )

    @property
    def message(self) -> Message:
        """As a program will repeat it."""
        return Message(role="assistant", content=self.text, calls=self.calls)


@dataclass(frozen=True, slots=True)
class BlockNews:
    """What a stream has to say of one block."""

    index: int  # of the block
    block: Block
    text: str  # what is new of its text
    begins: bool  # nothing was said of it yet
    ends: bool  # nothing more will be


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What a stream goes on by; only the latest block grows."""

    before: ChatReply | None  # what was streamed; None: nothing, not even that there is a reply
    now: ChatReply
    sent: int  # events so far

    @property
    def news(self) -> list[BlockNews]:
        """What is new, block by block; GatewayError if the reply does not begin with what was streamed."""
        old, new, found = (
            self.before.blocks if self.before else [],
            self.now.blocks,
            list[BlockNews](),
        )
        for index, block in enumerate(new):
            begins, ended = index >= len(old), index < len(old) - 1
            known = "" if begins else old[index].text
            if not block.text.startswith(known) or (ended and block != old[index]):
                raise GatewayError(503, "the reply does not go on as it began")
            if not ended:
                ends = bool(self.now.finish) or index < len(new) - 1
                found.append(BlockNews(index, block, block.text[len(known) :], begins, ends))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one API writes requests, replies, streams and errors."""

    path: str  # below a session's address
    parse: Callable[[bytes], ChatRequest]  # raises GatewayError
    render: Callable[[ChatReply], dict[str, Any]]
    stream: Callable[[Growth, ChatRequest], Iterator[Event]]
    error: Callable[[GatewayError], dict[str, Any]]
    last: str = ""  # what ends a stream


class ContentPart(BaseModel):
    """A part of a message's content: text, by any of its names, or what a parser picks up itself."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str = ""


Content = str | list[ContentPart] | None
_TEXTS = {"text", "input_text", "output_text", "refusal"}


def text_of(content: Content) -> str:
    """The text of a message's content."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in _TEXTS:
            raise GatewayError(
                400, f"a content part of type '{part.type[:40]}'; the agents here read text only"
            )
    return "\n".join(part.text for part in content)


class ToolSpec(BaseModel):
    """A tool as a program describes it."""

    type: str = "function"
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def told(self) -> ToolSchema:
        """As a model is told of it."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        try:
            json.dumps(parameters)
        except ValueError as error:
            raise GatewayError(400, f"the parameters of tool '{self.name}': {error}") from None
        return ToolSchema(name=self.name, description=self.description or "", parameters=parameters)


class TextFormat(BaseModel):
    """The form of a reply; nothing here holds a model to a grammar."""

    type: Literal["text"]


class Body(BaseModel):
    """What the dialects' requests have in common; what is not named in them is not read."""

    model: str = Field(min_length=1, max_length=200)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None

    def request(
        self,
        messages: Sequence[Message],
        tools: Iterable[ToolSpec] | None,
        *,
        system: str | None = None,
        **own: Any,
    ) -> ChatRequest:
        """What is asked, with the fields that are the dialect's `own`; `system` is said before the messages."""
        opening = [Message(role="system", content=system)] if system else []
        return ChatRequest(
            model=self.model,
            messages=conversation([*opening, *messages]),
            tools=tuple(tool.told() for tool in tools or ()),
            sampling=self.model_dump(include={"temperature", "top_p"}, exclude_none=True),
            stream=bool(self.stream),
            **own,
        )


def read(model: type[Any], body: bytes) -> Any:
    """A body as an instance of `model`."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise GatewayError(400, f"{place}: {first['msg']}" if place else first["msg"]) from None


def arguments_of(given: str | dict[str, Any]) -> str:
    """The arguments of a tool call that a program repeats, as records write them."""
    try:
        value = from_json(given or "{}") if isinstance(given, str) else given
        if isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False)
    except ValueError:
        pass
    raise GatewayError(400, "the arguments of a tool call are no JSON object")


def conversation(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with those of the system at the beginning as one, which is all that most chat templates know."""
    systems = next(
        (n for n, message in enumerate(messages) if message.role != "system"), len(messages)
    )
    opening = "\n\n".join(message.content for message in messages[:systems])
    said = (*([Message(role="system", content=opening)] if opening else ()), *messages[systems:])
    if not said or said[-1].role == "assistant":
        raise GatewayError(
            400, "expected messages that end with one of the user, a tool or the system"
        )
    return said


def openai_error(error: GatewayError) -> dict[str, Any]:
    """The body of an error as OpenAI's APIs write it."""
    return {
        "error": {
            "message": str(error),
            "type": error.kind,
            "param": None,
            "code": error.code or None,
        }
    }
