"""Tool calls are parsed in the model's format; one that cannot be read is reported, not guessed."""

import json

import pytest

from rollout.models.tool_calls import (
    ToolFormat,
    ToolSchema,
    detect_tool_format,
    parse_reply,
    split_thoughts,
    write_tools_as_text,
)
from rollout.records.trajectory import Message, ToolUse
from tests.support.templates import LLAMA3, QWEN3, QWEN25

ADD = ToolSchema(name="add", description="Adds.", parameters={"type": "object", "properties": {}})


def parse_calls(raw: str, form: ToolFormat) -> list[tuple[str, str]]:
    """Return the name and the arguments of each call of a reply."""
    return [(call.name, call.arguments) for call in parse_reply(raw, form, "").calls]


def hermes_call(**arguments: object) -> str:
    call = {"name": "write", "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (QWEN25, "hermes"),
        (QWEN3, "hermes"),
        (LLAMA3, "llama3"),
        ("{{ messages }}", "fenced"),
        # As in Qwen3-Coder's template, the arguments are XML.
        (QWEN25.replace("<args-json-object>", "<function=name>"), "fenced"),
    ],
    ids=["qwen2.5", "qwen3", "llama3", "no tools", "xml"],
)
def test_the_format_is_detected_in_the_template(template: str, form: ToolFormat) -> None:
    assert detect_tool_format(template) == form


def test_parallel_hermes_calls_are_separated_from_text_and_thoughts() -> None:
    raw = (
        '<think>\n<tool_call>{"name": "no"}</tool_call>\n</think>\n\nI add.\n'
        '<tool_call>\n{"name":"add","arguments":{"a":1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 2}"}\n</tool_call>'
    )
    parsed = parse_reply(raw, "hermes", "7.")
    assert parsed.reasoning == '<tool_call>{"name": "no"}</tool_call>'  # not a call
    assert parsed.text == "I add."
    assert parsed.calls == (
        ToolUse(id="7.0", name="add", arguments='{"a": 1}'),
        ToolUse(id="7.1", name="add", arguments='{"a": 2}'),
    )
    assert not parsed.problems


@pytest.mark.parametrize(
    "call_text",
    [
        "{broken",
        '{"arguments": {}}',
        '{"name": 3}',
        '{"name": "f", "arguments": [1]}',
        "[]",
        '{"name": "\\ud800"',
    ],
)
def test_an_unreadable_call_keeps_its_position_and_has_a_problem(call_text: str) -> None:
    readable_call = '<tool_call>{"name": "f"}</tool_call>'
    parsed = parse_reply(f"<tool_call>{call_text}</tool_call>{readable_call}", "hermes", "c")
    assert parsed.calls == (
        ToolUse(id="c0", name="", arguments=call_text),
        ToolUse(id="c1", name="f", arguments="{}"),
    )
    assert list(parsed.problems) == ["c0"]
    assert "cannot be read" in parsed.problems["c0"]


@pytest.mark.parametrize(
    ("raw", "calls"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', [("add", '{"a": 1}')]),
        (
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            [("f", "{}"), ("g", "{}")],
        ),
        ("<|python_tag|>print(1)", [("python", '{"code": "print(1)"}')]),
        # A call that was cut off is an unreadable call.
        (
            '{"name": "add", "parameters": {"a": ',
            [("", '{"name": "add", "parameters": {"a":')],
        ),
        # An answer that is JSON is not a call.
        ('{"answer": 4}', []),
        ("The sum is 4.", []),
    ],
)
def test_llama_calls_are_json_or_a_program_behind_the_tag(
    raw: str, calls: list[tuple[str, str]]
) -> None:
    assert parse_calls(raw, "llama3") == calls
    if not calls:
        assert parse_reply(raw, "llama3", "").text == raw


def test_only_fenced_blocks_that_are_labelled_tool_are_calls() -> None:
    raw = '```python\nprint(1)\n```\n```tool\n{"name": "f", "arguments": {"x": "é"}}\n```\n'
    assert parse_reply(raw, "fenced", "").text == "```python\nprint(1)\n```"
    assert parse_calls(raw, "fenced") == [("f", '{"x": "é"}')]


