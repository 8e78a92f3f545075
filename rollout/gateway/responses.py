"""OpenAI's Responses API: requests, replies and streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Literal

from pydantic import BaseModel, Field

from rollout.gateway import dialects
from rollout.gateway.dialects import (
    Block,
    BlockDelta,
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
from rollout.gateway.tools import (
    OpenAIToolChoice,
    RequestTools,
    TextToolFormat,
    TextToolSpec,
    ToolSpec,
    choose_openai_tools,
    qualified_name,
    text_arguments,
    tool_arguments,
)
from rollout.records.trajectory import Message, ToolUse

_ROLES = {"developer": "system"}
_TOOLS_ITEM = "additional_tools"  # item of the input with further tools
_LOGPROBS = "message.output_text.logprobs"  # in `include`, with which a call asks for them

# fields that are the same in every response
_CONSTANT_FIELDS: dict[str, Any] = {
    "error": None,
    "instructions": None,
    "temperature": None,
    "top_p": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


class _Tool(BaseModel):
    """A tool of the program, or one that OpenAI's servers run; its type decides on the fields."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: TextToolFormat | None = None
    tools: list[_Tool] | None = None  # of a namespace


class _Item(BaseModel):
    """An item of the input; its type decides which of these fields it has."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: Content = None
    summary: Content = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = "{}"
    input: str = ""
    output: Content = None
    tools: list[_Tool] | None = None

    @property
    def called_tool(self) -> str:
        """Name of the tool of a call, as the model knows it."""
        return qualified_name(self.namespace or "", self.name)


class _TextOptions(BaseModel):
    format: FormatSpec | None = None


class _ResponsesBody(RequestBody):
    """Body of a request. A field of type None or of one literal is refused with any other value."""

    input: str | list[_Item]
    instructions: str | None = None
    tools: list[_Tool] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    previous_response_id: str | None = None
    text: _TextOptions | None = None
    background: Literal[False] | None = None
    conversation: None = None  # kept by OpenAI's servers, as is `prompt`
    prompt: None = None
    top_logprobs: int | None = Field(None, ge=0, le=dialects.MAX_TOP_LOGPROBS)
    include: list[str] | None = None
    tool_choice: str | OpenAIToolChoice | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None


class _AssistantMessage:
    """An assistant's message that is assembled from consecutive items."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.text: str | None = None
        self.calls: list[ToolUse] = []

    @property
    def has_output(self) -> bool:
        """True if there is a text, even an empty one, or a call."""
        return self.text is not None or bool(self.calls)

    def message(self) -> Message:
        """Return the finished message."""
        return Message(
            role="assistant",
            content=self.text or "",
            reasoning=self.reasoning,
            calls=tuple(self.calls),
        )


def _parse(body: bytes) -> ChatRequest:
    parsed = dialects.parse_body(_ResponsesBody, body)
    items = [_Item(content=parsed.input)] if isinstance(parsed.input, str) else parsed.input
    has_logprobs = _LOGPROBS in (parsed.include or ())
    unheeded: list[str] = []
    top_logprobs = parsed.top_logprobs or 0
    if top_logprobs and not has_logprobs:
        unheeded.append("top_logprobs")
        top_logprobs = 0
    text_format = parsed.text.format if parsed.text is not None else None
    return parsed.chat_request(
        _parse_items(items, unheeded),
        _parse_tools(parsed, items),
        system=parsed.instructions,
        unheeded=unheeded,
        reply_format=None if text_format is None else text_format.reply_format(),
        logprobs=has_logprobs,
        top_logprobs=top_logprobs,
        max_tokens=parsed.max_output_tokens,
        store=parsed.store is not False,
        previous_id=(parsed.previous_response_id or "").removeprefix("resp_"),
    )


def _parse_tools(parsed: _ResponsesBody, items: Sequence[_Item]) -> RequestTools:
    """Return the tools of a request, and those that items of its input add."""
    tools = RequestTools()
    specs = list(parsed.tools or ())
    for item in items:
        if item.type == _TOOLS_ITEM:
            specs += item.tools or ()
    for spec in specs:
        if spec.type == "namespace":
            for tool in spec.tools or ():
                _add_tool(tools, tool, spec.name)
        else:
            _add_tool(tools, spec, "")
    choose_openai_tools(tools, parsed.tool_choice, parsed.parallel_tool_calls)
    return tools


def _add_tool(tools: RequestTools, tool: _Tool, namespace: str) -> None:
    if tool.type not in ("function", "custom"):
        tools.leave_out(tool.type)
        return
    if not tool.name:
        raise GatewayError(400, f"a tool of type '{tool.type}' has no name")
    name = qualified_name(namespace, tool.name)
    if namespace:
        tools.namespaces[name] = namespace
    if tool.type == "custom":
        spec = TextToolSpec(name=name, description=tool.description, format=tool.format)
        tools.add_text_tool(spec)
    else:
        function = ToolSpec(name=name, description=tool.description, parameters=tool.parameters)
        tools.schemas.append(function.tool_schema())


def _parse_items(items: list[_Item], unheeded: list[str]) -> list[Message]:
    """Convert input items to messages.

    An assistant's thoughts, one text and the calls after it become one message. Thoughts without a
    text or a call are dropped.

    Args:
        items: items of the request.
        unheeded: list to which the parts that are left out are added.
    """
    messages: list[Message] = []
    reply = _AssistantMessage()

    for item in items:
        if item.type == _TOOLS_ITEM:
            continue
        if item.type == "reasoning":
            parts = item.content or item.summary
            if isinstance(parts, list):
                reply.reasoning += "\n".join(part.text for part in parts)
            continue
        if item.type in ("function_call", "custom_tool_call"):
            if item.type == "custom_tool_call":
                arguments = text_arguments(item.input)
            else:
                arguments = tool_arguments(item.arguments)
            reply.calls.append(ToolUse(id=item.call_id, name=item.called_tool, arguments=arguments))
            continue

        is_reply_text = item.type == "message" and item.role == "assistant"
        if is_reply_text and not reply.has_output:
            reply.text = dialects.content_text(item.content)
            continue

        if reply.has_output:
            messages.append(reply.message())
        reply = _AssistantMessage()
        if is_reply_text:
            reply.text = dialects.content_text(item.content)
        else:
            messages.append(_parse_item(item, unheeded))

    if reply.has_output:
        messages.append(reply.message())
    return messages


