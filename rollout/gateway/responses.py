"""OpenAI's Responses: requests, replies and streams."""

from collections.abc import Iterator
from itertools import count
from typing import Any, Literal

from pydantic import BaseModel, Field

from rollout.gateway import dialects
from rollout.gateway.dialects import ChatReply, ChatRequest, Content, Event, GatewayError
from rollout.records.trajectory import Message, ToolUse

_ROLES = {"developer": "system"}
_FIXED: dict[str, Any] = {  # of every response
    **dict.fromkeys(("error", "instructions", "temperature", "top_p")),
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


class _Item(BaseModel):
    """An item of the input; which fields it has depends on its type."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: Content = None
    summary: Content = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: Content = None


class _Tool(dialects.ToolSpec):
    type: Literal["function"]  # tools of OpenAI's own servers are not here


class _Text(BaseModel):
    format: dialects.TextFormat | None = None


class _ResponsesBody(dialects.Body):
    input: str | list[_Item]
    instructions: str | None = None
    tools: list[_Tool] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    previous_response_id: str | None = None
    text: _Text | None = None
    background: Literal[False] | None = None
    conversation: None = None  # which servers of OpenAI's would keep
    prompt: None = None  # likewise
    top_logprobs: Literal[0] | None = None
    store: bool | None = None


def _messages(items: list[_Item]) -> list[Message]:
    """The items as messages: what an assistant thought, said and called in a row is one."""
    messages: list[Message] = []
    thought, words, calls = (
        "",
        list[str](),
        list[ToolUse](),
    )  # of one assistant; of words one text, which may be empty
    for item in [*items, _Item(type="end")]:
        if item.type == "reasoning":
            parts = item.content or item.summary
            thought += "\n".join(part.text for part in parts) if isinstance(parts, list) else ""
        elif item.type == "function_call":
            calls.append(
                ToolUse(
                    id=item.call_id, name=item.name, arguments=dialects.arguments_of(item.arguments)
                )
            )
        elif item.type == "message" and item.role == "assistant" and not calls and not words:
            words = [dialects.text_of(item.content)]
        else:
            if words or calls:
                said = "".join(words)
                messages.append(
                    Message(role="assistant", content=said, reasoning=thought, calls=tuple(calls))
                )
            thought, words, calls = "", [], []
            if item.type == "function_call_output":
                messages.append(
                    Message(
                        role="tool", content=dialects.text_of(item.output), answers=item.call_id
                    )
                )
            elif item.type == "message" and item.role == "assistant":
                words = [dialects.text_of(item.content)]
            elif item.type == "message":
                messages.append(
                    Message(
                        role=_ROLES.get(item.role, item.role),
                        content=dialects.text_of(item.content),
                    )
                )
            elif item.type != "end":
                raise GatewayError(
                    400, f"an input item of type '{item.type[:40]}', which is not known here"
                )
    return messages


def _parse(body: bytes) -> ChatRequest:
    asked: _ResponsesBody = dialects.read(_ResponsesBody, body)
    items = [_Item(content=asked.input)] if isinstance(asked.input, str) else asked.input
    return asked.request(
        _messages(items),
        asked.tools,
        system=asked.instructions,
        max_tokens=asked.max_output_tokens,
        kept=asked.store is not False,
        previous=(asked.previous_response_id or "").removeprefix("resp_"),
    )


def _item(reply: ChatReply, index: int) -> dict[str, Any]:
    """A block of a reply as an item of the output."""
    block = reply.blocks[index]
    if block.call is not None:
        named = {
            "call_id": block.call.id,
            "name": block.call.name,
            "arguments": block.text,
            "status": "completed",
        }
        return {"id": f"fc_{reply.id}_{index}", "type": "function_call", **named}
    if block.kind == "reasoning":
        thought = [{"type": "reasoning_text", "text": block.text}]
        return {"id": f"rs_{reply.id}", "type": "reasoning", "summary": [], "content": thought}
    part = {"type": "output_text", "text": block.text, "annotations": []}
    head = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "status": "completed"}
    return {**head, "content": [part]}


def _render(reply: ChatReply) -> dict[str, Any]:
    cut = reply.finish == "length"
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        **_FIXED,
        "created_at": reply.created,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": reply.model,
        "output": [_item(reply, index) for index in range(len(reply.blocks))],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def _stream(growth: dialects.Growth, asked: ChatRequest) -> Iterator[Event]:
    numbers, reply = count(growth.sent), growth.now

    def event(kind: str, **fields: Any) -> Event:
        return kind, {"type": kind, "sequence_number": next(numbers), **fields}

    whole = _render(reply)
    if growth.before is None:
        begun = {
            **whole,
            "status": "in_progress",
            "output": [],
            "usage": None,
            "incomplete_details": None,
        }
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
    for news in growth.news:
        item, text = whole["output"][news.index], news.block.text
        place: dict[str, Any] = {"output_index": news.index, "item_id": item["id"]}
        empty: dict[str, Any]
        if news.block.call is not None:
            empty, kind = {"arguments": ""}, "response.function_call_arguments"
            ended = {"arguments": text, "name": item["name"]}
        else:
            part = item["content"][0]
            empty, kind, ended = {"content": []}, f"response.{part['type']}", {"text": text}
            place |= {"content_index": 0}
        logs: dict[str, Any] = {"logprobs": []} if kind == "response.output_text" else {}
        if news.begins:
            added = {**item, "status": "in_progress", **empty}
            yield event("response.output_item.added", output_index=news.index, item=added)
            if "content_index" in place:
                yield event("response.content_part.added", **place, part={**part, "text": ""})
        yield event(f"{kind}.delta", **place, delta=news.text, **logs)
        if not news.ends:
            continue
        yield event(f"{kind}.done", **place, **ended, **logs)
        if "content_index" in place:
            yield event("response.content_part.done", **place, part=part)
        yield event("response.output_item.done", output_index=news.index, item=item)
    if reply.finish:
        yield event(
            "response.incomplete" if reply.finish == "length" else "response.completed",
            response=whole,
        )


RESPONSES = dialects.Dialect(
    path="/v1/responses", parse=_parse, render=_render, stream=_stream, error=dialects.openai_error
)
