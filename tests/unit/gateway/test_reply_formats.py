"""JSON formats of replies, in all three APIs: described in the prompt, and checked in the reply."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rollout.gateway.formats import ReplyFormat
from tests.support.gateway import exchange, scripted_team

SCHEMA = {
    "type": "object",
    "properties": {"value": {"type": "integer"}},
    "required": ["value"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "3+4?"}]
JSON_SCHEMA = {"name": "Answer", "schema": SCHEMA, "strict": True}


def chat(response_format: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    body = {"model": "a", "messages": QUESTION, "response_format": response_format}
    return "/v1/chat/completions", body


def responses(text_format: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"model": "a", "input": "3+4?", "text": {"format": text_format}}


def messages(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"model": "a", "max_tokens": 99, "messages": QUESTION, **fields}


FLAT = {"type": "json_schema", "name": "Answer", "schema": SCHEMA}
CALLS = {
    "completions": chat({"type": "json_schema", "json_schema": JSON_SCHEMA}),
    "responses": responses(FLAT),
    "messages": messages(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}),
    "older messages": messages(output_format={"type": "json_schema", "schema": SCHEMA}),
}


def text_of(reply: dict[str, Any]) -> str:
    if "choices" in reply:
        return str(reply["choices"][0]["message"]["content"])
    if "output" in reply:
        return str(reply["output"][-1]["content"][0]["text"])
    return str(reply["content"][-1]["text"])


@pytest.mark.parametrize("call", CALLS)
def test_a_schema_is_in_the_prompt_and_replies_are_scored_in_each_api(
    call: str, tmp_path: Path
) -> None:
    replies = [
        '{"value": 7}',
        "It is 7.",
        '{"value": "7"}',
        '<think>\nhm\n</think>\n\n{"value": 7}',
    ]
    team, _ = scripted_team(tmp_path, lambda prompt, n: replies[n])
    bodies, turns = exchange(team, [CALLS[call]] * 4)
    # Every reply is handed on as the model wrote it.
    assert [text_of(body) for body in bodies] == ['{"value": 7}', *replies[1:3], '{"value": 7}']
    assert [turn.scores["off_schema"] for turn in turns] == [0.0, 1.0, 1.0, 0.0]
    for turn in turns:
        prompt = turn.messages[-1].content
        assert prompt.startswith("3+4?\n\nReply with one JSON value that follows this JSON schema")
        assert prompt.endswith(
            '{"type": "object", "properties": {"value": {"type": "integer"}}, '
            '"required": ["value"], "additionalProperties": false}'
        )


@pytest.mark.parametrize(
    "call",
    [chat({"type": "json_object"}), responses({"type": "json_object"})],
    ids=["chat", "resp"],
)
def test_a_json_object_is_asked_for_in_words(call: Any, tmp_path: Path) -> None:
    replies = ['{"x": [1]}', "[1]", '```json\n{"x": 1}\n```', '{"x": NaN}']
    team, _ = scripted_team(tmp_path, lambda prompt, n: replies[n])
    _, turns = exchange(team, [call] * 4)
    assert [turn.scores["off_schema"] for turn in turns] == [0.0, 1.0, 1.0, 1.0]
    assert turns[0].messages[-1].content == (
        "3+4?\n\nReply with one JSON object and with nothing else."
    )


def test_a_text_format_changes_nothing(tmp_path: Path) -> None:
    team, _ = scripted_team(tmp_path, lambda prompt, n: "seven")
    calls = [
        chat({"type": "text"}),
        responses({"type": "text"}),
        messages(output_config={"effort": "low"}),
    ]
    _, turns = exchange(team, calls)
    assert [turn.messages[-1].content for turn in turns] == ["3+4?"] * 3
    assert [dict(turn.scores) for turn in turns] == [{}, {}, {"unheeded/output_config.effort": 1.0}]


def test_a_format_is_added_once_in_a_conversation(tmp_path: Path) -> None:
    """The second call continues the tokens of the first, and the third has another format."""
    replies = ['{"value": 7}', '{"value": 8}', "{}"]
    team, _ = scripted_team(tmp_path, lambda prompt, n: replies[n])
    path, first = chat({"type": "json_schema", "json_schema": JSON_SCHEMA})
    second = {
        **first,
        "messages": [
            *QUESTION,
            {"role": "assistant", "content": replies[0]},
            {"role": "user", "content": "and 4+4?"},
        ],
    }
    third = {
        **second,
        "messages": [
            *second["messages"],
            {"role": "assistant", "content": replies[1]},
            {"role": "user", "content": "thanks"},
        ],
        "response_format": {"type": "json_object"},
    }
    _, turns = exchange(team, [(path, first), (path, second), (path, third)])
    assert [turn.chat for turn in turns] == ["a/0"] * 3
    assert not any("root" in turn.scores for turn in turns)
    assert [turn.messages[-1].content for turn in turns[1:]] == [
        "and 4+4?",
        "thanks\n\nReply with one JSON object and with nothing else.",
    ]
    for earlier, later in pairwise(turns):
        tokens = (*earlier.prompt_ids, *earlier.completion_ids)
        assert later.prompt_ids[: len(tokens)] == tokens


def test_schemas_with_references_and_hostile_patterns_are_checked_without_a_network() -> None:
    tree = {
        "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        "$ref": "#/$defs/node",
    }
    assert ReplyFormat(schema=tree).accepts("[[], [[]]]")
    assert not ReplyFormat(schema=tree).accepts("[[], [1]]")
    assert not ReplyFormat(schema=tree).accepts("[" * 5000)
    assert not ReplyFormat(schema={"$ref": "http://127.0.0.1:9/schema.json"}).accepts("1")
    assert not ReplyFormat(schema={"pattern": "("}).accepts('"x"')
