"""Tool calls as models write them: schemas for a chat template, and the parsers of replies by the model's format."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollout.records.trajectory import Message, ToolUse

ToolFormat = Literal["hermes", "llama3", "fenced"]
PYTHON_TAG = "<|python_tag|>"
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FENCED = re.compile(r"^```tool[ \t]*\n(.*?)(?:^```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_UNREADABLE = 'This tool call cannot be read. Write it as JSON: {"name": "...", "arguments": {...}}'
_FORM = """To call a tool, write
```tool
{"name": "...", "arguments": {...}}
```
and stop; its result comes with the next message. Several blocks are several calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """What a model is told of a tool."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # the JSON schema of an object

    @property
    def function(self) -> dict[str, Any]:
        """As chat templates take it."""
        own = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": own}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """A reply of a model with tools, taken apart."""

    text: str  # without thoughts and calls
    reasoning: str
    calls: tuple[
        ToolUse, ...
    ]  # in their order; one that cannot be read has no name, and its text as arguments
    problems: Mapping[str, str]  # by id of such a call, what the model is told


def _marked(pattern: re.Pattern[str]) -> Callable[[str], tuple[str, list[str]]]:
    """The splitter of a format whose calls stand between marks."""
    return lambda text: (pattern.sub("", text), [found.strip() for found in pattern.findall(text)])


def _llama3(text: str) -> tuple[str, list[str]]:
    """JSON objects that are the whole reply, one after another or with `;` between; or a program behind its tag."""
    body = text.strip()
    tagged = body.startswith(PYTHON_TAG)
    body = body.removeprefix(PYTHON_TAG).strip()
    if not body.startswith("{"):
        return (
            ("", [json.dumps({"name": "python", "arguments": {"code": body}})])
            if tagged and body
            else (text, [])
        )
    calls = []
    rest = body
    while rest:
        try:
            _, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            end = len(rest)
        calls.append(rest[:end])
        rest = rest[end:].lstrip("; \n\t")
    return ("", calls) if tagged or '"name"' in calls[0] else (text, [])


# what a reply says besides, and the texts of its calls
TOOL_FORMATS: dict[ToolFormat, Callable[[str], tuple[str, list[str]]]] = {
    "hermes": _marked(_HERMES),  # Qwen's too
    "llama3": _llama3,
    "fenced": _marked(_FENCED),  # of models whose templates know no tools
}


# with which calls begin: what follows one in a reply may be part of a call
CALL_MARKS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "llama3": ("{", PYTHON_TAG),
    "fenced": ("```tool",),
}


def tool_format_of(template: str) -> ToolFormat:
    """The format that a chat template teaches its model; `fenced` where it is none that is known here."""
    if re.search(r"<tool_call>.*<args-(json-object|dict)>", template, re.DOTALL):
        return "hermes"
    if re.search(r"\btools\b", template) and (PYTHON_TAG in template or "ipython" in template):
        return "llama3"
    return "fenced"


def thought_and_text(raw: str) -> tuple[str, str]:
    """Thoughts of a reply that may not be whole, and its text behind them; neither while it thinks."""
    thought, closed, text = raw.rpartition("</think>")
    if not closed and "<think>".startswith(raw.lstrip()[:7]):
        return "", ""  # a thought, or nothing yet
    return thought.strip().removeprefix("<think>").strip(), text.lstrip()


def parse_reply(raw: str, form: ToolFormat, prefix: str) -> ParsedReply:
    """Take a reply apart.

    Args:
        raw: with thoughts and special tokens, without the end of the reply.
        prefix: of the calls' ids, which are numbered from 0.
    """
    thought, _, spoken = raw.rpartition("</think>")
    text, written = TOOL_FORMATS[form](spoken)
    calls, problems = [], {}
    for number, call in enumerate(written):
        name, arguments = _read(call)
        calls.append(ToolUse(id=f"{prefix}{number}", name=name, arguments=arguments))
        if not name:
            problems[calls[-1].id] = _UNREADABLE
    reasoning = thought.strip().removeprefix("<think>").strip()
    return ParsedReply(
        text=text.strip(), reasoning=reasoning, calls=tuple(calls), problems=problems
    )


def _read(call: str) -> tuple[str, str]:
    """Name and arguments of a call, a JSON object; "" and the text where it is none."""
    try:
        fields = json.loads(call)
        arguments = fields.get("arguments", fields.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        written = json.dumps(arguments, ensure_ascii=False)
        written.encode()  # refuses text that no message can hold
        if isinstance(fields["name"], str) and isinstance(arguments, dict):
            return fields["name"], written
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return "", call


def in_words(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """A chat with tools as one without, for a model whose template knows none.

    The tools and how to call them go to the end of the system prompt, and results are the user's. Messages of the user
    in a row are one, as many templates want it.
    """
    if not tools and not any(
        message.answers or message.raw or message.calls for message in messages
    ):
        return list(messages)
    said: list[Message] = []
    for message in messages:
        content, role = message.raw or message.content, message.role
        if not message.raw:
            calls = (
                {"name": call.name, "arguments": json.loads(call.arguments)}
                for call in message.calls
            )
            content = "\n".join(
                [content, *(f"```tool\n{json.dumps(call)}\n```" for call in calls)]
            ).lstrip("\n")
        if role == "tool":
            role, content = "user", f"Result of the tool:\n{content}"
        if said and said[-1].role == role == "user":
            said[-1] = replace(said[-1], content=f"{said[-1].content}\n\n{content}")
        else:
            said.append(Message(role=role, content=content))
    if tools:
        listed = "".join(
            f"- {tool.name}: {tool.description}\n  arguments: {json.dumps(tool.parameters)}\n"
            for tool in tools
        )
        about = f"Tools:\n{listed}\n{_FORM}"
        if said and said[0].role == "system":
            said[0] = replace(said[0], content=f"{said[0].content}\n\n{about}")
        else:
            said.insert(0, Message(role="system", content=about))
    return said
