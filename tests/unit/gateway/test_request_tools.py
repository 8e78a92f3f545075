"""Tools of coding agents: hosted tools, tools that take free text, choices of tools, and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import exchange, recording_team, scripted_team

PATCH = "*** Begin Patch\n*** End Patch"
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
LOOK = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
HI = [{"role": "user", "content": "hi"}]


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": "a", "messages": HI, **fields}


def responses(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"model": "a", "input": HI, **fields}


def messages(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"model": "a", "max_tokens": 900, "messages": HI, **fields}


def test_hosted_tools_are_left_out_and_counted(tmp_path: Path) -> None:
    team, prompts = recording_team(tmp_path, lambda prompt, n: "ok")
    function = {"type": "function", "function": LOOK}
    look = {"name": "look", "description": "Look.", "input_schema": LOOK["parameters"]}
    _, turns = exchange(
        team,
        [
            chat(tools=[function, {"type": "web_search"}]),
            responses(tools=[{"type": "function", **LOOK}, {"type": "web_search"}]),
            messages(tools=[look, {"type": "web_search_20250305", "name": "web_search"}]),
            responses(tools=[{"type": "code_interpreter"}, {"type": "x y"}]),
        ],
    )
    assert len(set(prompts[:3])) == 1 and '"name": "look"' in prompts[0]
    assert "web_search" not in prompts[0]
    assert [dict(turn.scores) for turn in turns] == [
        {"unheeded/tool.web_search": 1.0},
        {"unheeded/tool.web_search": 1.0},
        {"unheeded/tool.web_search_20250305": 1.0},
        {"unheeded/tool.code_interpreter": 1.0, "unheeded/tool.other": 1.0},
    ]


def test_a_tool_that_takes_free_text_is_a_function_of_one_text(tmp_path: Path) -> None:
    replies = [*[call_text("apply_patch", {"input": PATCH})] * 2, "done"]
    team, prompts = recording_team(tmp_path, lambda prompt, n: replies[n])
    tool = {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": GRAMMAR}
    (first,), _ = exchange(team, [responses(tools=[tool])])
    assert "text of this lark grammar:\\nstart: /.+/" in prompts[0]
    (item,) = first["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCH)

    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    (_, second), turns = exchange(
        team,
        [
            responses(tools=[tool]),
            lambda bodies: responses(
                tools=[tool],
                input=[
                    *HI,
                    *bodies[0]["output"],
                    {**result, "call_id": bodies[0]["output"][0]["call_id"]},
                ],
            ),
        ],
    )
    assert second["output"][0]["content"][0]["text"] == "done"
    assert [turn.chat for turn in turns] == ["a/0", "a/0"]
    assert "root" not in turns[1].scores
    assert turns[1].messages[-1].content == "ok"


def test_a_tool_that_takes_free_text_in_chat_completions(tmp_path: Path) -> None:
    """A call without the argument `input` is handed on as text, and its conversation continues."""
    replies = [call_text("apply_patch", {"patch": "x"}), "done"]
    team, _ = scripted_team(tmp_path, lambda prompt, n: replies[n])
    custom = {"name": "apply_patch", "format": {"type": "grammar", "grammar": GRAMMAR}}
    tools = [{"type": "custom", "custom": custom}]
    bodies, turns = exchange(
        team,
        [
            chat(tools=tools),
            lambda bodies: chat(
                tools=tools,
                messages=[
                    *HI,
                    bodies[0]["choices"][0]["message"],
                    {
                        "role": "tool",
                        "tool_call_id": bodies[0]["choices"][0]["message"]["tool_calls"][0]["id"],
                        "content": "no input",
                    },
                ],
            ),
        ],
    )
    (call,) = bodies[0]["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == (
        "custom",
        {"name": "apply_patch", "input": '{"patch": "x"}'},
    )
    assert [turn.chat for turn in turns] == ["a/0", "a/0"]
    assert "root" not in turns[1].scores


def test_tools_of_namespaces_come_in_the_request_or_in_an_item(tmp_path: Path) -> None:
    """Codex sends its tools as an item of the input; a call names its namespace."""
    script = "await tools.look()"
    replies = [
        call_text("functions.exec", {"input": script}) + call_text("clock.look", {}),
        "done",
    ]
    team, prompts = recording_team(tmp_path, lambda prompt, n: replies[n])
    tools = [
        {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]},
        {"type": "namespace", "name": "clock", "tools": [{"type": "function", **LOOK}]},
    ]
    added = {"type": "additional_tools", "role": "developer", "tools": tools[:1]}

    def second_call(bodies: list[Any]) -> tuple[str, dict[str, Any]]:
        results = [
            {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"}
            for item in bodies[0]["output"]
        ]
        return responses(tools=tools[1:], input=[added, *HI, *bodies[0]["output"], *results])

    (first, second), turns = exchange(
        team, [responses(tools=tools[1:], input=[added, *HI]), second_call]
    )
    assert all(f'"name": "{name}"' in prompts[0] for name in ("functions.exec", "clock.look"))
    calls = [
        (item["type"], item["namespace"], item["name"], item.get("input", item.get("arguments")))
        for item in first["output"]
    ]
    assert calls == [
        ("custom_tool_call", "functions", "exec", script),
        ("function_call", "clock", "look", "{}"),
    ]
    assert second["output"][0]["content"][0]["text"] == "done"
    assert [turn.chat for turn in turns] == ["a/0", "a/0"]
    assert "root" not in turns[1].scores


def test_a_stream_of_a_free_text_call_has_the_vendors_events(tmp_path: Path) -> None:
    team, _ = scripted_team(tmp_path, lambda prompt, n: call_text("apply_patch", {"input": PATCH}))
    tool = {"type": "custom", "name": "apply_patch"}
    (stream,), _ = exchange(team, [responses(tools=[tool], stream=True)])
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    kind = "response.custom_tool_call_input"
    assert kinds[2:6] == [
        "response.output_item.added",
        f"{kind}.delta",
        f"{kind}.done",
        "response.output_item.done",
    ]
    assert (events[3]["delta"], events[4]["input"]) == (PATCH, PATCH)
    assert events[5]["item"]["type"] == "custom_tool_call"


CHAT_TOOLS = [{"type": "function", "function": LOOK}]
FLAT_TOOLS = [{"type": "function", **LOOK}]
CLAUDE_TOOLS = [{"name": "look", "description": "Look.", "input_schema": LOOK["parameters"]}]
MISSED = {"unheeded/tool_choice": 1.0}


@pytest.mark.parametrize(
    ("call", "reply", "scores"),
    [
        (chat(tools=CHAT_TOOLS, tool_choice="required"), "no", MISSED),
        (chat(tools=CHAT_TOOLS, tool_choice="required"), call_text("look", {}), {}),
        (
            chat(tools=CHAT_TOOLS, tool_choice={"type": "function", "function": {"name": "look"}}),
            call_text("see", {}),
            MISSED,
        ),
        (
            responses(tools=FLAT_TOOLS, tool_choice={"type": "function", "name": "look"}),
            call_text("look", {}),
            {},
        ),
        (messages(tools=CLAUDE_TOOLS, tool_choice={"type": "any"}), "no", MISSED),
        (
            messages(tools=CLAUDE_TOOLS, tool_choice={"type": "tool", "name": "look"}),
            "no",
            MISSED,
        ),
        (chat(tools=CHAT_TOOLS, tool_choice="auto"), "no", {}),
        (
            chat(tools=CHAT_TOOLS, parallel_tool_calls=False),
            call_text("look", {}) * 2,
            {"unheeded/parallel_tool_calls": 1.0},
        ),
        (
            messages(
                tools=CLAUDE_TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
            ),
            call_text("look", {}) * 2,
            {"unheeded/parallel_tool_calls": 1.0},
        ),
    ],
)
def test_a_choice_of_tools_that_a_reply_does_not_keep_is_counted(
    call: Any, reply: str, scores: dict[str, float], tmp_path: Path
) -> None:
    team, _ = scripted_team(tmp_path, lambda prompt, n: reply)
    _, (turn,) = exchange(team, [call])
    assert {name: turn.scores[name] for name in turn.scores if "/" in name} == scores


@pytest.mark.parametrize(
    "call",
    [
        chat(tools=CHAT_TOOLS, tool_choice="none"),
        responses(tools=FLAT_TOOLS, tool_choice="none"),
        messages(tools=CLAUDE_TOOLS, tool_choice={"type": "none"}),
    ],
    ids=["completions", "responses", "messages"],
)
def test_with_the_choice_none_the_prompt_has_no_tools(call: Any, tmp_path: Path) -> None:
    team, prompts = recording_team(tmp_path, lambda prompt, n: "ok")
    _, (turn,) = exchange(team, [call])
    assert "look" not in prompts[0]
    assert not turn.scores


PICTURE = "data:image/png;base64,AA=="


def test_pictures_in_results_of_tools_become_a_note(tmp_path: Path) -> None:
    team, _ = scripted_team(tmp_path, lambda prompt, n: "ok")
    note = ": left out, because this model reads text only]"
    function = {"name": "look", "arguments": "{}"}
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    _, turns = exchange(
        team,
        [
            chat(
                messages=[
                    *HI,
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "1", "type": "function", "function": function}],
                    },
                    {
                        "role": "tool",
                        "tool_call_id": "1",
                        "content": [
                            {"type": "text", "text": "seen"},
                            {"type": "image_url", "image_url": {"url": PICTURE}},
                        ],
                    },
                ]
            ),
            responses(
                input=[
                    *HI,
                    {"type": "function_call", "call_id": "1", **function},
                    {
                        "type": "function_call_output",
                        "call_id": "1",
                        "output": [{"type": "input_image", "image_url": PICTURE}],
                    },
                ]
            ),
            messages(
                messages=[
                    *HI,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}],
                    },
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "1",
                                "content": [{"type": "image", "source": source}],
                            }
                        ],
                    },
                ]
            ),
        ],
    )
    assert [turn.messages[-1].content for turn in turns] == [
        f"seen\n[image_url{note}",
        f"[input_image{note}",
        f"[image{note}",
    ]
    unheeded = [[name for name in turn.scores if name.startswith("unheeded/")] for turn in turns]
    assert unheeded == [
        ["unheeded/result.image_url"],
        ["unheeded/result.input_image"],
        ["unheeded/result.image"],
    ]
