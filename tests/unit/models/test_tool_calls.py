"""Tool calls are read in the model's own format, and a broken one is told of instead of guessed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.models.tool_calls import (
    ToolFormat,
    ToolSchema,
    in_words,
    parse_reply,
    tool_format_of,
)
from rollout.records.trajectory import Message, ToolUse
from tests.support.templates import LLAMA3, QWEN3, QWEN25

ADD = ToolSchema(name="add", description="Adds.", parameters={"type": "object", "properties": {}})


def calls(raw: str, form: str) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in parse_reply(raw, form, "").calls]  # type: ignore[arg-type]


def test_the_format_is_the_one_that_the_template_teaches() -> None:
    xml = QWEN25.replace("<args-json-object>", "<function=name>")
    assert [tool_format_of(t) for t in (QWEN25, QWEN3, LLAMA3, "{{ messages }}", xml)] == [
        *("hermes", "hermes", "llama3", "fenced", "fenced")
    ]


def test_parallel_calls_of_hermes_are_read_beside_words_and_thoughts() -> None:
    raw = (
        '<think>\n<tool_call>{"name": "no"}</tool_call>\n</think>\n\nI add.\n'
        '<tool_call>\n{"name":"add","arguments":{"a":1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 2}"}\n</tool_call>'
    )
    parsed = parse_reply(raw, "hermes", "7.")
    assert parsed.reasoning == '<tool_call>{"name": "no"}</tool_call>'  # a thought calls nothing
    assert parsed.text == "I add."
    assert parsed.calls == (
        ToolUse(id="7.0", name="add", arguments='{"a": 1}'),
        ToolUse(id="7.1", name="add", arguments='{"a": 2}'),
    )
    assert not parsed.problems


@pytest.mark.parametrize(
    "body",
    [
        "{broken",
        '{"arguments": {}}',
        '{"name": 3}',
        '{"name": "f", "arguments": [1]}',
        "[]",
        '{"name": "\\ud800"',
    ],
)
def test_a_malformed_call_keeps_its_place_and_has_a_problem(body: str) -> None:
    good = '<tool_call>{"name": "f"}</tool_call>'
    parsed = parse_reply(f"<tool_call>{body}</tool_call>{good}", "hermes", "c")
    assert [(call.id, call.name, call.arguments) for call in parsed.calls] == [
        ("c0", "", body),
        ("c1", "f", "{}"),
    ]
    assert list(parsed.problems) == ["c0"]
    assert "cannot be read" in parsed.problems["c0"]


def test_llama_calls_by_json_or_by_a_program_behind_its_tag() -> None:
    assert calls('{"name": "add", "parameters": {"a": 1}}', "llama3") == [("add", '{"a": 1}')]
    two = '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'
    assert calls(two, "llama3") == [("f", "{}"), ("g", "{}")]
    assert calls("<|python_tag|>print(1)", "llama3") == [("python", '{"code": "print(1)"}')]
    assert calls('{"name": "add", "parameters": {"a": ', "llama3") == [
        ("", '{"name": "add", "parameters": {"a":')
    ]
    assert calls('{"answer": 4}', "llama3") == []  # words that happen to be JSON
    assert parse_reply("The sum is 4.", "llama3", "").text == "The sum is 4."


def test_a_fenced_block_is_a_call_and_other_blocks_are_not() -> None:
    raw = '```python\nprint(1)\n```\n```tool\n{"name": "f", "arguments": {"x": "é"}}\n```\n'
    parsed = parse_reply(raw, "fenced", "")
    assert parsed.text == "```python\nprint(1)\n```"
    assert calls(raw, "fenced") == [("f", '{"x": "é"}')]


def test_a_chat_with_tools_in_words_has_one_user_between_replies(tmp_path: Path) -> None:
    use = ToolUse(id="0", name="add", arguments='{"a": 1}')
    chat = (
        Message(role="user", content="1+1?"),
        Message(role="assistant", content="", calls=(use,)),
        Message(role="tool", content="2", answers="0"),
        Message(role="tool", content="3", answers="1"),
        Message(role="assistant", content="It is 2.", raw="<think>x</think>It is 2."),
    )
    system, question, call, results, answer = in_words(chat, [ADD])
    assert (system.role, question.content) == ("system", "1+1?")
    assert json.dumps(ADD.parameters) in system.content and "```tool" in system.content
    assert call.content == '```tool\n{"name": "add", "arguments": {"a": 1}}\n```'
    assert (results.role, results.content) == (
        "user",
        "Result of the tool:\n2\n\nResult of the tool:\n3",
    )
    assert answer == Message(role="assistant", content="<think>x</think>It is 2.")
    plain = (Message(role="user", content="a"), Message(role="user", content="b"))
    assert in_words(plain, ()) == list(plain)  # without tools nothing changes


def hermes_call(**arguments: object) -> str:
    call = {"name": "write", "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(
    ("raw", "form", "found"),
    [
        # an end mark inside a string
        (hermes_call(text="a </tool_call> b"), "hermes", [{"text": "a </tool_call> b"}]),
        (f"so {hermes_call(a=1)} and {hermes_call(b=2)} then", "hermes", [{"a": 1}, {"b": 2}]),
        # several calls between one pair of marks
        (
            '<tool_call>{"name": "write", "arguments": {"a": 1}}\n'
            '{"name": "write", "arguments": {}}</tool_call>',
            "hermes",
            [{"a": 1}, {}],
        ),
        ('<tool_call>{"name": "write", "arguments": null}</tool_call>', "hermes", [{}]),
        # a thought that never ends
        (f"<think>\nI could try {hermes_call(a=1)} but first", "hermes", []),
        (f"<think>\nhm {hermes_call(a=1)}</think>{hermes_call(b=2)}", "hermes", [{"b": 2}]),
        ('{"city": "Rome", "name": "Anna"}', "llama3", []),
        ('{"name": "write", "parameters": {"a": 1}}', "llama3", [{"a": 1}]),
        ('```tool\n{"name": "write", "arguments": {"t": "```"}}\n```', "fenced", [{"t": "```"}]),
    ],
)
def test_calls_are_read_whatever_their_arguments_hold(
    raw: str, form: ToolFormat, found: list[dict[str, object]]
) -> None:
    reply = parse_reply(raw, form, "c")
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [
        ("write", arguments) for arguments in found
    ]
    assert not reply.problems


def test_the_text_of_a_reply_has_neither_calls_nor_an_unfinished_thought() -> None:
    reply = parse_reply(f"so {hermes_call(text='</tool_call>')} then", "hermes", "c")
    assert reply.text == "so  then"
    unfinished = parse_reply("<think>\nI could", "hermes", "c")
    assert (unfinished.text, unfinished.reasoning) == ("", "I could")


def test_tools_in_words_keep_their_script() -> None:
    properties = {"q": {"type": "string", "description": "質問"}}
    tool = ToolSchema(
        name="look", description="検索する", parameters={"type": "object", "properties": properties}
    )
    call = ToolUse(id="i", name="look", arguments='{"q": "東京"}')
    chat = [
        Message(role="user", content="?"),
        Message(role="assistant", content="", calls=(call,)),
    ]
    text = "".join(message.content for message in in_words(chat, [tool]))
    assert [word for word in ("検索する", "質問", "東京") if word not in text] == []
