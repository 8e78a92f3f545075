"""Programming datasets as published: APPS, TACO, CodeContests, LiveCodeBench, DeepCoder, SWE-bench."""

import base64
import json
import pickletools
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.environments.code import pack_solution, pack_test
from rollout.environments.patches import parse_patch
from rollout.environments.repository import pack_instance
from rollout.sandbox.judge import CallTest, StdinTest, Test
from rollout.tasks.fields import BadRow, DataRow, Problem

_STDIN = "Write a Python program that reads from standard input and writes to standard output."
_CALL = "Write Python code that defines {name} as described{starter}."
_END = "Put the whole program into one block fenced by ```python and ```."
_SHOWN = 3  # tests
_MAX_DECODED_BYTES = 512 << 20
_PYTHON_3 = 3  # of CodeContests' languages
_FENCE = re.compile(r"^```[a-z0-9]*\n(.*?)\n?```$", re.DOTALL)
_PLAIN_TEXT = {
    "PROTO",
    "FRAME",
    "MEMOIZE",
    "BINPUT",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "STOP",
}

Tested = tuple[str, list[Test], list[Test]]  # a question, its visible and its hidden tests


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """A format of programming problems, whose answers are their tests."""

    read: Callable[[DataRow], Problem | None]
    env: str = "code"
    none: str = "has no problem with tests"  # what is said of a row that is not of this format

    def problem(self, row: DataRow) -> Problem | None:
        """The problem with its tests, None if it has none."""
        try:
            return self.read(row)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRow(f"{self.none} ({type(error).__name__}: {error})") from error


def tested(read: Callable[[DataRow], Tested], row: DataRow) -> Problem | None:
    """The problem of a row with the tests that `read` finds in it, None if there are none."""
    question, visible, hidden = read(row)
    if not visible and not hidden:
        return None
    first = (visible or hidden)[0]
    function = first.function if isinstance(first, CallTest) else None
    name = next(
        (
            row[key]
            for key in ("problem_id", "question_id", "name", "id")
            if row.get(key) is not None
        ),
        "",
    )
    answers = [pack_test(test, visible=True) for test in visible]
    answers += [pack_test(test, visible=False) for test in hidden]
    answers += [pack_solution(solution)] if (solution := _solution(row.get("solutions"))) else []
    prompt = _prompt(question.strip(), function, (row.get("starter_code") or "").strip())
    return Problem(question=question, prompt=prompt, answers=tuple(answers), name=str(name))


def apps(row: DataRow) -> Tested:
    """APPS and TACO: `question`, `input_output` (JSON: inputs, outputs, perhaps fn_name), `starter_code`."""
    return row["question"], [], parse_tests(row["input_output"] or "[]")


def code_contests(row: DataRow) -> Tested:
    """CodeContests: `description`, and public, private and generated tests as lists of inputs and outputs."""
    hidden = [
        test for kind in ("private_tests", "generated_tests") for test in _columns(row.get(kind))
    ]
    return row["description"], _columns(row["public_tests"]), hidden


def live_code_bench(row: DataRow) -> Tested:
    """LiveCodeBench: `question_content`, `public_test_cases` and packed `private_test_cases`, `metadata` (JSON)."""
    function = _object(row.get("metadata")).get("func_name")
    visible = parse_tests(row["public_test_cases"], function=function)
    return (
        row["question_content"],
        visible,
        parse_tests(unpack_private(row["private_test_cases"]), function=function),
    )


def deep_coder(row: DataRow) -> Tested:
    """DeepCoder: `problem`, and `tests` in the form of whichever collection the problem is from."""
    return (
        row["problem"],
        [],
        parse_tests(row["tests"], function=_object(row.get("metadata")).get("func_name")),
    )


def deep_coder_shown(row: DataRow) -> Tested:
    """DeepCoder with the first three tests visible, as UnityMAS-O (arXiv 2605.26646) shows them; others stay hidden."""
    question, _, tests = deep_coder(row)
    return question, tests[:_SHOWN], tests[_SHOWN:]


STYLES: dict[str, Callable[[DataRow], Tested]] = {
    "taco": apps,
    **{
        read.__name__: read
        for read in (apps, code_contests, live_code_bench, deep_coder, deep_coder_shown)
    },
}


def parse_tests(value: Any, *, function: str | None = None) -> list[Test]:
    """Tests, from JSON text or its value: columns `inputs` and `outputs`, or a list of `input` and `output`.

    Args:
        function: what to call in tests that call something and do not name it.
    """
    value = json.loads(value) if isinstance(value, str) else value
    if isinstance(value, Mapping):
        name = value.get("fn_name") or function
        pairs = zip(value["inputs"], value["outputs"], strict=True)
        return [
            _call(name, given, wanted) if name else _stdin(given, wanted) for given, wanted in pairs
        ]
    return [_entry(entry, function) for entry in value]


