"""Coding teams, played by canned replies on a problem of adding two numbers: who is asked, scored and shown what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rollout.environments.code import CodeEnv, pack_solution, pack_test
from rollout.environments.protocol import Env
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
# "good" adds, "half" only small numbers, "solution" is the task's own
SUMS = {"1 2": "3", "0 0": "0", "10 10": "20", "20 20": "40", "30 30": "60", "40 40": "80"}
OUTPUTS = {
    (program, given): out for program in ("good", "solution") for given, out in SUMS.items()
} | {("half", given): out if int(given[:2]) <= 20 else "0" for given, out in SUMS.items()}
NONE = "no idea"


def task(*extra: str, hidden: list[Test] = HIDDEN, visible: list[Test] | None = None) -> Task:  # type: ignore[assignment]
    shown = [VISIBLE] if visible is None else visible
    answers = [pack_test(t, visible=True) for t in shown] + [
        pack_test(t, visible=False) for t in hidden
    ]
    return Task(
        id="t", prompt="Add.", answers=(*answers, *extra), env="code", source="s", split="train"
    )


def code(program: str) -> str:
    return f"```python\n{program}\n```"


def written(*cases: tuple[str, str]) -> str:
    return "".join(
        f"<input>\n{given}\n</input>\n<output>{expected}</output>\n" for given, expected in cases
    )


def run(
    orchestra: str, roles: dict[str, str], *replies: str, of: Task | None = None, **options: Any
) -> Any:
    sandbox = Canned(OUTPUTS)  # type: ignore[arg-type]
    make_env: Callable[[Task], Env] = partial(CodeEnv, sandbox=sandbox, reward="rate")
    return play(
        orchestra,
        roles,
        *replies,
        task=of or task(pack_solution("solution")),
        make_env=make_env,
        **options,
    )


def test_coder_and_tester_end_when_the_program_passes_the_tests() -> None:
    trajectory, prompts = run(
        "coder_tester", PAIR, code("half"), written(("1 2", "3"), ("0 0", "0"))
    )
    assert speakers(trajectory) == ["coder", "tester"]
    assert trajectory.outcome == 0.5  # half passes 10 and 20 of the hidden ones
    assert scores(trajectory) == [0.5, 1.0]
    assert "Add." in prompts[0] and "Add." in prompts[1] and code("half") not in prompts[1]
    rewarded = local_team(Group(task=task(), trajectories=(trajectory,))).trajectories[0]
    assert [turn.reward for turn in rewarded.turns] == [
        1.0,
        1.5,
    ]  # Stronger-MAS: 2 x ratio; agreement + ratio


def test_coder_and_tester_both_see_the_mismatches() -> None:
    trajectory, prompts = run(
        "coder_tester",
        PAIR,
        *(code("half"), written(("30 30", "60"), ("1 2", "3"))),
        *(code("good"), written(("30 30", "60"), ("0 0", "5"), ("bad", "0"))),
        *(code("good"), written(("20 20", "40"))),
    )
    assert speakers(trajectory) == ["coder", "tester"] * 3
    assert scores(trajectory) == pytest.approx([0.5, 1.0, 1.0, 1 / 3, 1.0, 1.0])
    mismatch = "Test 1: wrong answer\nInput: 30 30\nExpected: 60\nOutput: 0\nTest 2: passed\n"
    assert all(f"{code('half')}\n{mismatch}" in prompt for prompt in prompts[2:4])
    assert all("Expected: 5\nOutput: 0" in prompt for prompt in prompts[4:6])
    assert not any(str(80) in prompt for prompt in prompts)  # only hidden tests say so
    assert (trajectory.outcome, trajectory.metrics["solved"]) == (1.0, 1.0)
    assert [event.query.strip() for event in trajectory.tools] == ["half", "good", "good"]


@pytest.mark.parametrize(
    ("coder", "tester", "local", "valid", "missing"),
    [
        (NONE, written(("1 2", "3")), [-2.0, 1.0], [False, True], "program"),
        (code("good"), NONE, [1.0, -2.0], [True, False], "test"),
        (NONE, NONE, [-2.0, -2.0], [False, False], "program"),
    ],
)
def test_malformed_replies_of_coder_and_tester(
    coder: str, tester: str, local: list[float], valid: list[bool], missing: str
) -> None:
    trajectory, prompts = run("coder_tester", PAIR, coder, tester, coder, tester, max_turns=2)
    assert (scores(trajectory), validity(trajectory)) == (local * 2, valid * 2)
    assert f"There was no {missing}." in prompts[2]
    assert trajectory.outcome == max(local[0], 0.0)
    assert trajectory.tools == ()


def test_tests_beyond_the_limit_do_not_count() -> None:
    replies = (code("half"), written(("1 2", "3"), ("30 30", "7")))
    trajectory, _ = run("coder_tester", PAIR, *replies, max_cases=1)
    assert (len(trajectory.turns), scores(trajectory)) == (2, [0.5, 1.0])


def test_a_tester_is_not_scored_where_the_task_has_no_solution() -> None:
    trajectory, _ = run("coder_tester", PAIR, code("good"), written(("1 2", "3")), of=task())
    assert scores(trajectory) == [1.0, None]
    rewarded = local_team(
        Group(task=task(), trajectories=(trajectory,)), missing_local="zero"
    ).trajectories[0]
    assert [turn.reward for turn in rewarded.turns] == [2.0, 1.0]


def test_coder_and_tester_grow_as_a_tree_of_rounds() -> None:
    cases = written(("30 30", "60"))
    replies = {
        ("coder", 0, ""): code("half"), ("tester", 1, ""): NONE,
        ("coder", 0, "1"): code("half"), ("tester", 1, "1"): cases,
        ("coder", 2, "1.0"): code("good"), ("tester", 3, "1.0"): cases,
        ("coder", 2, "1.1"): NONE, ("tester", 3, "1.1"): cases,
    }  # fmt: skip
    make_env = partial(CodeEnv, sandbox=Canned(OUTPUTS), reward="rate")  # type: ignore[arg-type]
    of = task(pack_solution("solution"))
    trajectory = grow("coder_tester", PAIR, replies, task=of, make_env=make_env, max_turns=2)
    assert (trajectory.status, trajectory.error, trajectory.leaf) == (Status.COMPLETED, "", "1.0")
    branches = {turn.node: turn.scores["branch"] for turn in trajectory.turns}
    assert branches == {"0": 0.5 - 2, "1": 0.5 + 1, "1.0": 1 + 1 + 1.0, "1.1": -2 + 1 + 0.0}


PLAN, ADVICE = "<pseudocode>add them</pseudocode>", "<reflection>mind large ones</reflection>"


def differences(trajectory: Trajectory) -> list[float | None]:
    group = Group(task=task(), trajectories=(trajectory,))
    [rewarded] = turn_difference(group, metric="pass_rate", scored=["coder"]).trajectories
    return [turn.reward for turn in rewarded.turns]


def test_code_reflect_ends_when_the_visible_tests_pass() -> None:
    trajectory, prompts = run("code_reflect", TRIO, f"well {PLAN}", code("half"))
    assert speakers(trajectory) == ["planner", "coder"]
    assert (trajectory.outcome, scores(trajectory, "pass_rate")) == (0.5, [0.5, 0.5])
    assert "# The plan\nadd them\n" in prompts[1] and "well" not in prompts[1]
    assert differences(trajectory) == [0.5, 0.5]


def test_in_every_turn_of_code_reflect_the_planner_speaks_first_and_everybody_gets_the_difference() -> (
    None
):
    hard = task(visible=[StdinTest(stdin="30 30\n", expected="60\n")])
    mend = "<pseudocode>add wide ones</pseudocode>"
    replies = (PLAN, code("broken"), ADVICE, mend, code("half"), ADVICE, NONE, code("good"))
    trajectory, prompts = run("code_reflect", TRIO, *replies, of=hard)
    assert speakers(trajectory) == ["planner", "coder", "reflector"] * 2 + ["planner", "coder"]
    assert trajectory.outcome == 1.0
    assert [turn.scores["pass_rate"] for turn in trajectory.turns if turn.agent == "coder"] == [
        0.0,
        0.5,
        1.0,
    ]
    # R_0; then R_1 - R_0 to the reflector before and to planner and coder; then R_2 - R_1 likewise
    assert differences(trajectory) == [0.0, 0.0, *[0.5 - 0.0] * 3, *[1.0 - 0.5] * 3]
    assert (
        f"add them\n{code('broken')}\nTest 1: failed\nInput: 30 30\nExpected: 60\nError: NameError\n"
        in prompts[2]
    )
    assert "Error: NameError\n\nmind large ones\n" in prompts[3]
    assert "# The plan\nadd wide ones\n" in prompts[4] and "# The plan\n\n" in prompts[7]
    assert (
        f"add wide ones\n{code('half')}\n" in prompts[6]
        and "Output: 0\n\nmind large ones\n" in prompts[6]
    )
    assert not any(str(80) in prompt for prompt in prompts)
    assert [event.tool for event in trajectory.tools] == ["run"] * 3


def test_code_reflect_with_malformed_replies() -> None:
    trajectory, prompts = run("code_reflect", TRIO, NONE, NONE, NONE, NONE, NONE, max_turns=2)
    assert speakers(trajectory) == ["planner", "coder", "reflector", "planner", "coder"]
    assert validity(trajectory) == [False] * 5
    assert "# The plan\n\n" in prompts[1]
    assert "There was no program.\nTest 1: failed" in prompts[2] and NONE not in prompts[3]
    assert (trajectory.outcome, trajectory.metrics["answered"]) == (0.0, 0.0)
    assert differences(trajectory) == [0.0] * 5


def test_an_empty_program_never_ends_the_reflection() -> None:
    blind = task(visible=[])
    trajectory, _ = run("code_reflect", TRIO, PLAN, NONE, ADVICE, PLAN, code("good"), of=blind)
    assert speakers(trajectory) == ["planner", "coder", "reflector", "planner", "coder"]
    assert trajectory.outcome == 1.0


@pytest.mark.parametrize(
    ("text", "cases"),
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
def test_cases_are_pairs_of_tags(text: str, cases: str | None) -> None:
    assert parse_cases(text) == cases


def test_plan_and_reflection_are_tags() -> None:
    assert [parse_pseudocode(text) for text in (PLAN, f"<think>{PLAN}</think>", "<pseudocode></pseudocode>")] == [
        "add them", None, None,
    ]  # fmt: skip
    assert [parse_reflection(text) for text in (ADVICE, PLAN)] == ["mind large ones", None]


@pytest.mark.parametrize(
    ("name", "roles", "replies"),
    [
        ("coder_tester", PAIR, (code("good"), written(("1 2", "3")))),
        ("code_reflect", TRIO, (PLAN, code("good"))),
    ],
)
def test_a_world_without_programs_is_an_error(
    name: str, roles: dict[str, str], replies: tuple[str, ...]
) -> None:
    trajectory, _ = play(name, roles, *replies)
    assert trajectory.status is Status.FAILED
    assert trajectory.error == "EnvError: the environment grades no programs; name code in env"


@pytest.mark.slow
def test_tests_of_functions_in_the_sandbox() -> None:
    call = CallTest(function="add", arguments=(20, 22), accepted=(42,))
    solved = "def add(a, b):\n    return a + b"
    of = task(pack_solution(solved), hidden=[call], visible=[])
    sandbox = started("auto")
    try:
        env = CodeEnv(of, sandbox=sandbox)
        cases = [("[1, 2]", "3"), ("[1, 2]", "4"), ("1", "1"), ("one", "1")]
        assert asyncio.run(env.agreement(cases)) == 0.25
        assert asyncio.run(env.agreement([])) == 0.0
        step = asyncio.run(env.check("def add(a, b):\n    return 3", cases[:1] + cases[2:]))
        assert (step.observation, step.metrics) == ("Test 1: passed", {"check_rate": 1 / 3})
        assert (
            asyncio.run(env.check(solved, cases[2:])).observation
            == "None of the tests can be used."
        )
        assert asyncio.run(env.preview(code(solved))).metrics["runs"] == 0.0
        make_env = partial(CodeEnv, sandbox=sandbox, reward="rate")
        trajectory, _ = play(
            "coder_tester", PAIR, code(solved), written(("[1, 2]", "3")), task=of, make_env=make_env
        )
        assert (trajectory.outcome, scores(trajectory)) == (1.0, [1.0, 1.0])
    finally:
        sandbox.close()
