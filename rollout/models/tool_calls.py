"""Tool calls in the text of replies: formats that models write, and the parser of each format."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollout.records.trajectory import Message, ToolUse

ToolFormat = Literal["hermes", "llama3", "fenced"]
PYTHON_TAG = "<|python_tag|>"
_HERMES_START = re.compile(r"<tool_call>")
_HERMES_END = re.compile(r"</tool_call>|\Z")
_FENCED_START = re.compile(r"^[ \t]*```tool[ \t]*\r?\n", re.MULTILINE)
_FENCED_END = re.compile(r"^[ \t]*```[ \t\r]*$|\Z", re.MULTILINE)
# Marks behind which a JSON object may be a call, in any of the formats.
_OBJECT_START = re.compile(
    r"(?:<tool_call>|^[ \t]*```tool|<\|python_tag\|>|\A|</think>)\s*(?=\{)", re.MULTILINE
)
_THOUGHT_END = "</think>"
_SPACES = re.compile(r"\s*")
_ARGUMENT_KEYS = {"arguments", "parameters"}
_CALL_KEYS = {"id", "type", "name", *_ARGUMENT_KEYS}
_UNREADABLE = 'This tool call cannot be read. Write it as JSON: {"name": "...", "arguments": {...}}'
_INSTRUCTIONS = """To call a tool, write
```tool
{"name": "...", "arguments": {...}}
```
and stop; its result comes with the next message. Several blocks are several calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """Description of a tool for a model.

    Attributes:
        name: name by which the model calls the tool.
        description: purpose of the tool.
        parameters: JSON schema of an object with the arguments.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def function(self) -> dict[str, Any]:
        """Schema in OpenAI's form, which chat templates take."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """Parts of a model's reply.

    Attributes:
        text: the reply without its thoughts and calls.
        reasoning: the thoughts.
        calls: tool calls in their order. A call that cannot be read has the name "", and its text
            as arguments.
        problems: error message for the model, by the id of a call that cannot be read.
    """

    text: str
    reasoning: str
    calls: tuple[ToolUse, ...]
    problems: Mapping[str, str]


def _split_hermes(text: str) -> tuple[str, list[str]]:
    """Split the calls between `<tool_call>` marks from the rest of a text."""
    return _split_marked(text, _HERMES_START, _HERMES_END)


def _split_fenced(text: str) -> tuple[str, list[str]]:
    """Separate the calls, which are in code blocks labelled `tool`, from the rest of a text."""
    return _split_marked(text, _FENCED_START, _FENCED_END)


def _split_marked(text: str, start: re.Pattern[str], end: re.Pattern[str]) -> tuple[str, list[str]]:
    """Split calls between marks from the rest of a text.

    An end mark inside a JSON string belongs to the string. Several JSON objects between a pair of
    marks, or a list of them, are several calls.
    """
    text_parts: list[str] = []
    calls: list[str] = []
    position = 0
    while True:
        opening = start.search(text, position)
        if opening is None:
            text_parts.append(text[position:])
            return "".join(text_parts), calls
        text_parts.append(text[position : opening.start()])
        objects, after_objects = _leading_objects(text, opening.end())
        closing = end.search(text, after_objects)
        assert closing is not None, "the end of the text closes a call"
        if objects and not text[after_objects : closing.start()].strip():
            calls += objects
        else:
            closing = end.search(text, opening.end())
            assert closing is not None, "the end of the text closes a call"
            calls.append(text[opening.end() : closing.start()].strip())
        position = closing.end()


def _leading_objects(text: str, position: int) -> tuple[list[str], int]:
    """Return the JSON objects that follow one another from `position` on, and the position after the last.

    A list of objects counts as its objects.
    """
    decoder = json.JSONDecoder()
    objects: list[str] = []
    while True:
        spaces = _SPACES.match(text, position)
        assert spaces is not None, "the pattern also matches no space"
        start = spaces.end()
        if not text.startswith(("{", "["), start):
            return objects, position
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            return objects, position
        if isinstance(value, dict):
            objects.append(text[start:end])
        elif value and all(isinstance(item, dict) for item in value):
            objects += [json.dumps(item, ensure_ascii=False) for item in value]
        else:
            return objects, position
        position = end


def _split_llama3(text: str) -> tuple[str, list[str]]:
    """Split a reply that consists of calls: JSON objects, or a program behind PYTHON_TAG.

    Objects follow one another, also with `;` in between. An object with other keys than those of a
    call is an answer.
    """
    body = text.strip()
    is_tagged = body.startswith(PYTHON_TAG)
    body = body.removeprefix(PYTHON_TAG).strip()
    if not body.startswith("{"):
        if is_tagged and body:
            return "", [json.dumps({"name": "python", "arguments": {"code": body}})]
        return text, []
    calls = list(_objects_in_a_row(body))
    if is_tagged or _looks_like_call(calls[0]):
        return "", calls
    return text, []


def _objects_in_a_row(text: str) -> Iterator[str]:
    """Yield JSON objects that follow one another; the rest from the first unreadable one on."""
    rest = text
    while rest:
        try:
            _, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            end = len(rest)
        yield rest[:end]
        rest = rest[end:].lstrip("; \n\t")


def _looks_like_call(text: str) -> bool:
    """Return True if a JSON object is a name with arguments, or is truncated and contains "name"."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return '"name"' in text
    if not isinstance(fields, dict) or "name" not in fields:
        return False
    return fields.keys() <= _CALL_KEYS and not fields.keys().isdisjoint(_ARGUMENT_KEYS)


