"""Anthropic's Messages API: requests, replies, streams and the counting of tokens."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout.gateway import dialects
from rollout.gateway.dialects import (
    ChatReply,
    ChatRequest,
    Content,
    ContentPart,
    Dialect,
    FormatSpec,
    RequestBody,
    StreamEvent,
    StreamStep,
)
from rollout.gateway.errors import GatewayError
from rollout.gateway.tools import RequestTools, ToolSpec, field_name, tool_arguments
from rollout.records.trajectory import Message, ToolUse

_STOP_REASONS: dict[str | None, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_THOUGHT_TYPES = ("thinking", "redacted_thinking")
_SIGNATURE_BYTES = 32
# types of the tools that the program runs
_PROGRAM_TOOL = re.compile(r"custom|(memory|bash|text_editor)_\d{8}")

# type of a block's deltas, and their key for the new text, by the kind of the block
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_call": ("input_json_delta", "partial_json"),
}


class _Block(ContentPart):
    """A part of a message; its type decides which of these fields it has."""

    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: Content = None


class _Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(BaseModel):
    """A tool of the program, one that Anthropic defines and the program runs, or a hosted one."""

    type: str | None = None
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    @property
    def is_hosted(self) -> bool:
        """True if Anthropic's servers run the tool, such as `web_search_20250305`."""
        return self.type is not None and not _PROGRAM_TOOL.fullmatch(self.type)


class _ToolChoice(BaseModel):
    type: str
    name: str = ""
    disable_parallel_tool_use: bool = False


class _OutputConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    format: FormatSpec | None = None


class _CountBody(RequestBody):
    """Body of a request to count tokens, which need not limit the reply."""

    messages: list[_Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    system: Content = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    output_config: _OutputConfig | None = None
    output_format: FormatSpec | None = None  # older name of `output_config.format`

    @property
    def format_spec(self) -> FormatSpec | None:
        """Format of the reply."""
        if self.output_config is not None and self.output_config.format is not None:
            return self.output_config.format
        return self.output_format


class _MessagesBody(_CountBody):
    max_tokens: int = Field(ge=1)


def parse_count(body: bytes) -> ChatRequest:
    """Parse a request to count the tokens of a call; `max_tokens` may be missing."""
    return _parse_as(_CountBody, body)


def _parse(body: bytes) -> ChatRequest:
    return _parse_as(_MessagesBody, body)


def _parse_as(model: type[_CountBody], body: bytes) -> ChatRequest:
    parsed = dialects.parse_body(model, body)
    messages: list[Message] = []
    unheeded: list[str] = []
    for message in parsed.messages:
        messages += _parse_message(message, unheeded)
    if parsed.output_config is not None and parsed.output_config.model_extra:
        unheeded += [f"output_config.{name}" for name in parsed.output_config.model_extra]
    format_spec = parsed.format_spec
    return parsed.chat_request(
        messages,
        _parse_tools(parsed),
        system=dialects.content_text(parsed.system),
        unheeded=map(field_name, unheeded),
        reply_format=None if format_spec is None else format_spec.reply_format(),
        max_tokens=parsed.max_tokens,
        stop=tuple(stop for stop in parsed.stop_sequences or () if stop),
    )


def _parse_tools(parsed: _CountBody) -> RequestTools:
    tools = RequestTools()
    for tool in parsed.tools or ():
        if tool.is_hosted:
            tools.leave_out(tool.type or "")
        elif not tool.name:
            raise GatewayError(400, "a tool has no name")
        else:
            spec = ToolSpec(
                name=tool.name, description=tool.description, parameters=tool.input_schema
            )
            tools.schemas.append(spec.tool_schema())
    if parsed.tool_choice is not None:
        tools.choose(parsed.tool_choice.type, parsed.tool_choice.name)
        tools.parallel_calls = not parsed.tool_choice.disable_parallel_tool_use
    return tools


def _parse_message(message: _Message, unheeded: list[str]) -> list[Message]:
    blocks = message.content
    if isinstance(blocks, str):
        blocks = [_Block(type="text", text=blocks)]
    if message.role == "user":
        return _parse_user_blocks(blocks, unheeded)
    return _parse_other_blocks(message.role, blocks)


def _parse_user_blocks(blocks: list[_Block], unheeded: list[str]) -> list[Message]:
    """Return a message per tool result, and then one with the user's text, if there is any."""
    messages = []
    text_blocks: list[ContentPart] = []
    for block in blocks:
        if block.type != "tool_result":
            text_blocks.append(block)
            continue
        result = dialects.result_text(block.content, unheeded)
        messages.append(Message(role="tool", content=result, answers=block.tool_use_id))

    if text_blocks:
        messages.append(Message(role="user", content=dialects.content_text(text_blocks)))
    return messages


def _parse_other_blocks(role: str, blocks: list[_Block]) -> list[Message]:
    """Return one message of the assistant or of the system, with its text, thoughts and tool calls.

    An empty message of the system is left out; an empty reply of the assistant is not.
    """
    text_blocks: list[ContentPart] = []
    thoughts = []
    calls = []
    for block in blocks:
        if block.type == "tool_use":
            arguments = tool_arguments(block.input)
            calls.append(ToolUse(id=block.id, name=block.name, arguments=arguments))
        elif block.type in _THOUGHT_TYPES:
            thoughts.append(block.thinking)
        else:
            text_blocks.append(block)

    if not (text_blocks or calls or role == "assistant"):
        return []
    message = Message(
        role=role,
        content=dialects.content_text(text_blocks),
        reasoning="".join(thoughts),
        calls=tuple(calls),
    )
    return [message]


def _render(reply: ChatReply) -> dict[str, Any]:
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [_render_block(block) for block in reply.blocks],
        "stop_reason": _STOP_REASONS.get(reply.finish, reply.finish),
        "stop_sequence": reply.stop_sequence,
        "usage": _usage(reply),
    }


