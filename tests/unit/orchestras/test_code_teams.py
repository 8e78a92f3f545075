"""Orchestras `coder_tester` and `code_reflect` on scripted replies: agents, scores and prompts.

The problem is the addition of two numbers. Programs are names, and a canned sandbox knows their
outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from rollout.environments.code import CodeEnv, pack_solution, pack_test
from rollout.orchestras.replies import parse_cases, parse_pseudocode, parse_reflection
from rollout.records.trajectory import Group, Status, Task, Trajectory
from rollout.rewards.turn_scores import local_team, turn_difference
from rollout.sandbox.judge import CallTest, StdinTest, Test
from tests.support.canned import Canned
from tests.support.casts import grow, play, scores, speakers, validity
from tests.support.sandboxes import started

PAIR = {"coder": "coder", "tester": "tester"}
TRIO = {"planner": "code_planner", "coder": "code_writer", "reflector": "reflector"}
VISIBLE = StdinTest(stdin="1 2\n", expected="3\n")
HIDDEN = [StdinTest(stdin=f"{n} {n}\n", expected=f"{2 * n}\n") for n in (10, 20, 30, 40)]
SUMS = {"1 2": "3", "0 0": "0", "10 10": "20", "20 20": "40", "30 30": "60", "40 40": "80"}


def canned_outputs() -> dict[str | tuple[str, str], str]:
    """Return output by (program, input) of the programs `good`, `solution` and `half`.

    `good` and `solution` are right; `half` is right for first numbers up to 20 only.
    """
    outputs: dict[str | tuple[str, str], str] = {}
    for stdin, total in SUMS.items():
        first_number = int(stdin.split()[0])
        outputs["good", stdin] = total
        outputs["solution", stdin] = total
        outputs["half", stdin] = total if first_number <= 20 else "0"
    return outputs


def make_task(
    *, solution: str = "", hidden: Sequence[Test] = HIDDEN, visible: Sequence[Test] = (VISIBLE,)
) -> Task:
    answers = [pack_test(test, visible=True) for test in visible]
    answers += [pack_test(test, visible=False) for test in hidden]
    if solution:
        answers.append(pack_solution(solution))
    return Task(
        id="t", prompt="Add.", answers=tuple(answers), env="code", source="s", split="train"
    )


WITHOUT_SOLUTION = make_task()
WITH_SOLUTION = make_task(solution="solution")
MALFORMED = "no idea"


def code(program: str) -> str:
    """Return a coder's reply with a program."""
    return f"```python\n{program}\n```"


def cases(*pairs: tuple[str, str]) -> str:
    """Return a tester's reply with tests, each an input and an expected output."""
    tests = [
        f"<input>\n{stdin}\n</input>\n<output>{expected}</output>\n" for stdin, expected in pairs
    ]
    return "".join(tests)


def canned_env(task: Task) -> CodeEnv:
    return CodeEnv(task, sandbox=Canned(canned_outputs()), reward="rate")


def play_code(
    orchestra: str,
    roles: dict[str, str],
    *replies: str,
    task: Task = WITH_SOLUTION,
    **options: Any,
) -> tuple[Trajectory, list[str]]:
    """Play a task with canned programs; return trajectory and prompts."""
    return play(orchestra, roles, *replies, task=task, make_env=canned_env, **options)


def group_of(trajectory: Trajectory) -> Group:
    return Group(task=WITHOUT_SOLUTION, trajectories=(trajectory,))


def test_coder_tester_ends_when_the_program_passes_the_tests() -> None:
    trajectory, prompts = play_code(
        "coder_tester", PAIR, code("half"), cases(("1 2", "3"), ("0 0", "0"))
    )
    assert speakers(trajectory) == ["coder", "tester"]
    assert trajectory.outcome == 0.5  # `half` passes two of four hidden tests
    assert scores(trajectory) == [0.5, 1.0]
    assert all("Add." in prompt for prompt in prompts)
    assert code("half") not in prompts[1]
    rewarded = local_team(group_of(trajectory)).trajectories[0]
    # Stronger-MAS: 2 x pass rate for the coder, agreement + pass rate for the tester
    assert [turn.reward for turn in rewarded.turns] == [1.0, 1.5]


def test_coder_and_tester_both_read_the_mismatches() -> None:
    trajectory, prompts = play_code(
        "coder_tester",
        PAIR,
        code("half"),
        cases(("30 30", "60"), ("1 2", "3")),
        code("good"),
        cases(("30 30", "60"), ("0 0", "5"), ("bad", "0")),
        code("good"),
        cases(("20 20", "40")),
    )
    assert speakers(trajectory) == ["coder", "tester"] * 3
    assert scores(trajectory) == pytest.approx([0.5, 1.0, 1.0, 1 / 3, 1.0, 1.0])
    mismatch = "Test 1: wrong answer\nInput: 30 30\nExpected: 60\nOutput: 0\nTest 2: passed\n"
    assert all(f"{code('half')}\n{mismatch}" in prompt for prompt in prompts[2:4])
    assert all("Expected: 5\nOutput: 0" in prompt for prompt in prompts[4:6])
    assert not any("80" in prompt for prompt in prompts)  # a hidden test's output
    assert trajectory.outcome == 1.0
    assert trajectory.metrics["solved"] == 1.0
    assert [event.query.strip() for event in trajectory.tools] == ["half", "good", "good"]


