"""OpenAI's Chat Completions: requests, replies and streams."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, Field

from rollout.gateway import dialects
from rollout.gateway.dialects import (
    Body,
    ChatReply,
    ChatRequest,
    Content,
    Dialect,
    Event,
    TextFormat,
)
from rollout.records.trajectory import Message, ToolUse

_ROLES = {"developer": "system", "function": "tool"}
_FINISH: dict[str | None, str] = {"stop_sequence": "stop"}
_DELTAS = {"reasoning": "reasoning_content", "text": "content"}


class _Function(dialects.ToolSpec):
    arguments: str = "{}"


class _Call(BaseModel):
    id: str = ""
    function: _Function


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Function


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class _Completions(Body):
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    functions: None = None  # what tools were called before
    response_format: TextFormat | None = None
    stream_options: _StreamOptions | None = None


def _message(said: _Message) -> Message:
    calls = said.tool_calls if said.role == "assistant" and said.tool_calls else ()
    return Message(
        role=_ROLES.get(said.role, said.role),
        content=dialects.text_of(said.content),
        reasoning=said.reasoning_content or "",
        calls=tuple(
            ToolUse(
                id=call.id,
                name=call.function.name,
                arguments=dialects.arguments_of(call.function.arguments),
            )
            for call in calls
        ),
        answers=said.tool_call_id or "",
    )


def _parse(body: bytes) -> ChatRequest:
    asked: _Completions = dialects.read(_Completions, body)
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    return asked.request(
        [_message(said) for said in asked.messages],
        [tool.function for tool in asked.tools or ()],
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        stop=tuple(filter(None, stop)),
        usage=bool(asked.stream_options and asked.stream_options.include_usage),
    )


def _usage(reply: ChatReply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _calls(reply: ChatReply) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in reply.calls
    ]


def _head(reply: ChatReply, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": reply.created,
        "model": reply.model,
    }


def _render(reply: ChatReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    message |= {"reasoning_content": reply.reasoning} if reply.reasoning else {}
    message |= {"content": reply.text or None, "tool_calls": _calls(reply)} if reply.calls else {}
    finish = _FINISH.get(reply.finish, reply.finish)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def _stream(growth: dialects.Growth, asked: ChatRequest) -> Iterator[Event]:
    reply = growth.now
    head = _head(reply, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None) -> Event:
        return "", {
            **head,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
        }

    if growth.before is None:
        yield chunk({"role": "assistant", "content": ""})
    calls = _calls(reply)
    for news in growth.news:
        if news.block.call is None:
            yield chunk({_DELTAS[news.block.kind]: news.text})
        else:
            number = news.index - len(reply.blocks)  # from the last
            yield chunk({"tool_calls": [{**calls[number], "index": number + len(calls)}]})
    if reply.finish is None:
        return
    yield chunk({}, _FINISH.get(reply.finish, reply.finish))
    if asked.usage:
        yield "", {**head, "choices": [], "usage": _usage(reply)}


COMPLETIONS = Dialect(
    path="/v1/chat/completions",
    parse=_parse,
    render=_render,
    stream=_stream,
    error=dialects.openai_error,
    last="data: [DONE]\n\n",
)
