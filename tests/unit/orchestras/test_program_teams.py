"""Orchestras of math teams that run programs, on scripted replies."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from rollout.environments.fenced_programs import last_program
from rollout.environments.math import MathEnv
from rollout.records.trajectory import Group, Status, Task, Trajectory
from rollout.rewards.turn_scores import local_team
from tests.support.canned import Canned
from tests.support.casts import SUM, grow, play, scores, speakers, validity
from tests.support.sandboxes import started

RIGHT = "so \\boxed{7}"
WRONG = "so \\boxed{8}"
MALFORMED = "no idea"
# output by program; a program that is not listed fails
OUTPUTS: dict[str | tuple[str, str], str] = {
    "seven": "3 and 4\n7\n",
    "box": "\\boxed{7.0}",
    "eight": "8",
    "silent": "",
}
REASON_TOOL = {"tool_user": "tool_user", "reasoner": "reasoner"}
ENSEMBLE = {**REASON_TOOL, "judge": "judge"}
MATHCHAT = {"solver": "chat_solver", "coder": "chat_coder", "verifier": "chat_verifier"}


def code(program: str) -> str:
    """Return a reply with a program, and with another program in its thought."""
    return f"<think>```python\nelse\n```</think>try\n```python\n{program}\n```\n"


def canned_env(task: Task) -> MathEnv:
    return MathEnv(task, sandbox=Canned(OUTPUTS))


def play_canned(
    orchestra: str, roles: dict[str, str], *replies: str, **options: Any
) -> tuple[Trajectory, list[str]]:
    """Play SUM with canned programs; return trajectory and prompts."""
    return play(orchestra, roles, *replies, make_env=canned_env, **options)


def test_reason_tool_ends_when_both_agents_agree() -> None:
    trajectory, _ = play_canned("reason_tool", REASON_TOOL, code("box"), RIGHT)
    assert speakers(trajectory) == ["tool_user", "reasoner"]
    assert trajectory.outcome == 1.0
    assert trajectory.answer == "7"
    assert scores(trajectory) == [1.0, 1.0]
    [event] = trajectory.tools
    assert (event.after_turn, event.tool) == (0, "python")
    assert (event.query, event.result) == ("box\n", "\\boxed{7.0}")
    rewarded = local_team(Group(task=SUM, trajectories=(trajectory,))).trajectories[0]
    # Stronger-MAS: 1 + [reasoner right] for the tool user, 2 [right] for the reasoner
    assert [turn.reward for turn in rewarded.turns] == [2.0, 2.0]


def test_reason_tool_shows_both_agents_the_earlier_turns_while_they_disagree() -> None:
    trajectory, prompts = play_canned(
        "reason_tool", REASON_TOOL, code("seven"), f"<think>x</think>{WRONG}", code("seven"), RIGHT
    )
    assert trajectory.outcome == 1.0
    assert scores(trajectory) == [1.0, 0.0, 1.0, 1.0]
    assert [event.after_turn for event in trajectory.tools] == [0, 2]
    history = "```python\nseven\n```\n3 and 4\n7\n\n[The reasoner]\nso \\boxed{8}\n"
    assert not any(history in prompt for prompt in prompts[:2])
    assert all(history in prompt for prompt in prompts[2:])
    assert not any("warning" in prompt for prompt in prompts)  # on standard error


@pytest.mark.parametrize(
    ("tool_user", "reasoner", "local", "valid"),
    [
        (code("eight"), RIGHT, [0.0, 1.0], [True, True]),
        (code("broken"), RIGHT, [-1.0, 1.0], [True, True]),
        (code("silent"), "\\boxed{[no output]}", [0.0, 0.0], [True, True]),
        (MALFORMED, RIGHT, [-1.0, 1.0], [False, True]),
        (code("seven"), MALFORMED, [1.0, 0.0], [True, False]),
        (MALFORMED, MALFORMED, [-1.0, 0.0], [False, False]),
    ],
    ids=["wrong program", "failed program", "no output", "no program", "no box", "neither"],
)
def test_reason_tool_continues_without_agreement(
    tool_user: str, reasoner: str, local: list[float], valid: list[bool]
) -> None:
    replies = (tool_user, reasoner, tool_user, reasoner)
    trajectory, _ = play_canned("reason_tool", REASON_TOOL, *replies, max_turns=2)
    assert scores(trajectory) == local * 2
    assert validity(trajectory) == valid * 2
    assert trajectory.outcome == local[1]


def test_reason_tool_ends_when_both_agents_make_the_same_mistake() -> None:
    trajectory, _ = play_canned("reason_tool", REASON_TOOL, code("eight"), WRONG)
    assert trajectory.outcome == 0.0


def test_reason_tool_grows_a_tree_of_rounds() -> None:
    replies = {
        ("tool_user", 0, ""): code("broken"), ("reasoner", 1, ""): RIGHT,
        ("tool_user", 0, "1"): code("seven"), ("reasoner", 1, "1"): RIGHT,
    }  # fmt: skip
    trajectory = grow("reason_tool", REASON_TOOL, replies, make_env=canned_env, max_turns=1)
    assert trajectory.status is Status.COMPLETED
    assert trajectory.leaf == "1"
    # scores of tool user and reasoner, and the outcome
    branch_scores = {turn.node: turn.scores["branch"] for turn in trajectory.turns}
    assert branch_scores == {"0": -1 + 1 + 1.0, "1": 1 + 1 + 1.0}
    assert [(event.node, event.after_turn) for event in trajectory.tools] == [("0", 0), ("1", 0)]


def test_the_judge_of_an_ensemble_reads_all_candidates() -> None:
    trajectory, prompts = play_canned(
        "ensemble_judge",
        ENSEMBLE,
        RIGHT,
        WRONG,
        code("seven"),
        code("eight"),
        "the first \\boxed{7}",
        tool_users=2,
    )
    assert speakers(trajectory) == ["reasoner", "reasoner", "tool_user", "tool_user", "judge"]
    assert trajectory.outcome == 1.0
    assert scores(trajectory) == [1.0, 0.0, 1.0, 0.0, 1.0]
    programs = ["```python\nseven\n```\n3 and 4\n7", "```python\neight\n```\n8"]
    for number, candidate in enumerate([RIGHT, WRONG, *programs], start=1):
        assert f"[Solution {number}]\n{candidate}\n" in prompts[4]
    tool_calls = [(event.after_turn, event.query) for event in trajectory.tools]
    assert tool_calls == [(2, "seven\n"), (3, "eight\n")]
    assert len({turn.seed for turn in trajectory.turns}) == 5


def test_an_ensemble_with_malformed_replies() -> None:
    trajectory, prompts = play_canned(
        "ensemble_judge", ENSEMBLE, MALFORMED, RIGHT, MALFORMED, MALFORMED
    )
    assert validity(trajectory) == [False, True, False, False]
    assert scores(trajectory) == [0.0, 1.0, -1.0, 0.0]
    assert f"[Solution 1]\n{MALFORMED}\n" in prompts[3]
    assert "There was no program." in prompts[3]
    assert trajectory.outcome == 0.0
    assert trajectory.answer == ""


def test_the_verifier_of_mathchat_reads_the_solution_and_the_program() -> None:
    trajectory, prompts = play_canned(
        "mathchat", MATHCHAT, f"<think>x</think>{WRONG}", code("seven"), RIGHT
    )
    assert speakers(trajectory) == ["solver", "coder", "verifier"]
    assert trajectory.outcome == 1.0
    assert trajectory.answer == "7"
    assert scores(trajectory, "team") == [1.0] * 3
    assert all(f"solution\n{WRONG}\n" in prompt for prompt in prompts[1:])
    assert "```python\nseven\n```\n3 and 4\n7\n" in prompts[2]
    assert [(event.after_turn, event.query) for event in trajectory.tools] == [(1, "seven\n")]


@pytest.mark.parametrize(
    ("first_reply", "shown", "valid", "runs"),
    [(code("broken"), "NameError", True, 2), (MALFORMED, "There was no program.", False, 1)],
    ids=["failed program", "no program"],
)
def test_mathchat_asks_for_a_second_program(
    first_reply: str, shown: str, valid: bool, runs: int
) -> None:
    replies = (WRONG, first_reply, code("seven"), RIGHT)
    trajectory, prompts = play_canned("mathchat", MATHCHAT, *replies)
    assert speakers(trajectory) == ["solver", "coder", "coder", "verifier"]
    assert validity(trajectory) == [True, valid, True, True]
    assert all(shown in prompt for prompt in prompts[2:])
    assert len(trajectory.tools) == runs


@pytest.mark.parametrize("reply", [code("broken"), MALFORMED])
def test_mathchat_asks_for_no_third_program(reply: str) -> None:
    trajectory, _ = play_canned("mathchat", MATHCHAT, WRONG, reply, reply, MALFORMED)
    assert speakers(trajectory) == ["solver", "coder", "coder", "verifier"]
    assert trajectory.outcome == 0.0


def test_the_verifier_of_mathchat_may_read_the_programs_only() -> None:
    replies = (WRONG, code("seven"), RIGHT)
    _, prompts = play_canned("mathchat", MATHCHAT, *replies, verifier_reads="programs")
    assert WRONG in prompts[1]
    assert WRONG not in prompts[2]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx\n```", "x\n"),
        ("```python\n\n```", None),
        ("<think>```python\nx\n```</think>", None),
        ("x", None),
    ],
)
def test_a_program_is_the_last_fenced_block(text: str, program: str | None) -> None:
    assert last_program(text) == program


def test_programs_run_in_the_sandbox() -> None:
    sandbox = started("auto")
    try:
        make_env = partial(MathEnv, sandbox=sandbox)
        replies = (code("print(3 + 4)"), RIGHT)
        trajectory, _ = play("reason_tool", REASON_TOOL, *replies, make_env=make_env)
        assert trajectory.outcome == 1.0
        assert scores(trajectory) == [1.0, 1.0]
        assert trajectory.tools[0].result == "7"

        replies = (WRONG, code("open('/etc/passwd')"), code("1"), RIGHT)
        trajectory, prompts = play("mathchat", MATHCHAT, *replies, make_env=make_env)
        assert "Error" in prompts[2]
        assert trajectory.outcome == 1.0
    finally:
        sandbox.close()
