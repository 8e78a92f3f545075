"""Orchestra `m_ask`: rewards of each round, prompts, malformed replies, and changes of the plan."""

from __future__ import annotations

import pytest

from rollout.orchestras.m_ask import change_plan, format_plan
from rollout.orchestras.replies import PlanStep, parse_change, parse_plan, parse_search, read_plan
from rollout.records.trajectory import Task, Trajectory
from tests.support.casts import speakers, validity
from tests.support.shipped import Library, last_message, play_shipped

TASK = Task(
    id="t",
    prompt="Who?",
    answers=("Alice Walker Smith",),
    env="search",
    source="hops",
    split="train",
)
PLAN = "<plan>\nWhich book? | unknown\nWho wrote it? | Bob\n</plan>\n<answer>Bob</answer>"  # F1 0
PLAN_WITH_ALICE = PLAN.replace("<answer>Bob", "<answer>Alice")
SEARCH = "<search> book </search>"
EVIDENCE = "<evidence> By Alice. </evidence>"
UPDATE = "<update> t2 | Alice </update>"
ADDITION = "<add> Her name? | Alice Walker </add>"
ALICE = "<answer>Alice</answer>"  # precision 1, recall 1/3: F1 1/2
WALKER = "<answer>Alice Walker</answer>"  # precision 1, recall 2/3: F1 4/5
END = "That is certain. <end>"


def play(*replies: str, max_turns: int = 5) -> Trajectory:
    """Play the shipped team, with one passage for each query."""
    sections = {"env": {"style": "text", "top_k": 1}, "orchestra": {"max_turns": max_turns}}
    return play_shipped("m_ask", TASK, replies, sections=sections, retriever=Library())


def rewards(trajectory: Trajectory) -> list[float]:
    """Return the reward of every turn without rounding errors."""
    return [round(turn.reward or 0.0, 12) for turn in trajectory.turns]


def test_each_round_is_paid_the_difference_that_it_made() -> None:
    first_round = [SEARCH, EVIDENCE, UPDATE, ALICE]
    second_round = ["<search> full name </search>", EVIDENCE, ADDITION, WALKER]
    trajectory = play(PLAN, *first_round, *second_round, END)

    round_agents = ["searcher", "summariser", "updater", "answerer"]
    assert speakers(trajectory) == ["planner", *round_agents, *round_agents, "searcher"]
    assert all(validity(trajectory))
    # The F1 scores are 0, 1/2 and 4/5. Planner and answerer get the scores, the agents of a round
    # the differences, and the last search nothing.
    assert rewards(trajectory) == [0.0, 0.5, 0.5, 0.5, 0.5, 0.3, 0.3, 0.3, 0.8, 0.0]
    measured = [trajectory.turns[index].scores["token_f1"] for index in (0, 4, 8)]
    assert measured == pytest.approx([0, 0.5, 0.8])
    assert "token_f1" not in trajectory.turns[1].scores
    assert trajectory.outcome == pytest.approx(0.8)
    assert trajectory.answer == "alice walker"
    assert trajectory.metrics["searches"] == 2
    assert trajectory.metrics["exact_match"] == 0.0


def test_prompts_show_the_plan_the_answer_and_the_queries() -> None:
    trajectory = play(PLAN, SEARCH, EVIDENCE, UPDATE, ALICE, "<end>")
    prompts = [last_message(trajectory, index) for index in range(6)]
    first_plan = "t1: Which book? | unknown\nt2: Who wrote it? | Bob\n"
    updated_plan = "t1: Which book? | unknown\nt2: Who wrote it? | Alice\n"

    assert prompts[0].startswith("# Question\nWho?\n")
    assert all(prompt.startswith("# Question\nWho?\n\n# Plan") for prompt in prompts[1:])
    assert all(f"of them\n{first_plan}" in prompt for prompt in prompts[1:4])
    assert all(f"of them\n{updated_plan}" in prompt for prompt in prompts[4:])
    assert "# Answer so far\nBob\n\n# Queries so far\n\n" in prompts[1]
    assert 'a search for "book" found\n<information> book 1 </information>\n' in prompts[2]
    assert 'a search for "book" brought\nBy Alice.\n' in prompts[3]
    assert "# Answer so far\nBob\n" in prompts[4]
    assert "# Answer so far\nAlice\n\n# Queries so far\nbook\n" in prompts[5]


def test_the_last_round_ends_with_an_answer() -> None:
    trajectory = play(PLAN, SEARCH, EVIDENCE, UPDATE, WALKER, max_turns=1)
    assert rewards(trajectory) == [0.0, 0.8, 0.8, 0.8, 0.8]


def test_the_answer_of_the_plan_is_final_without_a_search() -> None:
    trajectory = play(PLAN_WITH_ALICE, "<end>")
    assert rewards(trajectory) == [0.5, 0.0]
    assert trajectory.outcome == 0.5


def test_malformed_replies_add_nothing_and_are_penalized() -> None:
    trajectory = play("Bob, I think.", SEARCH, "By Alice.", "t2 is Alice", "Alice", "<search>")
    assert validity(trajectory) == [False, True, False, False, False, False]
    assert "of them\n\n\n# Answer so far\n\n\n" in last_message(trajectory, 1)  # no plan, no answer
    assert "brought\nno useful information\n" in last_message(trajectory, 3)
    assert "of them\n\n\n# Answer so far" in last_message(trajectory, 4)
    assert rewards(trajectory) == [-1.0, 0.0, -1.0, -1.0, -1.0, -1.0]
    assert trajectory.outcome == 0.0
    assert trajectory.answer == ""


def test_a_malformed_answer_replaces_the_answer_before() -> None:
    trajectory = play(PLAN_WITH_ALICE, SEARCH, EVIDENCE, UPDATE, "?", "<end>")
    assert rewards(trajectory) == [0.5, -0.5, -0.5, -0.5, -1.0, 0.0]


FIRST_STEP = PlanStep(question="a?", answer="1")


def test_a_change_updates_or_adds_one_step() -> None:
    plan = (FIRST_STEP, PlanStep(question="b?", answer="2"))
    updated = (FIRST_STEP, PlanStep(question="b?", answer="3"))
    assert change_plan(plan, "update|t2|3") == updated
    assert change_plan(plan, "add|c?|4") == (*plan, PlanStep(question="c?", answer="4"))
    assert change_plan(plan, "update|t3|4") == plan
    assert change_plan(plan, None) == plan


def test_a_plan_is_shown_with_a_line_for_each_step() -> None:
    plan = (FIRST_STEP, PlanStep(question="b?", answer="2"))
    assert format_plan(plan) == "t1: a? | 1\nt2: b? | 2\n"


@pytest.mark.parametrize("steps", [1, 5])
def test_a_plan_has_one_to_five_steps_and_an_answer(steps: int) -> None:
    text = "<plan>" + "a? | 1\n" * steps + "</plan><answer>x</answer>"
    assert read_plan(text) == ((FIRST_STEP,) * steps, "x")
    assert parse_plan(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "<plan>" + "a? | 1\n" * 6 + "</plan><answer>x</answer>",
        "<plan> a? | 1 </plan>",
        "<plan> a? </plan><answer>x</answer>",
        "<plan> a? | </plan><answer>x</answer>",
        "<plan> a? | 1 | 2 </plan><answer>x</answer>",
        "<plan> </plan><answer>x</answer>",
    ],
)
def test_other_plans_are_malformed(text: str) -> None:
    assert read_plan(text) is None
    assert parse_plan(text) is None


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