# Functions that split a reply into its text and the texts of its calls.
CALL_SPLITTERS: dict[ToolFormat, Callable[[str], tuple[str, list[str]]]] = {
    "hermes": _split_hermes,  # also Qwen's
    "llama3": _split_llama3,
    "fenced": _split_fenced,  # for models whose templates know no tools
}


# Beginnings of calls; what follows one in a reply may be part of a call.
CALL_MARKS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "llama3": ("{", PYTHON_TAG),
    "fenced": ("```tool",),
}


def detect_tool_format(template: str) -> ToolFormat:
    """Return the format of tool calls that a chat template asks for; `fenced` if it asks for none."""
    if re.search(r"<tool_call>.*<args-(json-object|dict)>", template, re.DOTALL):
        return "hermes"
    if re.search(r"\btools\b", template) and (PYTHON_TAG in template or "ipython" in template):
        return "llama3"
    return "fenced"


def split_thoughts(raw: str) -> tuple[str, str]:
    """Split a reply that may be incomplete into its thoughts and the text after them.

    Both are "" while the thoughts have not ended, and while the reply is too short to tell whether
    it begins with thoughts.
    """
    thoughts, end_mark, text = _partition_thoughts(raw)
    start = raw.lstrip()[: len("<think>")]
    if not end_mark and "<think>".startswith(start):
        return "", ""
    return thoughts.strip().removeprefix("<think>").strip(), text.lstrip()


def _partition_thoughts(raw: str) -> tuple[str, str, str]:
    """Split a reply at the mark that ends its thoughts, as `str.rpartition` does.

    A mark inside a JSON string of a call belongs to the string.
    """
    position = raw.rfind(_THOUGHT_END)
    while position >= 0 and _is_in_call(raw, position):
        position = raw.rfind(_THOUGHT_END, 0, position)
    if position < 0:
        return "", "", raw
    return raw[:position], _THOUGHT_END, raw[position + len(_THOUGHT_END) :]


def _is_in_call(raw: str, position: int) -> bool:
    """Return True if a position lies in a JSON object that may be a call, also a truncated one."""
    decoder = json.JSONDecoder()
    for match in _OBJECT_START.finditer(raw, 0, position):
        start = match.end()
        while start < position and raw.startswith("{", start):
            try:
                _, end = decoder.raw_decode(raw, start)
            except json.JSONDecodeError as error:
                if error.msg.startswith("Unterminated string") and error.pos < position:
                    return True
                break
            except RecursionError:
                break
            if end > position:
                return True
            spaces = _SPACES.match(raw, end)
            start = spaces.end() if spaces else end
    return False


