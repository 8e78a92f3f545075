"""The table of faults has a row for each fault, and names tests and faults that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

from tests.faults import proxy
from tests.faults.page import PAGE, ROWS, pages, read

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_a_row_for_every_fault() -> None:
    page = pages()[PAGE]
    for section, faults in yaml.safe_load(ROWS.read_text(encoding="utf-8")).items():
        assert f"| **{section}** |" in page
        for row in faults:
            assert f"| {row['fault']} | {row['expected']} |" in page
    assert re.search(r"Results of \d{4}-\d\d-\d\d \w+ to", page)


def test_every_fault_has_a_test_or_says_why_not() -> None:
    sections = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    rows = [row for faults in sections.values() for row in faults]
    assert [int(row["fault"].split(".")[0]) for row in next(iter(sections.values()))] == list(
        range(1, 37)
    )
    chaos = (ROOT / "tests" / "faults" / "chaos.py").read_text(encoding="utf-8")
    for row in rows:
        assert {"fault", "expected"} < row.keys() and row.keys() & {"tests", "chaos", "untested"}, (
            row
        )
        for test in row.get("tests", ()):
            path, name = test.split("::")
            functions = {
                node.name
                for node in ast.parse((ROOT / path).read_text()).body
                if hasattr(node, "name")
            }
            assert name in functions, f"{path} has no {name}"
        for fault in row.get("chaos", ()):
            said = fault.removeprefix("disk full at ")
            known = (
                said in chaos or re.sub("rank|engine|driver", "{part}", said) in chaos
            )  # in an f-string
            assert (
                known
                or fault in ("all", "clock -1 h", "clock +1 h")
                or said.split(": ")[-1] in proxy.NAMES
            ), fault
    assert len([row for row in rows if "untested" in row]) <= 4


def test_of_a_tests_cases_the_worst_counts_and_a_skipped_one_does_not(tmp_path: Path) -> None:
    """Table: what came of the cases, in their order -> the test's result."""
    kinds = {"passed": "", "failure": "<failure/>", "skipped": "<skipped/>", "error": "<error/>"}
    table = {
        ("failure", "skipped"): "failure",
        ("skipped", "failure", "passed"): "failure",
        ("passed", "skipped"): "passed",
        ("passed", "error"): "error",
        ("skipped", "skipped"): "skipped",
    }
    for cases, result in table.items():
        rows = [
            f'<testcase classname="tests.x" name="test_a[{kind}]" time="1">{kinds[kind]}</testcase>'
            for kind in cases
        ]
        (path := tmp_path / "junit.xml").write_text(f"<testsuite>{''.join(rows)}</testsuite>")
        assert read([str(path)])["tests"]["tests/x.py::test_a"]["result"] == result, cases