@pytest.mark.parametrize(
    ("raw", "form", "arguments_of_calls"),
    [
        # An end mark inside a JSON string does not end the call.
        (hermes_call(text="a </tool_call> b"), "hermes", [{"text": "a </tool_call> b"}]),
        (f"so {hermes_call(a=1)} and {hermes_call(b=2)} then", "hermes", [{"a": 1}, {"b": 2}]),
        # Several calls between one pair of marks.
        (
            '<tool_call>{"name": "write", "arguments": {"a": 1}}\n'
            '{"name": "write", "arguments": {}}</tool_call>',
            "hermes",
            [{"a": 1}, {}],
        ),
        ('<tool_call>{"name": "write", "arguments": null}</tool_call>', "hermes", [{}]),
        # Thoughts that never end make no calls.
        (f"<think>\nI could try {hermes_call(a=1)} but first", "hermes", []),
        (f"<think>\nhm {hermes_call(a=1)}</think>{hermes_call(b=2)}", "hermes", [{"b": 2}]),
        # The end mark of thoughts inside a JSON string does not end the thoughts.
        (hermes_call(text="a </think> b"), "hermes", [{"text": "a </think> b"}]),
        (
            f"<think>hm</think>{hermes_call(a=1)}{hermes_call(text='</think>')}",
            "hermes",
            [{"a": 1}, {"text": "</think>"}],
        ),
        (f"I could {hermes_call(a=1)} but</think>{hermes_call(b=2)}", "hermes", [{"b": 2}]),
        (
            '{"name": "write", "parameters": {"a": "</think>"}}',
            "llama3",
            [{"a": "</think>"}],
        ),
        (
            '<tool_call>[{"name": "write", "arguments": {"a": 1}}, {"name": "write"}]</tool_call>',
            "hermes",
            [{"a": 1}, {}],
        ),
        ('<tool_call>{"name": "write", "arguments": ""}</tool_call>', "hermes", [{}]),
        (
            '<tool_call>{"type": "function", "function": {"name": "write", "arguments": "{}"}}',
            "hermes",
            [{}],
        ),
        ('{"city": "Rome", "name": "Anna"}', "llama3", []),
        ('{"name": "Anna"}', "llama3", []),
        ('{"name": 5, "id": 7}', "llama3", []),
        ('- a\r\n  ```tool\r\n  {"name": "write"}\r\n  ```\r\n', "fenced", [{}]),
        ('{"name": "write", "parameters": {"a": 1}}', "llama3", [{"a": 1}]),
        ('```tool\n{"name": "write", "arguments": {"t": "```"}}\n```', "fenced", [{"t": "```"}]),
    ],
)
def test_calls_are_read_whatever_their_arguments_contain(
    raw: str, form: ToolFormat, arguments_of_calls: list[dict[str, object]]
) -> None:
    reply = parse_reply(raw, form, "c")
    calls = [(call.name, json.loads(call.arguments)) for call in reply.calls]
    assert calls == [("write", arguments) for arguments in arguments_of_calls]
    assert not reply.problems


def test_the_text_of_a_reply_has_no_calls_and_no_unfinished_thoughts() -> None:
    reply = parse_reply(f"so {hermes_call(text='</tool_call>')} then", "hermes", "c")
    assert reply.text == "so  then"
    unfinished = parse_reply("<think>\nI could", "hermes", "c")
    assert unfinished.text == ""
    assert unfinished.reasoning == "I could"


def test_thoughts_of_an_incomplete_reply_end_outside_of_calls() -> None:
    incomplete = '<tool_call>{"name": "write", "arguments": {"text": "a </think> b'
    assert split_thoughts(f"<think>hm</think>{incomplete}") == ("hm", incomplete)


def test_tools_as_text_have_one_message_of_the_user_between_replies() -> None:
    call = ToolUse(id="0", name="add", arguments='{"a": 1}')
    chat = (
        Message(role="user", content="1+1?"),
        Message(role="assistant", content="", calls=(call,)),
        Message(role="tool", content="2", answers="0"),
        Message(role="tool", content="3", answers="1"),
        Message(role="assistant", content="It is 2.", raw="<think>x</think>It is 2."),
    )
    system, *dialogue = write_tools_as_text(chat, [ADD])
    assert system.role == "system"
    assert json.dumps(ADD.parameters) in system.content
    assert "```tool" in system.content
    assert dialogue == [
        Message(role="user", content="1+1?"),
        Message(role="assistant", content='```tool\n{"name": "add", "arguments": {"a": 1}}\n```'),
        Message(role="user", content="Result of the tool:\n2\n\nResult of the tool:\n3"),
        Message(role="assistant", content="<think>x</think>It is 2."),
    ]


def test_a_chat_without_tools_is_not_changed() -> None:
    chat = [Message(role="user", content="a"), Message(role="user", content="b")]
    assert write_tools_as_text(chat, ()) == chat


def test_tools_as_text_are_not_escaped_to_ascii() -> None:
    properties = {"q": {"type": "string", "description": "質問"}}
    tool = ToolSchema(
        name="look", description="検索する", parameters={"type": "object", "properties": properties}
    )
    call = ToolUse(id="i", name="look", arguments='{"q": "東京"}')
    chat = [
        Message(role="user", content="?"),
        Message(role="assistant", content="", calls=(call,)),
    ]
    text = "".join(message.content for message in write_tools_as_text(chat, [tool]))
    assert "検索する" in text
    assert "質問" in text
    assert "東京" in text