@pytest.mark.parametrize(
    ("coder", "tester", "local", "valid", "missing"),
    [
        (MALFORMED, cases(("1 2", "3")), [-2.0, 1.0], [False, True], "program"),
        (code("good"), MALFORMED, [1.0, -2.0], [True, False], "test"),
        (MALFORMED, MALFORMED, [-2.0, -2.0], [False, False], "program"),
    ],
)
def test_malformed_replies_of_coder_and_tester(
    coder: str, tester: str, local: list[float], valid: list[bool], missing: str
) -> None:
    trajectory, prompts = play_code("coder_tester", PAIR, coder, tester, coder, tester, max_turns=2)
    assert scores(trajectory) == local * 2
    assert validity(trajectory) == valid * 2
    assert f"There was no {missing}." in prompts[2]
    assert trajectory.outcome == max(local[0], 0.0)
    assert trajectory.tools == ()


def test_tests_after_max_cases_are_ignored() -> None:
    replies = (code("half"), cases(("1 2", "3"), ("30 30", "7")))
    trajectory, _ = play_code("coder_tester", PAIR, *replies, max_cases=1)
    assert speakers(trajectory) == ["coder", "tester"]
    assert scores(trajectory) == [0.5, 1.0]


def test_the_tester_has_no_score_if_the_task_has_no_solution() -> None:
    replies = (code("good"), cases(("1 2", "3")))
    trajectory, _ = play_code("coder_tester", PAIR, *replies, task=WITHOUT_SOLUTION)
    assert scores(trajectory) == [1.0, None]
    rewarded = local_team(group_of(trajectory), missing_local="zero").trajectories[0]
    assert [turn.reward for turn in rewarded.turns] == [2.0, 1.0]


def test_coder_tester_grows_a_tree_of_rounds() -> None:
    tests = cases(("30 30", "60"))
    replies = {
        ("coder", 0, ""): code("half"), ("tester", 1, ""): MALFORMED,
        ("coder", 0, "1"): code("half"), ("tester", 1, "1"): tests,
        ("coder", 2, "1.0"): code("good"), ("tester", 3, "1.0"): tests,
        ("coder", 2, "1.1"): MALFORMED, ("tester", 3, "1.1"): tests,
    }  # fmt: skip
    trajectory = grow(
        "coder_tester", PAIR, replies, task=WITH_SOLUTION, make_env=canned_env, max_turns=2
    )
    assert (trajectory.status, trajectory.error) == (Status.COMPLETED, "")
    assert trajectory.leaf == "1.0"
    # scores of coder and tester, and the outcome of a branch that has ended
    assert {turn.node: turn.scores["branch"] for turn in trajectory.turns} == {
        "0": 0.5 - 2,
        "1": 0.5 + 1,
        "1.0": 1 + 1 + 1.0,
        "1.1": -2 + 1 + 0.0,
    }


PLAN = "<pseudocode>add them</pseudocode>"
WIDE_PLAN = "<pseudocode>add wide ones</pseudocode>"
ADVICE = "<reflection>mind large ones</reflection>"


def difference_rewards(trajectory: Trajectory) -> list[float | None]:
    """Return the rewards by differences of the coder's pass rates."""
    group = turn_difference(group_of(trajectory), metric="pass_rate", scored=["coder"])
    return [turn.reward for turn in group.trajectories[0].turns]


def test_code_reflect_ends_when_the_visible_tests_pass() -> None:
    trajectory, prompts = play_code("code_reflect", TRIO, f"well {PLAN}", code("half"))
    assert speakers(trajectory) == ["planner", "coder"]
    assert trajectory.outcome == 0.5
    assert scores(trajectory, "pass_rate") == [0.5, 0.5]
    assert "# The plan\nadd them\n" in prompts[1]
    assert "well" not in prompts[1]
    assert difference_rewards(trajectory) == [0.5, 0.5]


def test_code_reflect_plans_codes_and_reflects_until_the_program_is_right() -> None:
    task = make_task(solution="solution", visible=[StdinTest(stdin="30 30\n", expected="60\n")])
    trajectory, prompts = play_code(
        "code_reflect",
        TRIO,
        PLAN,
        code("broken"),
        ADVICE,
        WIDE_PLAN,
        code("half"),
        ADVICE,
        MALFORMED,
        code("good"),
        task=task,
    )
    assert speakers(trajectory) == ["planner", "coder", "reflector"] * 2 + ["planner", "coder"]
    assert trajectory.outcome == 1.0
    coder_turns = [turn for turn in trajectory.turns if turn.agent == "coder"]
    assert [turn.scores["pass_rate"] for turn in coder_turns] == [0.0, 0.5, 1.0]
    # A reflector is paid with the planner and the coder who follow it.
    assert difference_rewards(trajectory) == [0.0, 0.0, *[0.5 - 0.0] * 3, *[1.0 - 0.5] * 3]

    failure = "Test 1: failed\nInput: 30 30\nExpected: 60\nError: NameError\n"
    assert f"add them\n{code('broken')}\n{failure}" in prompts[2]
    assert "Error: NameError\n\nmind large ones\n" in prompts[3]
    assert "# The plan\nadd wide ones\n" in prompts[4]
    assert f"add wide ones\n{code('half')}\n" in prompts[6]
    assert "Output: 0\n\nmind large ones\n" in prompts[6]
    assert "# The plan\n\n" in prompts[7]
    assert not any("80" in prompt for prompt in prompts)  # a hidden test's output
    assert [event.tool for event in trajectory.tools] == ["run"] * 3


