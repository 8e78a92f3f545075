"""Math teams that calculate, played by canned replies: who is asked, who is scored, who ran what."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from rollout.environments.fenced_programs import last_program
from rollout.environments.math import MathEnv
from rollout.records.trajectory import Group, Status, Trajectory
from rollout.rewards.turn_scores import local_team
from tests.support.canned import Canned
from tests.support.casts import SUM, grow, play, scores, speakers, validity
from tests.support.sandboxes import started

RIGHT, WRONG, NONE = "so \\boxed{7}", "so \\boxed{8}", "no idea"
OUTPUTS = {"seven": "3 and 4\n7\n", "box": "\\boxed{7.0}", "eight": "8", "silent": ""}
TOOL = {"tool_user": "tool_user", "reasoner": "reasoner"}
ENSEMBLE = {**TOOL, "judge": "judge"}
CHAT = {"solver": "chat_solver", "coder": "chat_coder", "verifier": "chat_verifier"}


def run(program: str) -> str:
    return f"<think>```python\nelse\n```</think>try\n```python\n{program}\n```\n"


def calculate(
    orchestra: str, roles: dict[str, str], *replies: str, **options: Any
) -> tuple[Trajectory, list[str]]:
    make_env = partial(MathEnv, sandbox=Canned(OUTPUTS))
    return play(orchestra, roles, *replies, make_env=make_env, **options)


def test_reason_tool_ends_when_both_agree() -> None:
    trajectory, _ = calculate("reason_tool", TOOL, run("box"), RIGHT)
    assert speakers(trajectory) == ["tool_user", "reasoner"]
    assert (trajectory.outcome, trajectory.answer, scores(trajectory)) == (1.0, "7", [1.0, 1.0])
    [event] = trajectory.tools
    assert (event.after_turn, event.tool, event.query, event.result) == (
        0,
        "python",
        "box\n",
        "\\boxed{7.0}",
    )
    rewarded = local_team(Group(task=SUM, trajectories=(trajectory,))).trajectories[0]
    assert [turn.reward for turn in rewarded.turns] == [
        2.0,
        2.0,
    ]  # Stronger-MAS: 1 + [reasoner right]; 2 [right]


def test_reason_tool_goes_on_with_both_histories_while_they_differ() -> None:
    trajectory, prompts = calculate(
        "reason_tool", TOOL, run("seven"), f"<think>x</think>{WRONG}", run("seven"), RIGHT
    )
    assert (trajectory.outcome, scores(trajectory)) == (1.0, [1.0, 0.0, 1.0, 1.0])
    assert [event.after_turn for event in trajectory.tools] == [0, 2]
    seen = "```python\nseven\n```\n3 and 4\n7\n\n[The reasoner]\nso \\boxed{8}\n"
    assert all(seen in prompt for prompt in prompts[2:])
    assert not any(seen in prompt or "warning" in prompt for prompt in prompts[:2])


@pytest.mark.parametrize(
    ("tool", "reasoner", "local", "valid"),
    [
        (run("eight"), RIGHT, [0.0, 1.0], [True, True]),
        (run("broken"), RIGHT, [-1.0, 1.0], [True, True]),
        (run("silent"), "\\boxed{[no output]}", [0.0, 0.0], [True, True]),
        (NONE, RIGHT, [-1.0, 1.0], [False, True]),
        (run("seven"), NONE, [1.0, 0.0], [True, False]),
        (NONE, NONE, [-1.0, 0.0], [False, False]),
    ],
    ids=["wrong", "fails", "prints nothing", "no program", "no box", "neither"],
)
def test_reason_tool_scores_and_disagreement(
    tool: str, reasoner: str, local: list[float], valid: list[bool]
) -> None:
    trajectory, _ = calculate("reason_tool", TOOL, tool, reasoner, tool, reasoner, max_turns=2)
    assert scores(trajectory) == local * 2
    assert validity(trajectory) == valid * 2
    assert trajectory.outcome == local[1]


def test_reason_tool_agreement_on_a_mistake_ends_it() -> None:
    assert calculate("reason_tool", TOOL, run("eight"), WRONG)[0].outcome == 0.0


def test_reason_tool_grows_as_a_tree_of_rounds() -> None:
    replies = {
        ("tool_user", 0, ""): run("broken"), ("reasoner", 1, ""): RIGHT,
        ("tool_user", 0, "1"): run("seven"), ("reasoner", 1, "1"): RIGHT,
    }  # fmt: skip
    trajectory = grow(
        "reason_tool",
        TOOL,
        replies,
        make_env=partial(MathEnv, sandbox=Canned(OUTPUTS)),
        max_turns=1,
    )
    assert (trajectory.status, trajectory.leaf) == (Status.COMPLETED, "1")
    assert {turn.node: turn.scores["branch"] for turn in trajectory.turns} == {
        "0": -1 + 1 + 1.0,
        "1": 1 + 1 + 1.0,
    }
    assert [(event.node, event.after_turn) for event in trajectory.tools] == [("0", 0), ("1", 0)]


def test_ensemble_shows_all_candidates_to_the_judge() -> None:
    trajectory, prompts = calculate(
        "ensemble_judge",
        ENSEMBLE,
        RIGHT,
        WRONG,
        run("seven"),
        run("eight"),
        "the first \\boxed{7}",
        tool_users=2,
    )
    assert speakers(trajectory) == ["reasoner", "reasoner", "tool_user", "tool_user", "judge"]
    assert (trajectory.outcome, scores(trajectory)) == (1.0, [1.0, 0.0, 1.0, 0.0, 1.0])
    for number, text in enumerate(
        [RIGHT, WRONG, "```python\nseven\n```\n3 and 4\n7", "```python\neight\n```\n8"], 1
    ):
        assert f"[Solution {number}]\n{text}\n" in prompts[4]
    assert [(event.after_turn, event.query) for event in trajectory.tools] == [
        (2, "seven\n"),
        (3, "eight\n"),
    ]
    assert len({turn.seed for turn in trajectory.turns}) == 5


def test_ensemble_with_malformed_replies() -> None:
    trajectory, prompts = calculate("ensemble_judge", ENSEMBLE, NONE, RIGHT, NONE, NONE)
    assert validity(trajectory) == [False, True, False, False]
    assert scores(trajectory) == [0.0, 1.0, -1.0, 0.0]
    assert f"[Solution 1]\n{NONE}\n" in prompts[3] and "There was no program." in prompts[3]
    assert (trajectory.outcome, trajectory.answer) == (0.0, "")


def test_mathchat_hands_everything_to_the_verifier() -> None:
    trajectory, prompts = calculate(
        "mathchat", CHAT, f"<think>x</think>{WRONG}", run("seven"), RIGHT
    )
    assert speakers(trajectory) == ["solver", "coder", "verifier"]
    assert (trajectory.outcome, trajectory.answer, scores(trajectory, "team")) == (
        1.0,
        "7",
        [1.0] * 3,
    )
    assert all(f"solution\n{WRONG}\n" in prompt for prompt in prompts[1:])
    assert "```python\nseven\n```\n3 and 4\n7\n" in prompts[2]
    assert [(event.after_turn, event.query) for event in trajectory.tools] == [(1, "seven\n")]


@pytest.mark.parametrize(
    ("first", "shown", "valid", "runs"),
    [(run("broken"), "NameError", True, 2), (NONE, "There was no program.", False, 1)],
    ids=["fails", "no program"],
)
def test_mathchat_asks_for_a_second_program(first: str, shown: str, valid: bool, runs: int) -> None:
    trajectory, prompts = calculate("mathchat", CHAT, WRONG, first, run("seven"), RIGHT)
    assert speakers(trajectory) == ["solver", "coder", "coder", "verifier"]
    assert validity(trajectory) == [True, valid, True, True]
    assert shown in prompts[2] and shown in prompts[3]
    assert len(trajectory.tools) == runs
    twice, _ = calculate("mathchat", CHAT, WRONG, first, first, NONE)
    assert (speakers(twice)[2:], twice.outcome) == (["coder", "verifier"], 0.0)


def test_mathchat_as_released_keeps_the_solution_from_the_verifier() -> None:
    _, prompts = calculate("mathchat", CHAT, WRONG, run("seven"), RIGHT, verifier_reads="programs")
    assert WRONG in prompts[1] and WRONG not in prompts[2]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx\n```", "x\n"),
        ("```python\n\n```", None),
        ("<think>```python\nx\n```</think>", None),
        ("x", None),
    ],
)
def test_program_is_the_last_fenced_block(text: str, program: str | None) -> None:
    assert last_program(text) == program


def test_programs_run_in_the_sandbox() -> None:
    sandbox = started("auto")
    try:
        make_env = partial(MathEnv, sandbox=sandbox)
        trajectory, _ = play("reason_tool", TOOL, run("print(3 + 4)"), RIGHT, make_env=make_env)
        assert (trajectory.outcome, scores(trajectory), trajectory.tools[0].result) == (
            1.0,
            [1.0, 1.0],
            "7",
        )
        replies = (WRONG, run("open('/etc/passwd')"), run("1"), RIGHT)
        trajectory, prompts = play("mathchat", CHAT, *replies, make_env=make_env)
        assert "Error" in prompts[2] and trajectory.outcome == 1.0
    finally:
        sandbox.close()
