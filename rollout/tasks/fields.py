"""Formats of data sets whose rows have questions and answers in columns.

`Fields` names the columns of a format. `Format` is the interface of all formats.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rollout.environments.math_limits import MAX_CHARS
from rollout.environments.math_notation import last_boxed

DataRow = Mapping[str, Any]

# Instructions that published prompts put around a problem; a role's prompt has its own.
_INSTRUCTIONS = (
    re.compile(
        r"^Solve the following math problem step by step\. The last line of your response should be[^\n]*\n+"
    ),
    re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.?\s*$"),
    re.compile(
        r"(?:\s|\\n)*Let'?s think step by step and output the final answer within \\boxed\{\}\.\s*$",
        re.I,
    ),
)


class BadRow(ValueError):
    """Error in a row that is not of its format; the message continues "row 7 of format F"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of a data file.

    Attributes:
        question: published text, from which the task's id is derived.
        prompt: text that the team gets.
        answers: every accepted ground truth.
        name: the row's id; "" without one.
        source: the row's data source; "" without one.
    """

    question: str
    prompt: str
    answers: tuple[str, ...]
    name: str = ""
    source: str = ""


class Format(Protocol):
    """Format of the rows of a data file."""

    @property
    def env(self) -> str:
        """Environment that scores the problems, a name in `ENVS`."""

    def problem(self, row: DataRow) -> Problem | None:
        """Return the problem of a row; None if nothing in it can be scored.

        Raises:
            BadRow: the row is not of this format.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Format whose questions and answers are in columns.

    Where several columns are named, the first one that is filled counts. Names of columns are lower
    case here, and match any case in a file. `a.b` is the entry `b` of column `a`, which may be
    JSON.

    Attributes:
        env: environment that scores the problems.
        question: columns of the question.
        answers: columns of the answer: a text, a number, or a list of accepted ones, which may be
            JSON.
        aliases: columns of further accepted answers; all that are filled count.
        name: columns of the row's id.
        source: columns of the row's data source.
        context: columns of a text that precedes the question.
        all_of: a list of answers is one answer with several parts.
        solutions: answers are worked solutions, whose final answer counts, and questions have
            instructions around them.
        needs_answer: refuse rows without an answer. Environments of the user may need none.
    """

    env: str
    question: tuple[str, ...]
    answers: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    name: tuple[str, ...] = ("id", "_id")
    source: tuple[str, ...] = ("data_source", "extra_info.data_source")
    context: tuple[str, ...] = ()
    all_of: bool = False
    solutions: bool = False
    needs_answer: bool = True

    def problem(self, row: DataRow) -> Problem:
        """Return the question with its context, and every accepted answer.

        Raises:
            BadRow: the row has no question, no answer although the format needs one, or a solution
                without a final answer.
        """
        question = _question_text(_required_value(row, self.question, "question"))
        if self.solutions:
            for instruction in _INSTRUCTIONS:
                question = instruction.sub("", question).strip()
        context = _first_value(row, self.context)
        if context is not None:
            question = f"{_question_text(context)}\n{question}"

        answer = _first_value(row, self.answers)
        if self.needs_answer:
            answer = _required_value(row, self.answers, "answer")
        answers = list(_answer_texts(answer))
        if self.all_of:
            answers = [", ".join(answers)]
        for path in self.aliases:
            answers += _answer_texts(_value_at(row, path))
        answers = [answer for answer in answers if answer]
        if self.solutions:
            answers = [final_answer(answer) for answer in answers]
        if not answers and self.needs_answer:
            raise BadRow("has an empty answer")
        return Problem(
            question=question,
            prompt=question,
            answers=tuple(dict.fromkeys(answers)),
            name=_label(_first_value(row, self.name)),
            source=_label(_first_value(row, self.source)),
        )


def final_answer(text: str) -> str:
    """Return the final answer of a solution.

    It is the last boxed text, the text after `####`, or the whole text if this is short.

    Raises:
        BadRow: there is no marked or short answer, its box never closes, or it is empty or longer
            than MAX_CHARS.
    """
    if "\\boxed{" in text:
        text = last_boxed(text) or ""
    elif "####" in text:
        text = text.rpartition("####")[2]
    text = text.strip()
    if not text or len(text) > MAX_CHARS:
        raise BadRow(
            f"has no final answer of 1 to {MAX_CHARS} characters, in \\boxed{{}}, after #### or "
            "alone"
        )
    return text


def _required_value(row: DataRow, paths: Sequence[str], name: str) -> Any:
    """Return the value of the first filled column.

    Raises:
        BadRow: no column is filled.
    """
    value = _first_value(row, paths)
    if value is None:
        columns = f"column {paths[0]}" if len(paths) == 1 else f"one of {', '.join(paths)}"
        raise BadRow(
            f"has no {name}: expected {columns} to be filled; its columns: {', '.join(row)}"
        )
    return value


def _first_value(row: DataRow, paths: Sequence[str]) -> Any:
    """Return the value of the first filled column, or None."""
    for path in paths:
        value = _value_at(row, path)
        if value is not None:
            return value
    return None


def _value_at(row: DataRow, path: str) -> Any:
    """Return the value at a path; None if it is missing, blank, an empty list or NaN.

    Arrays and numbers of NumPy are returned as lists and numbers of Python.
    """
    value: Any = row
    for name in path.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = _parse_json(value)
        if not isinstance(value, Mapping):
            return None
        value = next((value[key] for key in value if str(key).lower() == name), None)
    if isinstance(value, np.floating):
        value = float(str(value))  # a float32 has more digits as a float of Python
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()  # pandas reads lists as arrays, and numbers as NumPy's
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, str):
        return value if value.strip() else None
    if isinstance(value, Sequence) and not value:
        return None
    return value


def _question_text(value: Any) -> str:
    """Return a text, or the text of the only user message of a conversation.

    Raises:
        BadRow: the value is neither.
    """
    if isinstance(value, str):
        return value.strip()
    messages = value if isinstance(value, Sequence) else []
    texts = [
        message.get("content")
        for message in messages
        if isinstance(message, Mapping) and message.get("role") == "user"
    ]
    if len(texts) != 1 or not isinstance(texts[0], str) or not texts[0].strip():
        raise BadRow("has a question that is neither text nor a conversation with one user message")
    return texts[0].strip()


def _answer_texts(value: Any) -> Iterator[str]:
    """Yield the answers in a value: texts, numbers, lists of them, or JSON lists of texts.

    Raises:
        BadRow: the value is nothing of this kind.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        items = _parse_json(value)
        # A text such as [0, 1] is an interval, and one answer.
        is_list_of_texts = isinstance(items, list) and all(isinstance(item, str) for item in items)
        if items and is_list_of_texts:
            value = items
    if value is None:
        return
    if isinstance(value, str):
        if value.strip():
            yield value.strip()
    elif isinstance(value, int) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, float) and math.isfinite(value):
        yield str(int(value)) if value.is_integer() else str(value)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for item in value:
            yield from _answer_texts(item)
    else:
        raise BadRow(
            f"has an answer that is a {type(value).__name__} ({value!s:.40}); expected text, a "
            "finite number or a list of them"
        )


def _label(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _parse_json(text: str) -> Any:
    """Return the value of a JSON text; None if it is not valid."""
    try:
        return json.loads(text)
    except ValueError:
        return None
