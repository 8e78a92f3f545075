"""Calls that require a form of the reply, on an untrained model: kept by the grammar, or counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.gateway.completions import COMPLETIONS
from tests.support.gateway import exchange, sampling_team

SCHEMA = {
    "type": "object",
    "properties": {"value": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["value"],
    "additionalProperties": False,
}
SIDE = {
    "type": "object",
    "properties": {"side": {"enum": ["left", "right"]}},
    "required": ["side"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "3+4?"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "Answer", "schema": SCHEMA}}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": "a", "messages": QUESTION, **fields}


FLAT = {"type": "json_schema", "name": "Answer", "schema": SCHEMA}
FORMATTED_CALLS = [
    chat(response_format=FORMAT),
    ("/v1/responses", {"model": "a", "input": "3+4?", "text": {"format": FLAT}}),
    (
        "/v1/messages",
        {
            "model": "a",
            "max_tokens": 200,
            "messages": QUESTION,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SIDE}}
    for name in ("look", "move")
]
NAMED = {"type": "function", "function": {"name": "move"}}
REQUIRED_CALLS = [
    chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False),
    chat(tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=False),
]


@pytest.mark.parametrize("constrain", [True, False])
def test_a_format_is_kept_with_the_option_and_counted_without(
    constrain: bool, tmp_path: Path
) -> None:
    team, _, _ = sampling_team(tmp_path, max_tokens=200, constrain=constrain)
    _, turns = exchange(team, FORMATTED_CALLS)
    assert [turn.scores["off_schema"] for turn in turns] == [0.0 if constrain else 1.0] * 3
    assert [bool(turn.grammar) for turn in turns] == [constrain] * 3
    if constrain:
        values = [json.loads(turn.text)["value"] for turn in turns]
        assert all(0 <= value <= 99 for value in values)


@pytest.mark.parametrize("constrain", [True, False])
def test_a_required_call_is_made_with_the_option_and_counted_without(
    constrain: bool, tmp_path: Path
) -> None:
    team, _, _ = sampling_team(tmp_path, max_tokens=200, constrain=constrain)
    bodies, turns = exchange(team, REQUIRED_CALLS)
    missing = 0 if constrain else 1
    assert [turn.scores.get("unheeded/tool_choice", 0) for turn in turns] == [missing] * 2
    if not constrain:
        return
    calls = [body["choices"][0]["message"]["tool_calls"] for body in bodies]
    assert [len(tool_calls) for tool_calls in calls] == [1, 1]
    assert calls[0][0]["function"]["name"] in ("look", "move")
    assert calls[1][0]["function"]["name"] == "move"
    for (tool_call,) in calls:
        assert json.loads(tool_call["function"]["arguments"])["side"] in ("left", "right")


def test_a_reply_that_is_cut_off_is_counted(tmp_path: Path) -> None:
    team, _, _ = sampling_team(tmp_path, max_tokens=200, constrain=True)
    _, turns = exchange(team, [chat(response_format=FORMAT, max_tokens=4)])
    assert turns[0].finish_reason == "length"
    assert turns[0].scores["off_schema"] == 1.0


def test_a_schema_without_a_grammar_is_named_once_and_sampled_freely(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    team, _, _ = sampling_team(tmp_path, max_tokens=8, constrain=True)
    schema = {"type": "string", "pattern": "^(?=a)bcd"}
    call = chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    _, turns = exchange(team, [call, call])
    assert [turn.grammar for turn in turns] == ["", ""]
    assert capsys.readouterr().err.count("a reply is sampled without its grammar") == 1


@pytest.mark.parametrize(
    ("fields", "schema", "tools"),
    [
        ({}, None, None),
        ({"tools": TOOLS}, None, None),
        ({"tools": TOOLS, "tool_choice": "none"}, None, None),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}, []),
        ({"response_format": FORMAT, "tools": TOOLS}, SCHEMA, ["look", "move"]),
        (
            {"response_format": FORMAT, "tools": TOOLS, "tool_choice": "required"},
            None,
            ["look", "move"],
        ),
        ({"tools": TOOLS, "tool_choice": NAMED}, None, ["move"]),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "jump"}},
            },
            None,
            None,
        ),
    ],
)
def test_the_constraint_of_a_call(
    fields: dict[str, Any], schema: dict[str, Any] | None, tools: list[str] | None
) -> None:
    _, body = chat(**fields)
    constraint = COMPLETIONS.parse(json.dumps(body).encode()).constraint
    if tools is None:
        assert constraint is None
        return
    assert constraint is not None
    assert constraint.schema == ("" if schema is None else json.dumps(schema))
    assert [name for name, _ in constraint.tools] == tools