def _parse_item(item: _Item, unheeded: list[str]) -> Message:
    """Convert an item that is not part of an assistant's message.

    Args:
        item: item of the input.
        unheeded: list to which the parts that are left out are added.
    """
    if item.type in ("function_call_output", "custom_tool_call_output"):
        result = dialects.result_text(item.output, unheeded)
        return Message(role="tool", content=result, answers=item.call_id)
    if item.type == "message":
        role = _ROLES.get(item.role, item.role)
        return Message(role=role, content=dialects.content_text(item.content))
    raise GatewayError(400, f"input items of type '{item.type[:40]}' are not supported")


def _render(reply: ChatReply) -> dict[str, Any]:
    is_cut = reply.finish == "length"
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        **_CONSTANT_FIELDS,
        "created_at": reply.created,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": reply.model,
        "output": [_render_item(reply, index) for index in range(len(reply.blocks))],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def _render_item(reply: ChatReply, index: int) -> dict[str, Any]:
    """Return the reply's block of this index as an output item."""
    block = reply.blocks[index]
    if block.tool_call is not None:
        return _render_call(reply, block, block.tool_call, index)
    if block.kind == "reasoning":
        thought = {"type": "reasoning_text", "text": block.text}
        return {"id": f"rs_{reply.id}", "type": "reasoning", "summary": [], "content": [thought]}
    part: dict[str, Any] = {"type": "output_text", "text": block.text, "annotations": []}
    if reply.logprobs is not None:
        part["logprobs"] = [token.openai for token in reply.logprobs]
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _render_call(reply: ChatReply, block: Block, call: ToolUse, index: int) -> dict[str, Any]:
    """Return a tool call as an output item."""
    if block.takes_text:
        item = {"id": f"ctc_{reply.id}_{index}", "type": "custom_tool_call", "input": block.text}
    else:
        item = {"id": f"fc_{reply.id}_{index}", "type": "function_call", "arguments": block.text}
    item |= {"call_id": call.id, "name": call.name, "status": "completed"}
    namespace = reply.namespaces.get(call.name)
    if namespace is not None:
        item |= {"namespace": namespace, "name": call.name.removeprefix(f"{namespace}.")}
    return item


def _stream(step: StreamStep, request: ChatRequest) -> Iterator[StreamEvent]:
    sequence_numbers = count(step.events_sent)

    def event(kind: str, **fields: Any) -> StreamEvent:
        data = {"type": kind, "sequence_number": next(sequence_numbers), **fields}
        return StreamEvent(kind, data)

    response = _render(step.reply)
    if step.previous is None:
        opening = {
            **response,
            "status": "in_progress",
            "output": [],
            "usage": None,
            "incomplete_details": None,
        }
        yield event("response.created", response=opening)
        yield event("response.in_progress", response=opening)

    for delta in step.block_deltas():
        item = response["output"][delta.index]
        if delta.block.tool_call is None:
            yield from _stream_text(event, delta, item)
        else:
            yield from _stream_call(event, delta, item)

    if step.reply.finish == "length":
        yield event("response.incomplete", response=response)
    elif step.reply.finish:
        yield event("response.completed", response=response)


def _stream_call(
    event: Callable[..., StreamEvent], delta: BlockDelta, item: dict[str, Any]
) -> Iterator[StreamEvent]:
    takes_text = delta.block.takes_text
    kind = "response.custom_tool_call_input" if takes_text else "response.function_call_arguments"
    key = "input" if takes_text else "arguments"
    position = {"output_index": delta.index, "item_id": item["id"]}
    if delta.opens:
        opening = {**item, "status": "in_progress", key: ""}
        yield event("response.output_item.added", output_index=delta.index, item=opening)

    yield event(f"{kind}.delta", **position, delta=delta.text)

    if delta.closes:
        done = {**position, key: delta.block.text, "name": item["name"]}
        yield event(f"{kind}.done", **done)
        yield event("response.output_item.done", output_index=delta.index, item=item)


def _stream_text(
    event: Callable[..., StreamEvent], delta: BlockDelta, item: dict[str, Any]
) -> Iterator[StreamEvent]:
    """Yield the events of a text or of thoughts, which are the only part of their item."""
    (part,) = item["content"]
    kind = f"response.{part['type']}"
    position = {"output_index": delta.index, "item_id": item["id"], "content_index": 0}
    extra: dict[str, Any] = {"logprobs": []} if kind == "response.output_text" else {}
    if delta.opens:
        opening = {**item, "status": "in_progress", "content": []}
        yield event("response.output_item.added", output_index=delta.index, item=opening)
        yield event("response.content_part.added", **position, part={**part, "text": ""})

    yield event(f"{kind}.delta", **position, delta=delta.text, **extra)

    if delta.closes:
        yield event(f"{kind}.done", **position, text=delta.block.text, **extra)
        yield event("response.content_part.done", **position, part=part)
        yield event("response.output_item.done", output_index=delta.index, item=item)


RESPONSES = Dialect(
    path="/v1/responses",
    parse=_parse,
    render=lambda replies: _render(replies[0]),
    stream=_stream,
    render_error=openai_error,
)
