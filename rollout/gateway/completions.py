"""OpenAI's Chat Completions API: requests, replies and streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from rollout.gateway import dialects
from rollout.gateway.dialects import (
    ChatReply,
    ChatRequest,
    Content,
    Dialect,
    FormatSpec,
    RequestBody,
    StreamEvent,
    StreamStep,
)
from rollout.gateway.errors import GatewayError, openai_error
from rollout.gateway.formats import ReplyFormat
from rollout.gateway.tools import (
    OpenAIToolChoice,
    RequestTools,
    TextToolFormat,
    TextToolSpec,
    ToolSpec,
    choose_openai_tools,
    text_arguments,
    tool_arguments,
)
from rollout.records.trajectory import Message, ToolUse

_ROLES = {"developer": "system", "function": "tool"}
_DELTA_KEYS = {"reasoning": "reasoning_content", "text": "content"}


class _CustomFormat(TextToolFormat):
    """Format of a custom tool's text, whose fields may also be nested in `grammar`."""

    grammar: TextToolFormat | None = None

    @model_validator(mode="after")
    def _unnest(self) -> _CustomFormat:
        if self.grammar is not None:
            self.syntax = self.grammar.syntax
            self.definition = self.grammar.definition
        return self


class _Function(ToolSpec):
    arguments: str = "{}"


class _CustomTool(TextToolSpec):
    input: str = ""
    # OpenAI nests the grammar of a custom tool in this API alone.
    format: _CustomFormat | None = None


class _ToolCall(BaseModel):
    id: str = ""
    function: _Function | None = None
    custom: _CustomTool | None = None


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _Tool(BaseModel):
    type: str
    function: _Function | None = None
    custom: _CustomTool | None = None


class _JsonSchema(BaseModel):
    name: str | None = None
    description: str | None = None
    json_value: dict[str, Any] | None = Field(None, alias="schema")


class _Format(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    def reply_format(self) -> ReplyFormat | None:
        """Return the format, or None for text; raise GatewayError if its schema is invalid."""
        nested = self.json_schema or _JsonSchema()
        spec = FormatSpec(
            type=self.type,
            name=nested.name,
            description=nested.description,
            schema=nested.json_value,
        )
        return spec.reply_format()


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class _CompletionsBody(RequestBody):
    """Body of a request."""

    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    n: int | None = Field(None, ge=1, le=128)
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=dialects.MAX_TOP_LOGPROBS)
    functions: list[Any] | None = None  # deprecated by OpenAI in favour of `tools`
    tool_choice: str | OpenAIToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: _Format | None = None
    stream_options: _StreamOptions | None = None


def _parse(body: bytes) -> ChatRequest:
    parsed = dialects.parse_body(_CompletionsBody, body)
    stops = [parsed.stop] if isinstance(parsed.stop, str) else parsed.stop or []
    include_usage = parsed.stream_options is not None and parsed.stream_options.include_usage
    choices = parsed.n or 1
    if choices > 1 and parsed.stream:
        raise GatewayError(400, "n: a stream has one choice; send the call without `stream`")
    if parsed.functions:
        raise GatewayError(400, "functions: this older field is not read; send them as `tools`")

    unheeded: list[str] = []
    top_logprobs = parsed.top_logprobs or 0
    if top_logprobs and not parsed.logprobs:
        unheeded.append("top_logprobs")
        top_logprobs = 0
    response_format = parsed.response_format
    return parsed.chat_request(
        [_parse_message(message, unheeded) for message in parsed.messages],
        _parse_tools(parsed),
        unheeded=unheeded,
        max_tokens=parsed.max_completion_tokens or parsed.max_tokens,
        stop=tuple(stop for stop in stops if stop),
        include_usage=bool(include_usage),
        reply_format=None if response_format is None else response_format.reply_format(),
        choices=choices,
        logprobs=bool(parsed.logprobs),
        top_logprobs=top_logprobs,
        seed=parsed.seed,
    )