def test_code_reflect_with_malformed_replies() -> None:
    trajectory, prompts = play_code("code_reflect", TRIO, *[MALFORMED] * 5, max_turns=2)
    assert speakers(trajectory) == ["planner", "coder", "reflector", "planner", "coder"]
    assert validity(trajectory) == [False] * 5
    assert "# The plan\n\n" in prompts[1]
    assert "There was no program.\nTest 1: failed" in prompts[2]
    assert MALFORMED not in prompts[3]
    assert trajectory.outcome == 0.0
    assert trajectory.metrics["answered"] == 0.0
    assert difference_rewards(trajectory) == [0.0] * 5


def test_a_missing_program_passes_no_visible_tests_even_if_there_are_none() -> None:
    task = make_task(solution="solution", visible=())
    replies = (PLAN, MALFORMED, ADVICE, PLAN, code("good"))
    trajectory, _ = play_code("code_reflect", TRIO, *replies, task=task)
    assert speakers(trajectory) == ["planner", "coder", "reflector", "planner", "coder"]
    assert trajectory.outcome == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<input>1</input><output>2</output>", '[["1", "2"]]'),
        ("a <input>\n1\n2\n</input>\n<output>\n3\n</output> b", '[["1\\n2", "3"]]'),
        ("<think><input></think><input></input><output>0</output>", '[["", "0"]]'),
        ("<input>1</input>", None),
        ("<input>1</input><output>2</output><input>3</input>", None),
        ("<input>1</input> gives <output>2</output>", None),
        ("none", None),
    ],
)
def test_parse_cases(text: str, value: str | None) -> None:
    assert parse_cases(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [(PLAN, "add them"), (f"<think>{PLAN}</think>", None), ("<pseudocode></pseudocode>", None)],
)
def test_parse_pseudocode(text: str, value: str | None) -> None:
    assert parse_pseudocode(text) == value


@pytest.mark.parametrize(("text", "value"), [(ADVICE, "mind large ones"), (PLAN, None)])
def test_parse_reflection(text: str, value: str | None) -> None:
    assert parse_reflection(text) == value


@pytest.mark.parametrize(
    ("name", "roles", "replies"),
    [
        ("coder_tester", PAIR, (code("good"), cases(("1 2", "3")))),
        ("code_reflect", TRIO, (PLAN, code("good"))),
    ],
)
def test_an_environment_that_does_not_grade_programs_is_an_error(
    name: str, roles: dict[str, str], replies: tuple[str, ...]
) -> None:
    trajectory, _ = play(name, roles, *replies)
    assert trajectory.status is Status.FAILED
    expected = "EnvError: the environment does not grade programs; set env.name to code"
    assert trajectory.error == expected


@pytest.mark.slow
def test_functions_are_tested_in_the_sandbox() -> None:
    test = CallTest(function="add", arguments=(20, 22), accepted=(42,))
    right = "def add(a, b):\n    return a + b"
    wrong = "def add(a, b):\n    return 3"
    task = make_task(solution=right, hidden=[test], visible=())
    right_case = ("[1, 2]", "3")
    wrong_case = ("[1, 2]", "4")
    invalid_cases = [("1", "1"), ("one", "1")]  # no lists of arguments
    sandbox = started("auto")
    try:
        env = CodeEnv(task, sandbox=sandbox)
        assert asyncio.run(env.agreement([right_case, wrong_case, *invalid_cases])) == 0.25
        assert asyncio.run(env.agreement([])) == 0.0

        step = asyncio.run(env.check(wrong, [right_case, *invalid_cases]))
        assert step.observation == "Test 1: passed"
        assert step.metrics == {"check_rate": 1 / 3}
        step = asyncio.run(env.check(right, invalid_cases))
        assert step.observation == "None of the tests can be used."
        assert asyncio.run(env.preview(code(right))).metrics["runs"] == 0.0

        make_env = partial(CodeEnv, sandbox=sandbox, reward="rate")
        replies = (code(right), cases(right_case))
        trajectory, _ = play("coder_tester", PAIR, *replies, task=task, make_env=make_env)
        assert trajectory.outcome == 1.0
        assert scores(trajectory) == [1.0, 1.0]
    finally:
        sandbox.close()
