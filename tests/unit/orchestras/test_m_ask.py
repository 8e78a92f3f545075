"""M-ASK: every answer is measured, every round paid by what it added, and malformed replies fail closed."""

from __future__ import annotations

import pytest

from rollout.orchestras.replies import parse_change, parse_plan, parse_search, read_plan
from rollout.orchestras.search import changed_plan, shown_plan
from rollout.records.trajectory import Task, Trajectory
from tests.support.shipped import Library, play_shipped, seen

TASK = Task(
    id="t",
    prompt="Who?",
    answers=("Alice Walker Smith",),
    env="search",
    source="hops",
    split="train",
)
PLAN = "<plan>\nWhich book? | unknown\nWho wrote it? | Bob\n</plan>\n<answer>Bob</answer>"  # F1 0
EVIDENCE, UPDATE = "<evidence> By Alice. </evidence>", "<update> t2 | Alice </update>"
ALICE = "<answer>Alice</answer>"  # precision 1, recall 1/3: F1 1/2
WALKER = "<answer>Alice Walker</answer>"  # precision 1, recall 2/3: F1 4/5


def play(*replies: str, max_turns: int = 5) -> Trajectory:
    sections = {"env": {"style": "text", "top_k": 1}, "orchestra": {"max_turns": max_turns}}
    return play_shipped("m_ask", TASK, replies, sections=sections, retriever=Library())


def rewards(trajectory: Trajectory) -> list[float]:
    return [round(turn.reward or 0.0, 12) for turn in trajectory.turns]


def test_each_round_is_paid_by_what_it_added() -> None:
    trajectory = play(
        PLAN,
        *("<search> book </search>", EVIDENCE, UPDATE, ALICE),
        *(
            "<search> full name </search>",
            EVIDENCE,
            "<add> Her name? | Alice Walker </add>",
            WALKER,
        ),
        "That is certain. <end>",
    )
    cycle = ["searcher", "summariser", "updater", "answerer"]
    assert [turn.agent for turn in trajectory.turns] == ["planner", *cycle, *cycle, "searcher"]
    # f = 0, 1/2, 4/5: absolute for planner and answerer, differences between, 0 for the search that ends
    assert rewards(trajectory) == [0.0, 0.5, 0.5, 0.5, 0.5, 0.3, 0.3, 0.3, 0.8, 0.0]
    assert [trajectory.turns[i].scores["token_f1"] for i in (0, 4, 8)] == pytest.approx(
        [0, 0.5, 0.8]
    )
    assert "token_f1" not in trajectory.turns[1].scores
    assert trajectory.outcome == pytest.approx(0.8)
    assert trajectory.answer == "alice walker"
    assert (trajectory.metrics["searches"], trajectory.metrics["exact_match"]) == (2, 0.0)
    assert all(turn.valid for turn in trajectory.turns)


def test_what_everybody_is_told() -> None:
    trajectory = play(PLAN, "<search> book </search>", EVIDENCE, UPDATE, ALICE, "<end>")
    before = "t1: Which book? | unknown\nt2: Who wrote it? | Bob\n"
    after = "t1: Which book? | unknown\nt2: Who wrote it? | Alice\n"
    assert seen(trajectory, 0).startswith("# Question\nWho?\n")  # the planner sees the question
    for turn in range(1, 6):
        assert seen(trajectory, turn).startswith("# Question\nWho?\n\n# Plan")
        assert f"of them\n{before if turn < 4 else after}" in seen(trajectory, turn)
    assert "# Answer so far\nBob\n\n# Queries so far\n\n" in seen(trajectory, 1)
    assert 'a search for "book" found\n<information> book 1 </information>\n' in seen(trajectory, 2)
    assert 'a search for "book" brought\nBy Alice.\n' in seen(trajectory, 3)
    assert "# Answer so far\nBob\n" in seen(trajectory, 4)
    assert "# Answer so far\nAlice\n\n# Queries so far\nbook\n" in seen(trajectory, 5)


