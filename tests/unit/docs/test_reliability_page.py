"""Page of faults: a row for each fault, with tests and chaos faults that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

from tests.faults import proxy
from tests.faults.page import PAGE, ROWS, pages, read

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_has_a_row_for_every_fault() -> None:
    page = pages()[PAGE]
    for section, faults in yaml.safe_load(ROWS.read_text(encoding="utf-8")).items():
        assert f"| **{section}** |" in page
        for row in faults:
            assert f"| {row['fault']} | {row['expected']} |" in page
    assert re.search(r"Results of \d{4}-\d\d-\d\d \w+ to", page)


def test_every_fault_has_a_test_or_a_reason() -> None:
    sections = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    rows = [row for faults in sections.values() for row in faults]
    first_section = next(iter(sections.values()))
    assert [int(row["fault"].split(".")[0]) for row in first_section] == list(range(1, 37))
    chaos = (ROOT / "tests" / "faults" / "chaos.py").read_text(encoding="utf-8")
    for row in rows:
        assert {"fault", "expected"} < row.keys(), row
        assert row.keys() & {"tests", "chaos", "untested"}, row
        for test in row.get("tests", ()):
            path, name = test.split("::")
            functions = {
                node.name
                for node in ast.parse((ROOT / path).read_text()).body
                if hasattr(node, "name")
            }
            assert name in functions, f"{path} has no {name}"
        for fault in row.get("chaos", ()):
            name = fault.removeprefix("disk full at ")
            f_string = re.sub("rank|engine|driver", "{part}", name)
            is_in_chaos = name in chaos or f_string in chaos
            is_of_proxy = name.split(": ")[-1] in proxy.NAMES
            assert is_in_chaos or is_of_proxy or fault in ("all", "clock -1 h", "clock +1 h"), fault
    assert len([row for row in rows if "untested" in row]) <= 4


def test_the_result_of_a_test_is_the_worst_of_its_cases_that_ran(tmp_path: Path) -> None:
    """The table has the result of a test by the results of its cases, in their order."""
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
        path = tmp_path / "junit.xml"
        path.write_text(f"<testsuite>{''.join(rows)}</testsuite>")
        assert read([str(path)])["tests"]["tests/x.py::test_a"]["result"] == result, cases