def _render_block(block: dialects.Block) -> dict[str, Any]:
    if block.tool_call is not None:
        return {
            "type": "tool_use",
            "id": block.tool_call.id,
            "name": block.tool_call.name,
            "input": json.loads(block.text),
        }
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "thinking", "thinking": block.text, "signature": _signature(block.text)}


def _signature(thoughts: str) -> str:
    """Return the signature of a thinking block, which is equal for equal thoughts.

    Clients store it and send it back with the block. Some drop a block whose signature is empty.
    The gateway takes a block back with any signature, because a program may edit its conversation.
    """
    digest = hashlib.blake2b(thoughts.encode(), digest_size=_SIGNATURE_BYTES).digest()
    return base64.b64encode(digest).decode()


def _render_empty_block(block: dialects.Block) -> dict[str, Any]:
    """Return a block as a stream opens it, before its first delta."""
    if block.tool_call is not None:
        return {
            "type": "tool_use",
            "id": block.tool_call.id,
            "name": block.tool_call.name,
            "input": {},
        }
    if block.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _stream(step: StreamStep, request: ChatRequest) -> Iterator[StreamEvent]:
    def event(kind: str, **fields: Any) -> StreamEvent:
        return StreamEvent(kind, {"type": kind, **fields})

    message = _render(step.reply)
    if step.previous is None:
        opening = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
        yield event("message_start", message=opening)

    for delta in step.block_deltas():
        index = delta.index
        if delta.opens:
            empty_block = _render_empty_block(delta.block)
            yield event("content_block_start", index=index, content_block=empty_block)
        delta_type, key = _DELTAS[delta.block.kind]
        yield event("content_block_delta", index=index, delta={"type": delta_type, key: delta.text})
        if delta.closes:
            if delta.block.kind == "reasoning":
                signature = {"type": "signature_delta", "signature": _signature(delta.block.text)}
                yield event("content_block_delta", index=index, delta=signature)
            yield event("content_block_stop", index=index)

    if step.reply.finish:
        ending = {
            "stop_reason": message["stop_reason"],
            "stop_sequence": message["stop_sequence"],
        }
        yield event("message_delta", delta=ending, usage=_usage(step.reply))
        yield event("message_stop")


def _usage(reply: ChatReply) -> dict[str, int]:
    return {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}


def _render_error(error: GatewayError) -> dict[str, Any]:
    return {
        "type": "error",
        "error": {"type": error.kind, "message": str(error)},
        "request_id": None,
    }


MESSAGES = Dialect(
    path="/v1/messages",
    parse=_parse,
    render=lambda replies: _render(replies[0]),
    stream=_stream,
    render_error=_render_error,
)
