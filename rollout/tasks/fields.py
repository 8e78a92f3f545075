"""Dataset columns as tasks: where a format keeps questions, answers and choices, and errors that name the row."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.environments.math_limits import MAX_CHARS
from rollout.environments.math_notation import last_boxed

# what published prompts put around a problem; a role's own prompt says how to answer
_FRAMES = (
    re.compile(
        r"^Solve the following math problem step by step\. The last line of your response should be[^\n]*\n+"
    ),
    re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.?\s*$"),
    re.compile(
        r"(?:\s|\\n)*Let'?s think step by step and output the final answer within \\boxed\{\}\.\s*$",
        re.I,
    ),
)


def final_answer(text: str) -> str:
    """The answer of a solution: what is boxed last, what follows `####`, or the text itself if it is short.

    Raises:
        BadRow: it is a worked solution without a mark, or its box never closes.
    """
    if "\\boxed{" in text:
        text = last_boxed(text) or ""
    elif "####" in text:
        text = text.rpartition("####")[2]
    text = text.strip()
    if not text or len(text) > MAX_CHARS:
        raise BadRow(
            f"has no final answer of 1 to {MAX_CHARS} characters, in \\boxed{{}}, after #### or alone"
        )
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Where a format keeps what; of several columns the first that is filled counts.

    Columns are lower case and match any case; `a.b` is `b` inside `a`, which may be JSON text.
    """

    env: str
    question: tuple[str, ...]
    answers: tuple[str, ...]  # text, a number, or a list of accepted ones, which may be JSON text
    aliases: tuple[str, ...] = ()  # further accepted answers, every column that is filled
    name: tuple[str, ...] = ("id", "_id")
    source: tuple[str, ...] = ("data_source", "extra_info.data_source")
    context: tuple[str, ...] = ()  # text that belongs before the question
    all_of: bool = False  # a list of answers is one answer with several parts
    solutions: bool = (
        False  # an answer is the final one of a solution, and a question comes with instructions
    )

    def problem(self, row: DataRow) -> Problem:
        """The question with its context and every accepted answer."""
        question = _prompt(_filled(row, self.question, "question"))
        for frame in _FRAMES if self.solutions else ():
            question = frame.sub("", question).strip()
        context = _first(row, self.context)
        if context is not None:
            question = f"{_prompt(context)}\n{question}"
        answers = list(_texts(_filled(row, self.answers, "answer")))
        if self.all_of:
            answers = [", ".join(answers)]
        for path in self.aliases:
            answers += _texts(_at(row, path))
        answers = [
            final_answer(answer) if self.solutions else answer for answer in answers if answer
        ]
        if not answers:
            raise BadRow("has an empty answer")
        name, source = (_label(_first(row, paths)) for paths in (self.name, self.source))
        accepted = tuple(dict.fromkeys(answers))
        return Problem(
            question=question, prompt=question, answers=accepted, name=name, source=source
        )


def _filled(row: DataRow, paths: Sequence[str], what: str) -> Any:
    found = _first(row, paths)
    if found is None:
        raise BadRow(
            f"has no {what}: expected one of {', '.join(paths)} to be filled; its columns: {', '.join(row)}"
        )
    return found


def _first(row: DataRow, paths: Sequence[str]) -> Any:
    return next((value for value in (_at(row, path) for path in paths) if value is not None), None)


def _at(row: DataRow, path: str) -> Any:
    """What is at `path`; None for nothing, which blank text, an empty list and not-a-number are too."""
    value: Any = row
    for part in path.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = _json(value)
        if not isinstance(value, Mapping):
            return None
        value = next((value[key] for key in value if str(key).lower() == part), None)
    if isinstance(value, float) and math.isnan(value):
        return None
    empty = isinstance(value, str | Sequence) and not (
        value.strip() if isinstance(value, str) else value
    )
    return None if empty else value


def _prompt(value: Any) -> str:
    """Text, or that of the only user message of a conversation."""
    if isinstance(value, str):
        return value.strip()
    messages = value if isinstance(value, Sequence) else []
    said = [
        m.get("content") for m in messages if isinstance(m, Mapping) and m.get("role") == "user"
    ]
    if len(said) != 1 or not isinstance(said[0], str) or not said[0].strip():
        raise BadRow("has a question that is neither text nor a conversation with one user message")
    return said[0].strip()


def _texts(value: Any) -> Iterator[str]:
    """The answers in `value`: text, a number, lists of them, or a list of texts as JSON."""
    listed = _json(value) if isinstance(value, str) and value.lstrip().startswith("[") else None
    if isinstance(listed, list) and listed and all(isinstance(item, str) for item in listed):
        value = listed  # [0, 1] is an interval and stays text
    if value is None or (isinstance(value, str) and not value.strip()):
        return
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(int(value)) if float(value).is_integer() else str(value)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)
    else:
        raise BadRow(
            f"has an answer that is a {type(value).__name__}; expected text, a number or a list of them"
        )


def _label(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


DataRow = Mapping[str, Any]


class BadRow(ValueError):
    """A row is not of its format: what was expected and what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem as a file tells it."""

    question: str  # as published; an id is made of it
    prompt: str  # what a team is asked
    answers: tuple[str, ...]  # every accepted ground truth
    name: str = ""  # the row's own id, "" if it has none
    source: str = ""  # the row's own data source, "" if it has none


class Format(Protocol):
    """How rows of one shape are read."""

    @property
    def env(self) -> str:
        """The environment that scores such problems, a name in ENVS."""

    def problem(self, row: DataRow) -> Problem | None:
        """The problem of a row, None where nothing could be scored; BadRow if the row is not of this format."""
