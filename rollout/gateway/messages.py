"""Anthropic's Messages: requests, replies and streams."""

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, Field

from rollout.gateway import dialects
from rollout.gateway.dialects import ChatReply, ChatRequest, Content, ContentPart, Event
from rollout.records.trajectory import Message, ToolUse

_STOP_REASONS: dict[str | None, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_THOUGHTS = ("thinking", "redacted_thinking")


class _Block(ContentPart):
    """A part of a message; which fields it has depends on its type."""

    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: Content = None


class _Said(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(dialects.ToolSpec):
    type: str = Field(default="custom", pattern=r"^(custom|(memory|bash|text_editor)_\d{8})$")
    # none of those that Anthropic defines, and the client runs
    parameters: dict[str, Any] | None = Field(None, alias="input_schema")


class _CountBody(dialects.Body):
    messages: list[_Said] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    system: Content = None
    tools: list[_Tool] | None = None
    stop_sequences: list[str] | None = None


class _MessagesBody(_CountBody):
    max_tokens: int = Field(ge=1)


def _messages(said: _Said) -> Iterator[Message]:
    """What a message says: results of tools, each by itself, before the rest."""
    blocks = (
        [_Block(type="text", text=said.content)] if isinstance(said.content, str) else said.content
    )
    kinds = ("tool_result",) if said.role == "user" else ("tool_use", *_THOUGHTS)
    rest: list[ContentPart] = [block for block in blocks if block.type not in kinds]
    for block in blocks:
        if block.type == kinds[0] == "tool_result":
            yield Message(
                role="tool", content=dialects.text_of(block.content), answers=block.tool_use_id
            )
    calls = [
        ToolUse(id=block.id, name=block.name, arguments=dialects.arguments_of(block.input))
        for block in blocks
        if block.type == kinds[0] == "tool_use"
    ]
    if rest or calls or said.role == "assistant":
        thoughts = "".join(block.thinking for block in blocks if block.type in kinds[1:])
        yield Message(
            role=said.role, content=dialects.text_of(rest), reasoning=thoughts, calls=tuple(calls)
        )


def _parse(body: bytes, kind: type[_CountBody] = _MessagesBody) -> ChatRequest:
    asked: _CountBody = dialects.read(kind, body)
    return asked.request(
        [message for said in asked.messages for message in _messages(said)],
        asked.tools,
        system=dialects.text_of(asked.system),
        max_tokens=asked.max_tokens,
        stop=tuple(filter(None, asked.stop_sequences or ())),
    )


def _block(block: dialects.Block) -> tuple[dict[str, Any], dict[str, Any], str]:
    """A block as it is at first and as it is whole, and what of it grows."""
    if block.call is not None:
        use: dict[str, Any] = {
            "type": "tool_use",
            "id": block.call.id,
            "name": block.call.name,
            "input": {},
        }
        return use, {**use, "input": json.loads(block.text)}, "partial_json"
    if block.kind == "text":
        return {"type": "text", "text": ""}, {"type": "text", "text": block.text}, "text"
    thought = {"type": "thinking", "thinking": block.text, "signature": ""}
    return {**thought, "thinking": ""}, thought, "thinking"


def _usage(reply: ChatReply) -> dict[str, int]:
    return {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}


def _render(reply: ChatReply) -> dict[str, Any]:
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [_block(block)[1] for block in reply.blocks],
        "stop_reason": _STOP_REASONS.get(reply.finish, reply.finish),
        "stop_sequence": reply.stop,
        "usage": _usage(reply),
    }


_DELTAS = {"thinking": "thinking_delta", "text": "text_delta", "partial_json": "input_json_delta"}


def _stream(growth: dialects.Growth, asked: ChatRequest) -> Iterator[Event]:
    whole, events = _render(growth.now), list[dict[str, Any]]()
    if growth.before is None:
        start = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
        events.append({"type": "message_start", "message": start})
    for news in growth.news:
        empty, _, kind = _block(news.block)
        if news.begins:
            events.append(
                {"type": "content_block_start", "index": news.index, "content_block": empty}
            )
        delta = {"type": _DELTAS[kind], kind: news.text}
        events.append({"type": "content_block_delta", "index": news.index, "delta": delta})
        if news.ends:
            events.append({"type": "content_block_stop", "index": news.index})
    if growth.now.finish:
        ends = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        events.append({"type": "message_delta", "delta": ends, "usage": _usage(growth.now)})
        events.append({"type": "message_stop"})
    yield from ((event["type"], event) for event in events)


def _error(error: dialects.GatewayError) -> dict[str, Any]:
    return {
        "type": "error",
        "error": {"type": error.kind, "message": str(error)},
        "request_id": None,
    }


def parse_count(body: bytes) -> ChatRequest:
    """What `count_tokens` is asked: a call of Messages that need not say how long its reply may be."""
    return _parse(body, _CountBody)


MESSAGES = dialects.Dialect(
    path="/v1/messages", parse=_parse, render=_render, stream=_stream, error=_error
)
