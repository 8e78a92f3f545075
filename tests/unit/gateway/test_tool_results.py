"""Results of tools stand in the order of their calls, whatever the order and the dialect of a client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout.gateway.dialects import order_tool_results
from rollout.gateway.errors import GatewayError
from rollout.records.trajectory import Message, ToolUse
from tests.support.gateway import open_session, scripted_team

CALLS = "".join(
    f'<tool_call>{{"name": "look", "arguments": {{"q": "{key}"}}}}</tool_call>' for key in "xy"
)
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}}


def call(*ids: str) -> Message:
    calls = tuple(ToolUse(id=call_id, name="look", arguments="{}") for call_id in ids)
    return Message(role="assistant", content="", calls=calls)


def result(call_id: str, content: str = "") -> Message:
    return Message(role="tool", content=content or f"result of {call_id}", answers=call_id)


USER = Message(role="user", content="?")


@pytest.mark.parametrize(
    ("messages", "ordered"),
    [
        ([USER, call("x", "y"), result("y"), result("x")], "? - x y"),
        ([USER, call("x", "y"), result("x"), result("y")], "? - x y"),
        ([USER, call("x", "y"), result("y")], "? - y"),  # the program gives one result only
        ([USER, call("x"), result("x"), call("y", "z"), result("z"), result("y")], "? - x - y z"),
        ([USER, call("x", "y"), result("y"), USER, result("x")], "? - y ? x"),
        # ids that a client uses again mean the newest calls
        ([USER, call("a", "b"), result("b"), result("a"), call("b", "a"), result("a"), result("b")], "? - a b - b a"),
    ],
)  # fmt: skip
def test_results_stand_in_the_order_of_their_calls(messages: list[Message], ordered: str) -> None:
    words = {"user": lambda _: "?", "assistant": lambda _: "-", "tool": lambda m: m.answers}
    assert " ".join(words[m.role](m) for m in order_tool_results(messages)) == ordered


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([USER, call("x"), result("z")], "answers call 'z', .* calls so far: 'x'"),
        ([USER, result("z")], "answers call 'z', .* calls so far: none"),
        ([USER, call("x"), result("")], "has no id of its call"),
    ],
)
def test_a_result_of_no_call_is_refused(messages: list[Message], problem: str) -> None:
    with pytest.raises(GatewayError, match=problem) as error:
        order_tool_results(messages)
    assert error.value.status == 400


def chat_body(first: Any, answers: list[tuple[str, str]]) -> dict[str, Any]:
    function = {"name": "look", "description": "d", "parameters": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": "?"}]
    if first:
        messages.append(first["choices"][0]["message"])
    for call_id, content in answers:
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    tools = [{"type": "function", "function": function}]
    return {"model": "a", "messages": messages, "tools": tools}


def messages_body(first: Any, answers: list[tuple[str, str]]) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": "?"}]
    if first:
        results = [
            {"type": "tool_result", "tool_use_id": call_id, "content": content}
            for call_id, content in answers
        ]
        messages.append({"role": "assistant", "content": first["content"]})
        messages.append({"role": "user", "content": results})
    tools = [{"name": "look", "description": "d", "input_schema": PARAMETERS}]
    return {"model": "a", "messages": messages, "tools": tools, "max_tokens": 1000}


def responses_body(first: Any, answers: list[tuple[str, str]]) -> dict[str, Any]:
    items: list[Any] = [{"role": "user", "content": "?"}, *(first["output"] if first else [])]
    for call_id, content in answers:
        items.append({"type": "function_call_output", "call_id": call_id, "output": content})
    tools = [{"type": "function", "name": "look", "description": "d", "parameters": PARAMETERS}]
    return {"model": "a", "input": items, "tools": tools}


def stored_responses_body(first: Any, answers: list[tuple[str, str]]) -> dict[str, Any]:
    body = responses_body(None, answers)
    if first:
        body["input"] = body["input"][1:]
        body["previous_response_id"] = first["id"]
    return body


def call_ids(dialect: str, first: Any) -> list[str]:
    if dialect == "chat/completions":
        return [entry["id"] for entry in first["choices"][0]["message"]["tool_calls"]]
    if dialect == "messages":
        return [block["id"] for block in first["content"] if block["type"] == "tool_use"]
    return [item["call_id"] for item in first["output"] if item["type"] == "function_call"]


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("chat/completions", chat_body),
        ("messages", messages_body),
        ("responses", responses_body),
        ("responses", stored_responses_body),
    ],
)
def test_every_dialect_shows_the_model_results_in_order(
    dialect: str, body: Any, tmp_path: Path
) -> None:
    prompts: list[str] = []

    def reply(prompt: str, number: int) -> str:
        prompts.append(prompt)
        return "ok" if number else CALLS

    team, _ = scripted_team(tmp_path, reply)

    async def play() -> None:
        async with open_session(team) as session, httpx.AsyncClient(trust_env=False) as http:
            url, key, *_ = session
            headers = {"authorization": f"Bearer {key}"}

            async def post(first: Any, answers: list[tuple[str, str]]) -> httpx.Response:
                return await http.post(
                    f"{url}/v1/{dialect}", json=body(first, answers), headers=headers
                )

            first = (await post(None, [])).json()
            x, y = call_ids(dialect, first)
            second = await post(first, [(y, "RESULT-OF-Y"), (x, "RESULT-OF-X")])
            assert second.status_code == 200
            assert [word for word in prompts[-1].split() if word.startswith("RESULT")] == [
                "RESULT-OF-X",
                "RESULT-OF-Y",
            ]

            unknown = await post(first, [("call_9_9", "RESULT")])
            assert unknown.status_code == 400
            assert "call_9_9" in unknown.text

    asyncio.run(play())