def test_the_last_turn_ends_with_an_answer() -> None:
    trajectory = play(PLAN, "<search> book </search>", EVIDENCE, UPDATE, WALKER, max_turns=1)
    assert rewards(trajectory) == [0.0, 0.8, 0.8, 0.8, 0.8]


def test_a_question_may_be_answered_without_a_search() -> None:
    trajectory = play(PLAN.replace("<answer>Bob", "<answer>Alice"), "<end>")
    assert rewards(trajectory) == [0.5, 0.0]
    assert trajectory.outcome == 0.5


def test_malformed_replies_fail_closed_and_cost() -> None:
    trajectory = play(
        "Bob, I think.", "<search> book </search>", "By Alice.", "t2 is Alice", "Alice", "<search>"
    )
    assert [turn.valid for turn in trajectory.turns] == [False, True, False, False, False, False]
    assert "of them\n\n\n# Answer so far\n\n\n" in seen(trajectory, 1)  # no plan, no answer
    assert "brought\nno useful information\n" in seen(trajectory, 3)
    assert "of them\n\n\n# Answer so far" in seen(trajectory, 4)
    assert rewards(trajectory) == [-1.0, 0.0, -1.0, -1.0, -1.0, -1.0]
    assert (trajectory.outcome, trajectory.answer) == (0.0, "")


def test_a_malformed_answer_loses_what_was_known() -> None:
    trajectory = play(
        PLAN.replace("<answer>Bob", "<answer>Alice"),
        "<search> x </search>",
        EVIDENCE,
        UPDATE,
        "?",
        "<end>",
    )
    assert rewards(trajectory) == [0.5, -0.5, -0.5, -0.5, -1.0, 0.0]


def test_a_plan_changes_by_one_step() -> None:
    plan = (("a?", "1"), ("b?", "2"))
    assert changed_plan(plan, "update|t2|3") == (("a?", "1"), ("b?", "3"))
    assert changed_plan(plan, "add|c?|4") == (*plan, ("c?", "4"))
    assert changed_plan(plan, "update|t3|4") == changed_plan(plan, None) == plan
    assert shown_plan(plan) == "t1: a? | 1\nt2: b? | 2\n"


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("<plan> a? | 1 </plan><answer>x</answer>", 1),
        ("<plan>" + "a? | 1\n" * 5 + "</plan><answer>x</answer>", 5),
        ("<plan>" + "a? | 1\n" * 6 + "</plan><answer>x</answer>", 0),
        ("<plan> a? | 1 </plan>", 0),
        ("<plan> a? </plan><answer>x</answer>", 0),
        ("<plan> a? | </plan><answer>x</answer>", 0),
        ("<plan> a? | 1 | 2 </plan><answer>x</answer>", 0),
        ("<plan> </plan><answer>x</answer>", 0),
    ],
)
def test_read_plan(text: str, steps: int) -> None:
    plan = read_plan(text)
    assert plan == (((("a?", "1"),) * steps, "x") if steps else None)
    assert parse_plan(text) == (text if steps else None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<search> a b </search>", "a b"),
        ("done <end>", "<end>"),
        ("<search> a </search> or <end>", None),
        ("<search> <b> </search>", None),
        ("<search></search>", None),
        ("end", None),
    ],
)
def test_parse_search(text: str, value: str | None) -> None:
    assert parse_search(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<update> t12 | x y </update>", "update|t12|x y"),
        ("<add> q? | x </add>", "add|q?|x"),
        ("<update> t1 | x </update><add> q? | x </add>", None),
        ("<update> 1 | x </update>", None),
        ("<update> t0 | x </update>", None),
        ("<update> t1 </update>", None),
        ("<add> q? | x\ny </add>", None),
        ("<add> q? | <b> </add>", None),
        ("t1 | x", None),
    ],
)
def test_parse_change(text: str, value: str | None) -> None:
    assert parse_change(text) == value