def unpack_private(text: str) -> str:
    """The JSON text in LiveCodeBench's `private_test_cases`: plain, or base64 of zlib of a pickled string.

    The pickle is read, not run: anything in it but one string is refused.

    Raises:
        ValueError: it is neither.
    """
    if text.lstrip().startswith("["):
        return text
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), _MAX_DECODED_BYTES)
    found = [(code.name, argument) for code, argument, _ in pickletools.genops(data)]
    strange = {name for name, _ in found} - _PLAIN_TEXT
    texts = [argument for _, argument in found if isinstance(argument, str)]
    if strange or len(texts) != 1:
        raise ValueError(
            f"private_test_cases hold more than one text: {', '.join(sorted(strange)) or len(texts)}"
        )
    return texts[0]


def _solution(value: Any) -> str | None:
    """The first solution in Python: of a list of texts, or its JSON, or of CodeContests' columns; None without one."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None
    if isinstance(value, Mapping):
        pairs = zip(value.get("language") or (), value.get("solution") or (), strict=False)
        value = [text for language, text in pairs if language == _PYTHON_3]
    texts = [text for text in value or () if isinstance(text, str) and text.strip()]
    return _FENCE.sub(r"\1", texts[0].strip()).strip() + "\n" if texts else None


def _entry(entry: DataRow, function: str | None) -> Test:
    name = entry.get("fn_name") or _object(entry.get("metadata")).get("func_name") or function
    kind = entry.get("testtype") or entry.get("type") or ("functional" if name else "stdin")
    if kind in ("functional", "function_call"):
        if not name:
            raise ValueError("a test calls a function that nothing names")
        return _call(name, entry["input"], entry["output"])
    if kind in ("stdin", "stdin_stdout"):
        return _stdin(entry["input"], entry["output"])
    raise ValueError(f"unknown kind of test '{kind}'")


def _columns(value: DataRow | None) -> list[Test]:
    if not value:
        return []
    return [
        _stdin(given, wanted) for given, wanted in zip(value["input"], value["output"], strict=True)
    ]


def _stdin(given: str | Sequence[str], wanted: str | Sequence[str]) -> StdinTest:
    """Some problems have their text as a list of lines."""
    texts = [
        value if isinstance(value, str) else "\n".join(map(str, value)) for value in (given, wanted)
    ]
    return StdinTest(stdin=texts[0], expected=texts[1])


def _call(name: str, given: Any, wanted: Any) -> CallTest:
    """Arguments are a list, or one JSON value a line; a result may be wrapped in a list of one, or not."""
    if isinstance(given, str):
        arguments = tuple(json.loads(line) for line in given.splitlines() if line.strip())
        return CallTest(function=name, arguments=arguments, accepted=(json.loads(wanted),))
    inner = (wanted[0],) if isinstance(wanted, list) and len(wanted) == 1 else ()
    return CallTest(function=name, arguments=tuple(given), accepted=(wanted, *inner))


def _object(value: Any) -> DataRow:
    value = json.loads(value) if isinstance(value, str) and value.strip() else value
    return value if isinstance(value, Mapping) else {}


def _prompt(question: str, function: str | None, starter: str) -> str:
    if function is None:
        return f"{question}\n\n{_STDIN} {_END}"
    begun = f", starting from:\n```python\n{starter}\n```\n" if starter else ""
    return f"{question}\n\n{_CALL.format(name=function, starter=begun)} {_END}"


def swe_bench(row: DataRow) -> Problem | None:
    """SWE-bench, its Lite and its Verified: `instance_id`, `problem_statement`, `patch`, `test_patch`, `FAIL_TO_PASS`,
    `PASS_TO_PASS`. Agents read the files that the right patch changes, which is its "oracle" setting.
    """
    name, issue = str(row["instance_id"]), str(row["problem_statement"])
    fail, keep = _names(row["FAIL_TO_PASS"]), _names(row["PASS_TO_PASS"])
    shown = sorted({edit.path for edit in parse_patch(row["patch"])})
    parse_patch(row["test_patch"])
    tests = pack_instance(
        name, fail_to_pass=fail, pass_to_pass=keep, test_patch=row["test_patch"], shown=shown
    )
    return (
        Problem(question=issue, prompt=issue.strip(), answers=(tests,), name=name) if fail else None
    )


def _names(value: Any) -> list[str]:
    """Tests by name, as a list or as its JSON text."""
    names = json.loads(value) if isinstance(value, str) else list(value)
    if not all(isinstance(name, str) for name in names):
        raise ValueError("a test's name is no text")
    return names
