"""Repairs of generated packages and of a checkout, in the real sandbox."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rollout.base.errors import EnvError
from rollout.environments.protocol import Step
from rollout.environments.repository import CheckCall, RepositoryEnv, pack_check, pack_source
from rollout.records.trajectory import Status, Task
from rollout.sandbox import Sandbox, SandboxError
from rollout.tasks.fields import BadRow
from rollout.tasks.files import FORMATS
from rollout.tasks.generators import GENERATORS
from rollout.tasks.repositories import draw_checks, source_of
from rollout.tasks.repository_functions import FUNCTIONS_WITH_BUGS
from tests.support.casts import play, validity
from tests.support.repositories import NO_PLUGINS

ROLES = {"player": "repairer"}
SOURCE = "def double(n):\n    return n + 2\n\n\ndef half(n):\n    return n / 2\n"


def packed_check(
    name: str, function: str, argument: int, expected: Any, passes_before: bool
) -> str:
    check = CheckCall(
        name=name,
        module="pkg.m",
        function=function,
        arguments=(argument,),
        expected=expected,
        passes_before=passes_before,
    )
    return pack_check(check)


TASK = Task(
    id="t",
    prompt="double(3) should be 6.",
    answers=(
        pack_source("pkg/__init__.py", ""),
        pack_source("pkg/m.py", SOURCE),
        packed_check("a", "double", 3, 6, False),
        packed_check("b", "double", 977, 1954, False),
        packed_check("c", "double", 2, 4, True),
        packed_check("d", "half", 4, 2.0, True),
    ),
    env="repository",
    source="s",
    split="train",
)


def block(old: str, new: str, path: str = "pkg/m.py") -> str:
    return f"{path}\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE"


RIGHT = block("    return n + 2", "    return 2 * n")


def steps(box: Sandbox, *actions: str, task: Task = TASK, **options: Any) -> tuple[str, list[Step]]:
    """Return the text of `reset`, and the step of each action."""

    async def play_all() -> tuple[str, list[Step]]:
        env = RepositoryEnv(task, sandbox=box, **options)
        shown = env.reset(task)
        return shown, [await env.step(action) for action in actions]

    return asyncio.run(play_all())


def test_a_patch_is_scored_by_the_tests_that_failed_and_those_that_passed(box: Sandbox) -> None:
    shown, [right] = steps(box, RIGHT)
    assert shown.startswith("# Issue\ndouble(3) should be 6.\n\n# Files\n")
    assert SOURCE in shown
    assert "977" not in shown
    assert "1954" not in shown
    assert (right.reward, right.done) == (1.0, True)
    assert right.metrics == {
        "solved": 1.0,
        "fail_to_pass": 1.0,
        "pass_to_pass": 1.0,
        "applied": 1.0,
        "failed_patches": 0.0,
    }


FIRST_CASE_ONLY = block("    return n + 2", "    return 6 if n == 3 else n + 2")
BREAKS_HALF = block(
    "    return n + 2\n\n\ndef half(n):\n    return n / 2",
    "    return 2 * n\n\n\ndef half(n):\n    return n",
)
NO_PYTHON = block("def double(n):", "def double(n)")


@pytest.mark.parametrize(
    ("patch", "reward", "fail_to_pass", "pass_to_pass"),
    [
        (FIRST_CASE_ONLY, 0.75, 0.5, 1.0),
        (BREAKS_HALF, 0.75, 1.0, 0.5),
        (NO_PYTHON, 0.0, 0.0, 0.0),
    ],
)
def test_a_patch_that_repairs_a_part_is_rewarded_by_its_share_of_tests(
    patch: str, reward: float, fail_to_pass: float, pass_to_pass: float, box: Sandbox
) -> None:
    _, [step] = steps(box, patch, reward="rate")
    assert step.reward == reward
    assert step.metrics["solved"] == 0.0
    assert step.metrics["fail_to_pass"] == fail_to_pass
    assert step.metrics["pass_to_pass"] == pass_to_pass


def test_a_patch_cannot_say_that_tests_pass(box: Sandbox) -> None:
    """The patch does not know the expected values; printing or ending the process gains nothing."""
    tricks = (
        "import os; print('6', flush=True); os._exit(0)",
        "import builtins\nclass Yes:\n    def __eq__(self, other): return True\ndef double(n): return Yes()",
        "import sys; sys.exit(0)",
    )
    for trick in tricks:
        _, [step] = steps(box, block("def double(n):\n    return n + 2", trick), reward="rate")
        assert step.metrics["fail_to_pass"] == 0.0, trick


@pytest.mark.parametrize("path", [".", "pkg/m.py/x.py"])
def test_a_patch_of_an_impossible_path_does_not_apply(box: Sandbox, path: str) -> None:
    _, [step] = steps(box, f"{path}\n<<<<<<< SEARCH\n=======\nx\n>>>>>>> REPLACE")
    assert (step.metrics["applied"], step.metrics["failed_patches"]) == (0.0, 1.0)
    assert step.reward == 0.0


def test_a_patch_is_not_scored_if_the_machine_has_no_descriptors_left(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", fail)
    with pytest.raises(SandboxError, match=r"cannot make a file in memory .Too many open files"):
        steps(box, RIGHT)


def test_one_agent_may_try_again_after_a_patch_that_does_not_apply(box: Sandbox) -> None:
    make_env = partial(RepositoryEnv, sandbox=box, max_turns=3)
    replies = [block("nothing", "x"), "no idea", f"<think>so</think>{RIGHT}"]
    trajectory, prompts = play("single", ROLES, *replies, task=TASK, make_env=make_env)
    assert (trajectory.outcome, trajectory.metrics["solved"]) == (1.0, 1.0)
    assert trajectory.metrics["failed_patches"] == 2.0
    assert validity(trajectory) == [True, False, True]
    assert "from 'nothing' on, are not there" in prompts[1]
    assert "There is no patch" in prompts[2]
    assert [event.tool for event in trajectory.tools] == ["patch"] * 3


def test_an_observation_says_that_a_patch_applies_and_nothing_about_tests(box: Sandbox) -> None:
    make_env = partial(RepositoryEnv, sandbox=box, max_turns=2)
    wrong = block("    return n + 2", "    return 0")
    trajectory, prompts = play("single", ROLES, wrong, wrong, task=TASK, make_env=make_env)
    assert (trajectory.outcome, trajectory.status) == (0.0, Status.COMPLETED)
    _, observation, rest = prompts[1].partition("The patch applies.")
    assert observation
    assert rest.startswith("\n")
    assert "test" not in rest


def test_every_bug_of_the_generator_fails_half_of_its_tests() -> None:
    for family in FUNCTIONS_WITH_BUGS:
        correct = source_of(family.correct, family.correct)
        for name, bug in family.bugs.items():
            source = source_of(bug.function, family.correct)
            assert source.splitlines()[:2] == correct.splitlines()[:2]
            assert bug.complaint.endswith(".")
            checks = draw_checks(Random(name), family, "pkg.m", bug)
            assert sorted(check.passes_before for check in checks) == [False] * 3 + [True] * 3
            for check in checks:
                assert family.correct(*check.arguments) == check.expected
                assert (bug.function(*check.arguments) == check.expected) is check.passes_before


def test_the_repair_of_a_generated_bug_passes_its_tests(box: Sandbox) -> None:
    family = FUNCTIONS_WITH_BUGS[-1]
    name, bug = next(iter(family.bugs.items()))
    checks = draw_checks(Random(name), family, "pkg.m", bug)
    source = source_of(bug.function, family.correct)
    correct = source_of(family.correct, family.correct)
    answers = (pack_source("pkg/m.py", source), *map(pack_check, checks))
    task = Task(id="t", prompt="", answers=answers, env="repository", source="s", split="train")

    first_line = source.splitlines()[0]
    _, [unchanged] = steps(box, block(first_line, first_line), task=task)
    assert unchanged.metrics["fail_to_pass"] == 0.0
    assert unchanged.metrics["pass_to_pass"] == 1.0
    _, [fixed] = steps(box, block(source.rstrip(), correct.rstrip()), task=task)
    assert fixed.metrics["solved"] == 1.0


def test_generated_packages_are_a_function_of_the_seed_and_splits_share_no_bug() -> None:
    generate = GENERATORS["repositories"].tasks
    sizes = {"train": 40, "validation": 8, "test": 8}
    tasks = generate(1, sizes)
    assert tasks == generate(1, sizes)
    assert len({task.id for task in tasks}) == 56
    bugs: dict[str, set[str]] = {split: set() for split in sizes}
    for task in tasks:
        complaint = task.prompt.partition(".")[2].partition(" For example")[0]
        bugs[task.split].add(complaint.split(".")[-2])
        assert sum("source" in json.loads(answer) for answer in task.answers) == 3
    assert all(bugs.values())
    assert not bugs["train"] & bugs["test"]
    assert not bugs["train"] & bugs["validation"]


ROW = {
    "repo": "o/r",
    "instance_id": "o__r-1",
    "base_commit": "c",
    "problem_statement": "double is wrong.\n",
    "hints_text": "",
    "patch": "diff --git a/pkg/m.py b/pkg/m.py\n--- a/pkg/m.py\n+++ b/pkg/m.py\n"
    "@@ -1,2 +1,2 @@\n def double(n):\n-    return n + 2\n+    return 2 * n\n",
    "test_patch": "diff --git a/tests/test_m.py b/tests/test_m.py\n--- a/tests/test_m.py\n+++ b/tests/test_m.py\n"
    "@@ -1,5 +1,9 @@\n from pkg.m import double, half\n \n \n def test_half():\n     assert half(4) == 2\n"
    "+\n+\n+def test_double():\n+    assert double(5) == 10\n",
    "FAIL_TO_PASS": '["tests/test_m.py::test_double"]',
    "PASS_TO_PASS": '["tests/test_m.py::test_half"]',
    "version": "1",
}


TESTS = "from pkg.m import double, half\n\n\ndef test_half():\n    assert half(4) == 2\n"


def swe_task() -> Task:
    problem = FORMATS["swe_bench"].problem(ROW)
    assert problem is not None
    assert problem.name == "o__r-1"
    return Task(
        id="t",
        prompt=problem.prompt,
        answers=problem.answers,
        env="repository",
        source="s",
        split="test",
    )


@pytest.mark.slow
def test_a_row_of_swe_bench_is_tested_in_its_checkout_by_pytest(
    box: Sandbox, tmp_path: Path
) -> None:
    files = {
        "pkg/__init__.py": "",
        "pkg/m.py": SOURCE,
        "tests/test_m.py": TESTS,
        ".git/config": "secret",
    }
    for name, text in files.items():
        (tmp_path / "o__r-1" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "o__r-1" / name).write_text(text)
    (tmp_path / "o__r-1" / "logo.bin").write_bytes(b"\xff\xfe\x00")
    checkouts = str(tmp_path)
    shown, [right] = steps(box, RIGHT, task=swe_task(), checkouts=checkouts)
    assert "pkg/__init__.py\ntests/test_m.py\n\n## pkg/m.py\n" in shown
    assert "secret" not in shown
    assert "test_double" not in shown
    assert right.metrics["solved"] == 1.0
    assert (right.metrics["fail_to_pass"], right.metrics["pass_to_pass"]) == (1.0, 1.0)
    (tmp_path / "o__r-1/pytest.ini").write_text(NO_PLUGINS)  # for the other patches
    _, [same] = steps(
        box,
        block("    return n + 2", "    return n + 2"),
        task=swe_task(),
        checkouts=checkouts,
        reward="rate",
    )
    assert same.reward == 0.5
    assert (same.metrics["fail_to_pass"], same.metrics["pass_to_pass"]) == (0.0, 1.0)
    hidden = block("    assert half(4) == 2", "    pass", "tests/test_m.py")
    _, [meddled] = steps(box, hidden, task=swe_task(), checkouts=checkouts)
    # The tests are those of the checkout, whatever the patch has done to them.
    assert (meddled.metrics["pass_to_pass"], meddled.metrics["fail_to_pass"]) == (1.0, 0.0)
    with pytest.raises(EnvError, match=r"no such checkout; set env.options.checkouts"):
        steps(box, task=swe_task(), checkouts=str(tmp_path / "elsewhere"))


NAME = "    import atexit, os\n    name = os.environ['PYTEST_CURRENT_TEST'].split()[0]\n"
TO_ALL = "    for file in range(3, 20):\n        try:\n            os.write(file, f'\\nPASSED {name}\\n'.encode())\n"
TO_ALL += "        except OSError:\n            pass"
MARKED = (
    "    try:\n        mark = os.pread(0, 64, 0).decode()\n    except OSError:\n        mark = ''\n"
)
MARKED += "    os.write(1, f'\\n{mark} {name}\\n'.encode())"
# Bodies of `double` in a patch; its result stays wrong.
SPOOFS = {
    "prints that a test has passed": "    print('\\nPASSED', name)",
    "prints it at its end": "    atexit.register(print, '\\nPASSED', name)",
    "writes it to every file that is open": TO_ALL,
    "looks for the mark of results": MARKED,
}
FILES = {
    "has a conftest.py": (
        "conftest.py",
        "def pytest_runtest_logreport(report):\n    report.outcome = 'passed'\n",
    ),
    "has a pytest of its own": (
        "pytest.py",
        "def main(*_, **others):\n    print('PASSED tests/test_m.py::test_double')\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("spoof", [*SPOOFS, *FILES])
def test_a_patch_does_not_say_which_tests_pass(spoof: str, box: Sandbox, tmp_path: Path) -> None:
    files = {
        "pkg/__init__.py": "",
        "pkg/m.py": SOURCE,
        "tests/test_m.py": TESTS,
        "pytest.ini": NO_PLUGINS,
    }
    for name, text in files.items():
        (tmp_path / "o__r-1" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "o__r-1" / name).write_text(text)
    if spoof in FILES:
        name, content = FILES[spoof]
        patch = f"{name}\n<<<<<<< SEARCH\n=======\n{content}>>>>>>> REPLACE"
    else:
        patch = block("    return n + 2", f"{NAME}{SPOOFS[spoof]}\n    return n")
    _, [done] = steps(box, patch, task=swe_task(), checkouts=str(tmp_path))
    assert (done.metrics["applied"], done.metrics["fail_to_pass"]) == (1.0, 0.0)
    assert done.metrics["pass_to_pass"] == 1.0


def test_a_patch_of_tests_that_does_not_fit_the_checkout_is_an_error(
    box: Sandbox, tmp_path: Path
) -> None:
    (tmp_path / "o__r-1" / "pkg").mkdir(parents=True)
    (tmp_path / "o__r-1" / "pkg" / "m.py").write_text(SOURCE)
    with pytest.raises(
        EnvError, match=r"does not fit the checkout \(There is no file tests/test_m"
    ):
        steps(box, RIGHT, task=swe_task(), checkouts=str(tmp_path))


def test_rows_that_are_no_instances_are_refused() -> None:
    read = FORMATS["swe_bench"].problem
    assert read({**ROW, "FAIL_TO_PASS": []}) is None
    for wrong in ({"patch": "?"}, {"FAIL_TO_PASS": "[1]"}, {"PASS_TO_PASS": None}):
        with pytest.raises(BadRow, match="is not an instance of SWE-bench"):
            read({**ROW, **wrong})


def test_tasks_that_cannot_be_read_fail(box: Sandbox) -> None:
    for answers in (("?",), ('{"check": {}}',), (pack_source("a.py", ""),)):
        with pytest.raises(EnvError, match="task t"):
            task = Task(id="t", prompt="", answers=answers, env="", source="", split="test")
            steps(box, task=task)
    with pytest.raises(EnvError, match="before reset"):
        asyncio.run(RepositoryEnv(TASK, sandbox=box).step("x"))
