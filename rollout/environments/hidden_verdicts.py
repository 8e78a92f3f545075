"""Verdicts on hidden tests, from the values that the tests report from the sandbox.

`passed_tests` runs a test file and returns the names of the tests that pass.
"""

import ast
import json
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from secrets import token_hex
from typing import Any

from rollout.environments.decoys import Candidates, draw_candidates
from rollout.environments.hidden_tests import (
    HiddenTest,
    HiddenTestFile,
    Site,
    WithheldValue,
    instrument,
)
from rollout.sandbox.records import RunLimits
from rollout.sandbox.runner import Runner

_PROGRAM_PATH = Path(__file__).resolve().parents[1] / "sandbox" / "guest" / "pytest_runner.py"
_PROGRAM = _PROGRAM_PATH.read_text(encoding="utf-8")

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda item, container: item in container,
    "not in": lambda item, container: item not in container,
    # Only None, True and False are expected with these two, and the values that are read from the texts
    # "None", "True" and "False" are these objects themselves.
    "is": operator.is_,
    "is not": operator.is_not,
}
# Operators that mean the same with the operands in the other order: `v has c` means `c in v`, and
# `v lacks c` means `c not in v`.
_MIRRORED_OPERATORS = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "in": "has", "not in": "lacks"}
# The text of a reported value is "=" and a literal for plain data. For another value it is _UNKNOWN, or
# "!" and one entry for each candidate, separated by ";": the operators that are true between the value
# and the candidate, separated by ",".
_UNKNOWN = "?"
# Largest share of decoys that a value may equal in addition to the expected value.
_MAX_EQUAL_DECOYS = 0.25

# An event of a test: ["report", phase, outcome, is an expected failure], ["site", number, number of
# the withheld value or -1, text of the value] or ["end", number].
_Event = Sequence[Any]
_REPORT_KB = 8192  # largest report

_instrument_cached = lru_cache(maxsize=64)(instrument)


async def passed_tests(
    runner: Runner,
    module: str,
    files: Mapping[str, bytes],
    *,
    limits: RunLimits,
    allowed: Collection[str] = (),
) -> set[str]:
    """Run the tests of a file in a process of their own; return the names of those that pass.

    The file runs a second time if a test compares an expected value with an object that is not
    plain data. The sandbox then gets the expected value among decoys.

    Args:
        runner: runs the program.
        module: path of the test file.
        files: content of the repository by path, with the test file.
        limits: limits of each run.
        allowed: permissions of the code under test: "gc", "trace" or "ctypes" (see
            `rollout/sandbox/guest/pytest_runner.py`).

    Raises:
        SandboxError: the result of a test is unknown.
        ValueError: the path of a file leads out of the folder.
    """
    test_file = _instrument_cached(files.get(module, b"").decode("utf-8", "replace"))
    tested_files = {**files, module: test_file.source.encode()}

    async def judge_run(candidates: Mapping[str, Candidates]) -> dict[str, _TestVerdict]:
        """Run the file once; return the verdict on each test.

        Args:
            candidates: expected value among decoys, by key of an open site (see `_TestVerdict`); {} in
                the first run.
        """
        mark = token_hex()
        request = {
            "mark": mark,
            "module": module,
            "names": test_file.names,
            "rebound_names": test_file.rebound_names,
            "computing_modules": test_file.computing_modules,
            "allowed": sorted(allowed),
            "candidates": {key: choice.texts for key, choice in candidates.items()},
        }
        result = await runner.run(
            _PROGRAM,
            stdin=json.dumps(request),
            limits=replace(limits, output_kb=_REPORT_KB),
            files=tested_files,
        )
        judge = _Judge(test_file, candidates)
        return judge.verdicts(_parse_report(result.stdout, mark))

    verdicts = await judge_run({})
    open_sites: dict[str, Any] = {}
    for verdict in verdicts.values():
        open_sites |= verdict.open_sites
    if open_sites:
        candidates = {key: draw_candidates(value) for key, value in open_sites.items()}
        verdicts = await judge_run(candidates)
    return {name for name, verdict in verdicts.items() if verdict.passes}