def _parse_tools(parsed: _CompletionsBody) -> RequestTools:
    tools = RequestTools()
    for tool in parsed.tools or ():
        if tool.function is not None:
            tools.schemas.append(tool.function.tool_schema())
        elif tool.custom is not None:
            tools.add_text_tool(tool.custom)
        else:
            tools.leave_out(tool.type)
    choose_openai_tools(tools, parsed.tool_choice, parsed.parallel_tool_calls)
    return tools


def _parse_message(message: _Message, unheeded: list[str]) -> Message:
    calls: list[ToolUse] = []
    if message.role == "assistant":
        calls = [_parse_call(call) for call in message.tool_calls or ()]
    role = _ROLES.get(message.role, message.role)
    if role == "tool":
        content = dialects.result_text(message.content, unheeded)
    else:
        content = dialects.content_text(message.content)
    return Message(
        role=role,
        content=content,
        reasoning=message.reasoning_content or "",
        calls=tuple(calls),
        answers=message.tool_call_id or "",
    )


def _parse_call(call: _ToolCall) -> ToolUse:
    if call.custom is not None:
        arguments = text_arguments(call.custom.input)
        return ToolUse(id=call.id, name=call.custom.name, arguments=arguments)
    if call.function is None:
        raise GatewayError(400, "a tool call of an assistant message has no `function`")
    arguments = tool_arguments(call.function.arguments)
    return ToolUse(id=call.id, name=call.function.name, arguments=arguments)


def _render(replies: Sequence[ChatReply]) -> dict[str, Any]:
    choices = [_render_choice(index, reply) for index, reply in enumerate(replies)]
    head = _head(replies[0], "chat.completion")
    return {**head, "choices": choices, "usage": _usage(*replies)}


def _render_choice(index: int, reply: ChatReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["content"] = reply.text or None
        message["tool_calls"] = _render_calls(reply)
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(reply),
        "finish_reason": _finish_reason(reply),
    }


def _logprobs(reply: ChatReply) -> dict[str, Any] | None:
    if reply.logprobs is None:
        return None
    return {"content": [token.openai for token in reply.logprobs], "refusal": None}


def _stream(step: StreamStep, request: ChatRequest) -> Iterator[StreamEvent]:
    reply = step.reply
    head = _head(reply, "chat.completion.chunk")

    def chunk(
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> StreamEvent:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return StreamEvent("", {**head, "choices": [choice]})

    if step.previous is None:
        yield chunk({"role": "assistant", "content": ""})

    calls = _render_calls(reply)
    first_call = len(reply.blocks) - len(calls)  # index of its block
    for delta in step.block_deltas():
        if delta.block.tool_call is None:
            yield chunk({_DELTA_KEYS[delta.block.kind]: delta.text})
        else:
            call_index = delta.index - first_call
            yield chunk({"tool_calls": [{**calls[call_index], "index": call_index}]})

    if reply.finish is None:
        return
    # The log-probabilities of the whole reply: clients join those of all chunks.
    yield chunk({}, _finish_reason(reply), _logprobs(reply))
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
    calls: list[dict[str, Any]] = []
    for block in reply.blocks:
        if block.tool_call is None:
            continue
        kind = "custom" if block.takes_text else "function"
        key = "input" if block.takes_text else "arguments"
        call = {"name": block.tool_call.name, key: block.text}
        calls.append({"id": block.tool_call.id, "type": kind, kind: call})
    return calls


def _usage(*replies: ChatReply) -> dict[str, int]:
    """Return the token counts of a call; the choices share the prompt."""
    prompt_tokens = replies[0].prompt_tokens
    completion_tokens = sum(reply.completion_tokens for reply in replies)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


COMPLETIONS = Dialect(
    path="/v1/chat/completions",
    parse=_parse,
    render=_render,
    stream=_stream,
    render_error=openai_error,
    end_of_stream="data: [DONE]\n\n",
)
