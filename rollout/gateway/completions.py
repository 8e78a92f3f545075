"""OpenAI's Chat Completions API: requests, replies and streams."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, Field

from rollout.gateway import dialects
from rollout.gateway.dialects import (
    ChatReply,
    ChatRequest,
    Content,
    Dialect,
    RequestBody,
    StreamEvent,
    StreamStep,
    TextFormat,
)
from rollout.records.trajectory import Message, ToolUse

_ROLES = {"developer": "system", "function": "tool"}
_DELTA_KEYS = {"reasoning": "reasoning_content", "text": "content"}


class _Function(dialects.ToolSpec):
    arguments: str = "{}"


class _ToolCall(BaseModel):
    id: str = ""
    function: _Function


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Function


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class _CompletionsBody(RequestBody):
    """Body of a request. A field of type None or of one literal is refused with any other value."""

    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    functions: None = None  # deprecated by OpenAI in favour of `tools`
    response_format: TextFormat | None = None
    stream_options: _StreamOptions | None = None


def _parse(body: bytes) -> ChatRequest:
    parsed = dialects.parse_body(_CompletionsBody, body)
    stops = [parsed.stop] if isinstance(parsed.stop, str) else parsed.stop or []
    include_usage = parsed.stream_options is not None and parsed.stream_options.include_usage
    return parsed.chat_request(
        [_parse_message(message) for message in parsed.messages],
        [tool.function for tool in parsed.tools or ()],
        max_tokens=parsed.max_completion_tokens or parsed.max_tokens,
        stop=tuple(stop for stop in stops if stop),
        include_usage=bool(include_usage),
    )


def _parse_message(message: _Message) -> Message:
    calls: list[ToolUse] = []
    if message.role == "assistant":
        calls = [_parse_call(call) for call in message.tool_calls or ()]
    return Message(
        role=_ROLES.get(message.role, message.role),
        content=dialects.content_text(message.content),
        reasoning=message.reasoning_content or "",
        calls=tuple(calls),
        answers=message.tool_call_id or "",
    )


def _parse_call(call: _ToolCall) -> ToolUse:
    arguments = dialects.tool_arguments(call.function.arguments)
    return ToolUse(id=call.id, name=call.function.name, arguments=arguments)


def _render(reply: ChatReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["content"] = reply.text or None
        message["tool_calls"] = _render_calls(reply)
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": _finish_reason(reply),
    }
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def _stream(step: StreamStep, request: ChatRequest) -> Iterator[StreamEvent]:
    reply = step.reply
    head = _head(reply, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> StreamEvent:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return StreamEvent("", {**head, "choices": [choice]})

    if step.previous is None:
        yield chunk({"role": "assistant", "content": ""})

    calls = _render_calls(reply)
    first_call = len(reply.blocks) - len(calls)  # index of its block
    for delta in step.block_deltas():
        if delta.block.call is None:
            yield chunk({_DELTA_KEYS[delta.block.kind]: delta.text})
        else:
            call_index = delta.index - first_call
            yield chunk({"tool_calls": [{**calls[call_index], "index": call_index}]})

    if reply.finish is None:
        return
    yield chunk({}, _finish_reason(reply))
    if request.include_usage:
        yield StreamEvent("", {**head, "choices": [], "usage": _usage(reply)})


def _head(reply: ChatReply, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": reply.created,
        "model": reply.model,
    }


def _finish_reason(reply: ChatReply) -> str | None:
    return "stop" if reply.finish == "stop_sequence" else reply.finish


def _render_calls(reply: ChatReply) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in reply.calls
    ]


def _usage(reply: ChatReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


COMPLETIONS = Dialect(
    path="/v1/chat/completions",
    parse=_parse,
    render=_render,
    stream=_stream,
    render_error=dialects.openai_error,
    end_of_stream="data: [DONE]\n\n",
)