def _parse_report(stdout: str, mark: str) -> Mapping[str, Sequence[_Event]]:
    """Return the events by name of the test; {} if there is no report."""
    for line in stdout.split("\n"):
        if line.startswith(f"{mark} "):
            try:
                report: dict[str, list[_Event]] = json.loads(line[len(mark) + 1 :])
                return report
            except (ValueError, RecursionError):
                return {}
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _TestVerdict:
    """Verdict on a test after one run of its file.

    A site (see `Site`) is open if the value that the test computed there is not plain data. Such a
    value can be compared only inside of the sandbox, which needs a second run of the file.

    Attributes:
        passes: False if the test has failed. If it is True and there are open sites, the second run
            decides.
        open_sites: expected values of open sites by key. A key such as "7000001/2" has the number of
            the site and that of the withheld value, or -1 if the site has no parameter. It is {} for a
            failed test, and for every test in the second run.
    """

    passes: bool
    open_sites: dict[str, Any] = field(default_factory=dict)


class _Judge:
    """Judge of the tests of one run of a file."""

    def __init__(self, test_file: HiddenTestFile, candidates: Mapping[str, Candidates]) -> None:
        """Initialize a judge.

        Args:
            test_file: file whose tests have run.
            candidates: candidates with which the sandbox has compared values, by key of the site.
        """
        self._file = test_file
        self._candidates = candidates

    def verdicts(self, report: Mapping[str, Sequence[_Event]]) -> dict[str, _TestVerdict]:
        """Return verdicts by the names of tests in the original file."""
        return {
            self._original_name(name): self._verdict(name, events)
            for name, events in report.items()
        }

    def _verdict(self, name: str, events: Sequence[_Event]) -> _TestVerdict:
        """Return the verdict on a test that has reported these events."""
        if not _pytest_has_passed(events) or not self._is_complete(name, events):
            return _TestVerdict(passes=False)
        open_sites = self._compare_values(name, events)
        if open_sites is None:
            return _TestVerdict(passes=False)
        return _TestVerdict(passes=True, open_sites=open_sites)

    def _is_complete(self, name: str, events: Sequence[_Event]) -> bool:
        """Return True if a test has reached its end and its required sites."""
        functions = self._functions_of_test(name)
        if not functions:
            # The file does not define the function, so only pytest knows about its end.
            return True
        sites = {event[1] for event in events if event[0] == "site"}
        ends = {event[1] for event in events if event[0] == "end"}
        return any(
            function.number in ends and sites.issuperset(function.required_sites)
            for function in functions
        )

    def _functions_of_test(self, name: str) -> list[HiddenTest]:
        """Return the functions of the file that a test of pytest may have run.

        There are several if the file defines the function several times. There are none if the file does
        not define it: for example, a class inherits it (pytest then names the test after that class), or
        the file imports it.

        Args:
            name: name that pytest gives the test.
        """
        # pytest names a test `path/test_a.py::TestAdd::test_one[parameters]`. The separator is written
        # `:{2}`, because the architecture test takes a string of two colons for the IPv6 address of a
        # server that listens everywhere.
        _, *parts = re.split(r":{2}", name.partition("[")[0])
        return self._file.tests.get(".".join(parts), [])

    def _compare_values(self, name: str, events: Sequence[_Event]) -> dict[str, Any] | None:
        """Compare the values that a test has reported with the expected ones.

        A value that can be compared only with candidates leaves its site open in a run without
        candidates.

        Args:
            name: name of the test.
            events: events of the test.

        Returns:
            Expected values of the open sites by key (see `_TestVerdict`); None if a value is wrong, or
            if an event names a site that the file lacks or a withheld value that is not the test's.
        """
        open_sites: dict[str, Any] = {}
        for kind, *values in events:
            if kind != "site":
                continue
            number, withheld_number, text = values
            site = self._file.sites.get(number)
            if site is None:
                return None
            expected = site.expected
            if site.parameter:
                withheld = self._withheld_value(site, withheld_number, name)
                if withheld is None:
                    return None
                expected = withheld.value

            key = f"{number}/{withheld_number}"
            # `is` and `is not` need no candidates; see `_is_right`.
            needs_candidates = text == _UNKNOWN and site.comparison not in ("is", "is not")
            if needs_candidates and not self._candidates:
                open_sites[key] = expected
            elif not self._is_right(site, expected, text, self._candidates.get(key)):
                return None
        return open_sites

    def _withheld_value(self, site: Site, number: int, test: str) -> WithheldValue | None:
        """Return the withheld value with this number, which a site has reported.

        Returns:
            The value; None if it belongs to another parameter than the site's, or is not among the
            parameters in the test's name.
        """
        withheld = self._file.withheld.get(number)
        if withheld is None or withheld.parameter != site.parameter:
            return None
        parameters_in_name = test.partition("[")[2].rstrip("]").split("-")
        return withheld if f"withheld{number}" in parameters_in_name else None

    def _is_right(
        self, site: Site, expected: Any, text: str, candidates: Candidates | None
    ) -> bool:
        """Return True if a site's comparison of the reported value with the expected one is true."""
        if text.startswith("="):
            value = ast.literal_eval(text[1:])
            operands = (expected, value) if site.stated_first else (value, expected)
            try:
                return bool(_OPERATORS[site.comparison](*operands))
            except TypeError:
                return False
        if text.startswith("!") and candidates is not None:
            return _distinguishes_expected(site, text[1:].split(";"), candidates)
        # All that is known of the value is that it is not plain data. Sites with `is` and `is not` expect
        # only None, True or False, so `is not` is true. Any other comparison counts as false.
        return site.comparison == "is not"

    def _original_name(self, name: str) -> str:
        """Return the name that a test has in the original file.

        In the sandbox, `withheld<number>` stands for a withheld value of a parameter. It is replaced
        by the text that pytest puts into the original name for this value.
        """
        function, bracket, parameters = name.partition("[")
        if not bracket:
            return name
        parts = []
        for part in parameters.removesuffix("]").split("-"):
            match = re.fullmatch(r"withheld(\d+)", part)
            withheld = self._file.withheld.get(int(match[1])) if match else None
            parts.append(withheld.test_id if withheld is not None else part)
        return f"{function}[{'-'.join(parts)}]"


