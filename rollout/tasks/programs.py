"""Data sets of programming problems.

They are APPS, TACO, CodeContests, LiveCodeBench, DeepCoder and SWE-bench.
"""

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

_STDIN_INSTRUCTION = (
    "Write a Python program that reads from standard input and writes to standard output."
)
_CALL_INSTRUCTION = "Write Python code that defines {name} as described{starter}."
_FORMAT_INSTRUCTION = "Put the whole program into one block fenced by ```python and ```."

# Number of tests that `deep_coder_shown` shows.
_SHOWN_TESTS = 3

# Largest size of decompressed tests.
_MAX_DECODED_BYTES = 512 << 20

# Number of Python 3 among the languages of CodeContests.
_PYTHON_3 = 3

# Columns of a problem's id; the first that is filled counts.
_NAME_COLUMNS = ("problem_id", "question_id", "name", "id")

_FENCED = re.compile(r"^```[a-z0-9]*\n(.*?)\n?```$", re.DOTALL)

# Opcodes of a pickle that contains one text.
_TEXT_OPCODES = frozenset(
    {
        "PROTO",
        "FRAME",
        "MEMOIZE",
        "BINPUT",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "STOP",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFormat:
    """Format of programming problems, whose answers are tests.

    Attributes:
        read: converts a row; returns None if the row has no tests.
        env: environment that scores the problems.
        error: describes a row that is not of this format.
    """

    read: Callable[[DataRow], Problem | None]
    env: str = "code"
    error: str = "is not a programming problem with tests"

    def problem(self, row: DataRow) -> Problem | None:
        """Return the problem of a row with its tests; None if it has none.

        Raises:
            BadRow: the row is not of this format.
        """
        try:
            return self.read(row)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRow(f"{self.error} ({type(error).__name__}: {error})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedQuestion:
    """Question of a row with its tests.

    Attributes:
        question: question as it was published.
        visible: tests that the team sees.
        hidden: tests that only the score uses.
    """

    __test__ = False  # the name would make pytest collect the class

    question: str
    visible: list[Test]
    hidden: list[Test]


def tested_problem(read: Callable[[DataRow], TestedQuestion], row: DataRow) -> Problem | None:
    """Convert a row to a problem with tests and, if the row has one, a solution.

    Args:
        read: extracts question and tests from the row.
        row: row of the data set.

    Returns:
        The problem; None if the row has no tests.
    """
    tested = read(row)
    tests = tested.visible + tested.hidden
    if not tests:
        return None

    answers = [pack_test(test, visible=True) for test in tested.visible]
    answers += [pack_test(test, visible=False) for test in tested.hidden]
    solution = _python_solution(row.get("solutions"))
    if solution:
        answers.append(pack_solution(solution))

    names = [row[column] for column in _NAME_COLUMNS if row.get(column) is not None]
    function = tests[0].function if isinstance(tests[0], CallTest) else None
    starter_code = (row.get("starter_code") or "").strip()
    return Problem(
        question=tested.question,
        prompt=_make_prompt(tested.question.strip(), function, starter_code),
        answers=tuple(answers),
        name=str(names[0]) if names else "",
    )


def apps(row: DataRow) -> TestedQuestion:
    """Read a row of APPS or TACO.

    Its columns are `question`, `input_output` (JSON with inputs, outputs and perhaps fn_name) and
    `starter_code`.
    """
    hidden = parse_tests(row["input_output"] or "[]")
    return TestedQuestion(question=row["question"], visible=[], hidden=hidden)


def code_contests(row: DataRow) -> TestedQuestion:
    """Read a row of CodeContests.

    Its columns are `description`, and public, private and generated tests as lists of inputs and
    outputs.
    """
    hidden = _tests_in_columns(row.get("private_tests"))
    hidden += _tests_in_columns(row.get("generated_tests"))
    return TestedQuestion(
        question=row["description"],
        visible=_tests_in_columns(row["public_tests"]),
        hidden=hidden,
    )


def live_code_bench(row: DataRow) -> TestedQuestion:
    """Read a row of LiveCodeBench.

    Its columns are `question_content`, `public_test_cases`, `private_test_cases` (packed) and
    `metadata` (JSON).
    """
    function = _parse_object(row.get("metadata")).get("func_name")
    private_tests = unpack_private(row["private_test_cases"])
    return TestedQuestion(
        question=row["question_content"],
        visible=parse_tests(row["public_test_cases"], function=function),
        hidden=parse_tests(private_tests, function=function),
    )


def deep_coder(row: DataRow) -> TestedQuestion:
    """Read a row of DeepCoder.

    Its columns are `problem`, and `tests` in the format of the collection that the problem is from.
    """
    function = _parse_object(row.get("metadata")).get("func_name")
    hidden = parse_tests(row["tests"], function=function)
    return TestedQuestion(question=row["problem"], visible=[], hidden=hidden)


def deep_coder_shown(row: DataRow) -> TestedQuestion:
    """Read a row of DeepCoder with its first three tests visible (UnityMAS-O, arXiv 2605.26646)."""
    tested = deep_coder(row)
    return TestedQuestion(
        question=tested.question,
        visible=tested.hidden[:_SHOWN_TESTS],
        hidden=tested.hidden[_SHOWN_TESTS:],
    )


# Readers of question and tests by the name of the format.
READERS_OF_TESTS: dict[str, Callable[[DataRow], TestedQuestion]] = {
    "taco": apps,
    "apps": apps,
    "code_contests": code_contests,
    "live_code_bench": live_code_bench,
    "deep_coder": deep_coder,
    "deep_coder_shown": deep_coder_shown,
}


def swe_bench(row: DataRow) -> Problem | None:
    """Convert a row of SWE-bench, SWE-bench Lite or SWE-bench Verified to a problem.

    Its columns are `instance_id`, `problem_statement`, `patch`, `test_patch`, `FAIL_TO_PASS` and
    `PASS_TO_PASS`. Agents read the files that the right patch changes, which is the "oracle"
    setting of SWE-bench.

    Returns:
        The problem; None if no test fails before the patch.
    """
    name = str(row["instance_id"])
    issue = str(row["problem_statement"])
    fail_to_pass = _test_names(row["FAIL_TO_PASS"])
    changed_files = sorted({edit.path for edit in parse_patch(row["patch"])})
    parse_patch(row["test_patch"])  # raises an error if it is not a patch
    answer = pack_instance(
        name,
        fail_to_pass=fail_to_pass,
        pass_to_pass=_test_names(row["PASS_TO_PASS"]),
        test_patch=row["test_patch"],
        shown=changed_files,
    )
    if not fail_to_pass:
        return None
    return Problem(question=issue, prompt=issue.strip(), answers=(answer,), name=name)


def _test_names(value: Any) -> list[str]:
    """Return the names of tests from a list or its JSON.

    Raises:
        ValueError: an entry is not text.
    """
    names = json.loads(value) if isinstance(value, str) else list(value)
    if not all(isinstance(name, str) for name in names):
        raise ValueError("a test's name is not text")
    return names


def parse_tests(value: Any, *, function: str | None = None) -> list[Test]:
    """Convert the tests in a row of a data set.

    Args:
        value: an object with `inputs` and `outputs`, or a list of objects with `input` and `output`;
            or the JSON of either.
        function: name of the function to call, for tests that do not name one themselves.
    """
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        return [_parse_entry(entry, function) for entry in value]
    name = value.get("fn_name") or function
    tests: list[Test] = []
    for given, expected in zip(value["inputs"], value["outputs"], strict=True):
        tests.append(_call_test(name, given, expected) if name else _stdin_test(given, expected))
    return tests


def _parse_entry(entry: DataRow, function: str | None) -> Test:
    """Parse one test of a list.

    Raises:
        ValueError: the test is of an unknown kind, or calls a function without a name.
    """
    metadata = _parse_object(entry.get("metadata"))
    name = entry.get("fn_name") or metadata.get("func_name") or function
    default_kind = "functional" if name else "stdin"
    kind = entry.get("testtype") or entry.get("type") or default_kind
    if kind in ("functional", "function_call"):
        if not name:
            raise ValueError("a test calls a function that nothing names")
        return _call_test(name, entry["input"], entry["output"])
    if kind in ("stdin", "stdin_stdout"):
        return _stdin_test(entry["input"], entry["output"])
    raise ValueError(f"unknown kind of test '{kind}'")


def _tests_in_columns(value: DataRow | None) -> list[Test]:
    """Return the tests in an object with the lists `input` and `output`; [] without an object."""
    if not value:
        return []
    pairs = zip(value["input"], value["output"], strict=True)
    return [_stdin_test(given, expected) for given, expected in pairs]


def _stdin_test(given: str | Sequence[str], expected: str | Sequence[str]) -> StdinTest:
    return StdinTest(stdin=_join_lines(given), expected=_join_lines(expected))


def _join_lines(text: str | Sequence[str]) -> str:
    """Return the text, joining it first if it is a list of lines."""
    return text if isinstance(text, str) else "\n".join(map(str, text))


def _call_test(name: str, given: Any, expected: Any) -> CallTest:
    """Return a test that calls a function.

    Args:
        name: name of the function.
        given: list of arguments, or a text with one JSON value per line.
        expected: result. It is JSON if `given` is a text, and else may be wrapped in a list of one.
    """
    if isinstance(given, str):
        arguments = tuple(json.loads(line) for line in given.splitlines() if line.strip())
        return CallTest(function=name, arguments=arguments, accepted=(json.loads(expected),))
    accepted = [expected]
    if isinstance(expected, list) and len(expected) == 1:
        accepted.append(expected[0])
    return CallTest(function=name, arguments=tuple(given), accepted=tuple(accepted))


def unpack_private(text: str) -> str:
    """Return the JSON in LiveCodeBench's `private_test_cases`.

    It is plain text, or base64 of zlib of a pickled text. The pickle is parsed and not executed;
    one that contains anything but a single text is refused.

    Raises:
        ValueError: the text is neither.
    """
    if text.lstrip().startswith("["):
        return text
    compressed = base64.b64decode(text, validate=True)
    try:
        data = zlib.decompressobj().decompress(compressed, _MAX_DECODED_BYTES)
    except zlib.error as error:
        raise ValueError(f"private_test_cases are not compressed by zlib ({error})") from error
    operations = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(data)]
    other_opcodes = {name for name, _ in operations} - _TEXT_OPCODES
    texts = [argument for _, argument in operations if isinstance(argument, str)]
    if other_opcodes or len(texts) != 1:
        raise ValueError(
            "private_test_cases are not a pickle of one text; the pickle has "
            f"{', '.join(sorted(other_opcodes)) or f'{len(texts)} texts'}"
        )
    return texts[0]


def _python_solution(value: Any) -> str | None:
    """Return the first solution in Python; None without one.

    Args:
        value: list of texts, its JSON, or CodeContests' object with `language` and `solution`.
    """
    try:
        solutions = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None
    if isinstance(solutions, Mapping):
        pairs = zip(solutions.get("language") or (), solutions.get("solution") or (), strict=False)
        solutions = [text for language, text in pairs if language == _PYTHON_3]
    for text in solutions or ():
        if isinstance(text, str) and text.strip():
            return _FENCED.sub(r"\1", text.strip()).strip() + "\n"
    return None


def _parse_object(value: Any) -> DataRow:
    """Return a mapping, parsing it first if it is JSON text; {} if it is not a mapping.

    Raises:
        ValueError: the text is not JSON.
    """
    if isinstance(value, str) and value.strip():
        value = json.loads(value)
    return value if isinstance(value, Mapping) else {}


def _make_prompt(question: str, function: str | None, starter_code: str) -> str:
    """Return the question with instructions.

    Args:
        question: question as it was published.
        function: function that the tests call; None: the program reads its standard input.
        starter_code: beginning of the code; "" without one.
    """
    if function is None:
        return f"{question}\n\n{_STDIN_INSTRUCTION} {_FORMAT_INSTRUCTION}"
    starter = ""
    if starter_code:
        starter = f", starting from:\n```python\n{starter_code}\n```\n"
    instruction = _CALL_INSTRUCTION.format(name=function, starter=starter)
    return f"{question}\n\n{instruction} {_FORMAT_INSTRUCTION}"
