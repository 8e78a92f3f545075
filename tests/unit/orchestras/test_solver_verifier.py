"""Orchestra `solver_verifier` on scripted replies, through the real team and environment."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from rollout.engines import EngineClient
from rollout.environments import ENVS
from rollout.orchestras.replies import parse_approval, parse_boxed
from rollout.orchestras.sequential import solver_verifier, solver_verifier_slots
from rollout.records.trajectory import Sampling, Status, Trajectory
from rollout.teams.roles import ROLES, Agent
from rollout.teams.team import Team
from tests.support.casts import SUM, speakers, validity
from tests.support.play import Bytes, collect
from tests.support.scripted_engine import ScriptedEngine

RIGHT = "so \\boxed{7}"
WRONG = "so \\boxed{8}"
MALFORMED = "no idea"
APPROVE = "<verify>approve</verify>"
REJECT = "<verify>reject</verify>"


def play(*replies: str, max_tokens: int = 99, **options: Any) -> tuple[Trajectory, list[str]]:
    """Play one trajectory with the shipped prompts; return it with the prompts of its turns."""
    engine = ScriptedEngine(lambda prompt, call: (*replies[call].encode(), 0))
    sampling = Sampling(max_tokens=max_tokens)
    agents = {
        name: Agent(name=name, role=ROLES[name], policy="p", sampling=sampling)
        for name in ("solver", "verifier")
    }
    team = Team(agents, {"p": EngineClient(engine=engine, renderer=Bytes())})  # type: ignore[arg-type]
    orchestra = partial(solver_verifier, **options)
    [group] = asyncio.run(
        collect([SUM], team, ENVS["math"], orchestra, group_size=1, seed=0, step=0)
    )
    return group.trajectories[0], [bytes(prompt).decode() for prompt, _ in engine.calls]


def test_an_approved_solution_ends_the_task() -> None:
    trajectory, _ = play(RIGHT, APPROVE)
    assert speakers(trajectory) == ["solver", "verifier"]
    assert trajectory.status is Status.COMPLETED
    assert trajectory.outcome == 1.0
    assert trajectory.answer == "7"


def test_an_approved_mistake_is_wrong() -> None:
    trajectory, _ = play(WRONG, APPROVE)
    assert trajectory.outcome == 0.0


def test_after_a_rejection_the_solver_tries_once_more_without_a_verdict() -> None:
    trajectory, prompts = play(WRONG, REJECT, RIGHT)
    assert speakers(trajectory) == ["solver", "verifier", "solver"]
    assert trajectory.outcome == 1.0
    assert f"[solver]\n{WRONG}\n\n[verifier]\n{REJECT}\n\n" in prompts[2]


def test_the_first_prompt_has_no_context_and_the_verifier_reads_the_solution() -> None:
    _, prompts = play(RIGHT, APPROVE)
    assert SUM.prompt in prompts[0]
    assert "[solver]" not in prompts[0]
    assert f"[solver]\n{RIGHT}\n\n" in prompts[1]


def test_the_last_attempt_counts_even_if_an_earlier_one_was_right() -> None:
    trajectory, _ = play(RIGHT, REJECT, WRONG)
    assert trajectory.outcome == 0.0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["solver", "verifier", "solver"]),
        ({"malformed_verdict": "approve"}, ["solver", "verifier"]),
    ],
)
def test_a_malformed_verdict_rejects_unless_the_option_says_approve(
    options: dict[str, str], expected: list[str]
) -> None:
    trajectory, _ = play(WRONG, "looks fine", RIGHT, **options)
    assert speakers(trajectory) == expected
    assert trajectory.turns[1].valid is False


def test_a_verdict_that_is_cut_at_the_length_limit_is_malformed() -> None:
    trajectory, _ = play(RIGHT, APPROVE + "." * 80, RIGHT, max_tokens=60)
    assert trajectory.turns[1].finish_reason == "length"
    assert speakers(trajectory) == ["solver", "verifier", "solver"]


def test_the_verifier_is_not_asked_with_a_single_attempt() -> None:
    trajectory, _ = play(WRONG, max_loops=1)
    assert speakers(trajectory) == ["solver"]


def test_max_loops_is_the_number_of_attempts() -> None:
    trajectory, _ = play(WRONG, REJECT, WRONG, REJECT, RIGHT, max_loops=3)
    assert speakers(trajectory) == ["solver", "verifier", "solver", "verifier", "solver"]
    assert trajectory.outcome == 1.0


def test_a_solution_without_a_box_is_malformed_and_scores_zero() -> None:
    trajectory, _ = play(MALFORMED, APPROVE)
    assert validity(trajectory) == [False, True]
    assert trajectory.outcome == 0.0
    assert trajectory.metrics == {"answered": 0.0}


@pytest.mark.parametrize(
    ("replies", "scores"),
    [
        ((RIGHT, APPROVE), [1.0, 1.0]),
        ((WRONG, APPROVE), [0.0, 0.0]),
        ((WRONG, REJECT, RIGHT), [0.0, 1.0, 1.0]),
        ((RIGHT, REJECT, WRONG), [1.0, 0.0, 0.0]),
        ((WRONG, MALFORMED, MALFORMED), [0.0, 0.0, 0.0]),
    ],
)
def test_local_scores_are_those_of_answers_and_verdicts(
    replies: tuple[str, ...], scores: list[float]
) -> None:
    trajectory, _ = play(*replies, local_scores=True)
    assert [turn.scores["local"] for turn in trajectory.turns] == scores


def test_without_the_option_no_reply_has_a_local_score() -> None:
    trajectory, _ = play(RIGHT, APPROVE)
    assert ["local" in turn.scores for turn in trajectory.turns] == [False, False]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("fine. <verify>approve</verify>", "approve"),
        ("<verify> reject </verify>", "reject"),
        ("<verify>maybe</verify>", None),
        ("approve", None),
        ("<verify>approve", None),
        ("<verify>approve</verify><verify>approve</verify>", None),
        ("<verify>approve</verify> no: <verify>reject</verify>", None),
        ("<verify><verify>approve</verify>", None),
        ("", None),
    ],
)
def test_parse_approval_needs_exactly_one_tag(text: str, verdict: str | None) -> None:
    assert parse_approval(text) == verdict


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\\boxed{1} \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{}", None),
        ("2", None),
    ],
)
def test_parse_boxed_reads_the_last_box(text: str, value: str | None) -> None:
    assert parse_boxed(text) == value


def test_braces_in_replies_are_no_slots_of_the_template() -> None:
    replies = [("solver", "\\boxed{7}"), ("verifier", REJECT), ("solver", "{problem}")]
    filled = solver_verifier_slots("p", replies)
    assert filled["solution"] == "{problem}"
    content = ROLES["solver"].messages(**filled)[-1].content
    assert "[solver]\n\\boxed{7}\n\n[verifier]\n" in content
    assert "[solver]\n{problem}\n\n" in content
    assert content.endswith("within \\boxed{}.")