def _pytest_has_passed(events: Sequence[_Event]) -> bool:
    """Return True if pytest reports that a test has run and passed in all of its phases.

    A test with the mark `xfail` does not pass: if it fails, pytest reports that it was skipped; if it
    succeeds, pytest reports that it has passed, and marks the report as that of an `xfail`.
    """
    has_run = False
    for kind, *values in events:
        if kind == "report":
            phase, outcome, is_expected_failure = values
            has_run = has_run or phase == "call"
            if outcome != "passed" or is_expected_failure:
                return False
    return has_run


def _distinguishes_expected(
    site: Site, true_operators: Sequence[str], candidates: Candidates
) -> bool:
    """Return True if a comparison with the expected value is true and distinguishes it from decoys.

    `==` may also be true for up to a quarter of the decoys. `in`, `<`, `<=`, `>` and `>=` must be
    false for at least one decoy. `!=` and `not in` only need to be true for the expected value.

    Args:
        site: comparison.
        true_operators: for each candidate, the operators that are true between the value and the
            candidate, joined by commas.
        candidates: expected value and decoys.
    """
    if len(true_operators) != len(candidates.texts):
        return False
    operator_name: str = site.comparison
    if site.stated_first:  # the sandbox has compared with the value on the left
        operator_name = _MIRRORED_OPERATORS.get(operator_name, operator_name)
    results = [operator_name in text.split(",") for text in true_operators]
    expected_result = results.pop(candidates.expected)
    decoy_results = results

    if not expected_result:
        return False
    if site.comparison in ("!=", "not in"):
        return True
    if site.comparison == "==":
        return sum(decoy_results) <= _MAX_EQUAL_DECOYS * len(decoy_results)
    return not all(decoy_results)