def parse_reply(raw: str, tool_format: ToolFormat, id_prefix: str) -> ParsedReply:
    """Parse a complete reply. If its thoughts never end, it has no text and no calls.

    Args:
        raw: reply with thoughts and special tokens, without the token that ends it.
        tool_format: format of the calls.
        id_prefix: beginning of the calls' ids, which are numbered from 0.
    """
    thoughts, end_mark, answer = _partition_thoughts(raw)
    if not end_mark and raw.lstrip().startswith("<think>"):
        thoughts = raw
        answer = ""
    split = CALL_SPLITTERS[tool_format]
    text, call_texts = split(answer)
    calls = []
    problems = {}
    for number, call_text in enumerate(call_texts):
        name, arguments = _read_call(call_text)
        call = ToolUse(id=f"{id_prefix}{number}", name=name, arguments=arguments)
        calls.append(call)
        if not name:
            problems[call.id] = _UNREADABLE
    return ParsedReply(
        text=text.strip(),
        reasoning=thoughts.strip().removeprefix("<think>").strip(),
        calls=tuple(calls),
        problems=problems,
    )


def _read_call(text: str) -> tuple[str, str]:
    """Return the name of a call and its arguments as JSON; "" and the text if it cannot be read."""
    try:
        fields = json.loads(text)
        if isinstance(fields.get("function"), dict):
            fields = fields["function"]  # the form of OpenAI's API
        arguments = fields.get("arguments", fields.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        if arguments is None:
            arguments = {}
        arguments_json = json.dumps(arguments, ensure_ascii=False)
        arguments_json.encode()  # raises an error for lone surrogates, which no message can contain
        if isinstance(fields["name"], str) and isinstance(arguments, dict):
            return fields["name"], arguments_json
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return "", text


def write_tools_as_text(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """Convert a chat with tools to one without, for a model whose template does not support tools.

    The tools and the instructions to call them are appended to the system prompt, and results
    become messages of the user. Consecutive messages of the user are joined, because many templates
    demand that user and assistant alternate.
    """
    has_calls = any(message.answers or message.raw or message.calls for message in messages)
    if not tools and not has_calls:
        return list(messages)

    converted: list[Message] = []
    for message in messages:
        role = message.role
        content = _content_with_calls(message)
        if role == "tool":
            role = "user"
            content = f"Result of the tool:\n{content}"
        if converted and converted[-1].role == role == "user":
            converted[-1] = replace(converted[-1], content=f"{converted[-1].content}\n\n{content}")
        else:
            converted.append(Message(role=role, content=content))

    if tools:
        instructions = _tool_instructions(tools)
        if converted and converted[0].role == "system":
            converted[0] = replace(
                converted[0], content=f"{converted[0].content}\n\n{instructions}"
            )
        else:
            converted.insert(0, Message(role="system", content=instructions))
    return converted


def _content_with_calls(message: Message) -> str:
    """Return the text of a message with its calls in fenced blocks."""
    if message.raw:
        return message.raw
    parts = [message.content]
    for call in message.calls:
        fields = {"name": call.name, "arguments": json.loads(call.arguments)}
        parts.append(f"```tool\n{json.dumps(fields, ensure_ascii=False)}\n```")
    return "\n".join(parts).lstrip("\n")


def _tool_instructions(tools: Sequence[ToolSchema]) -> str:
    """Return the list of tools and the instructions to call them."""
    lines = []
    for tool in tools:
        parameters = json.dumps(tool.parameters, ensure_ascii=False)
        lines.append(f"- {tool.name}: {tool.description}\n  arguments: {parameters}\n")
    return f"Tools:\n{''.join(lines)}\n{_INSTRUCTIONS}"
