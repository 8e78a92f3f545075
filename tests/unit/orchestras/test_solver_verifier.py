"""The math team, played by canned replies through the real team, environment and collector."""

import asyncio
from functools import partial

import pytest

from rollout.engines import EngineClient
from rollout.environments import ENVS
from rollout.orchestras import ORCHESTRAS
from rollout.orchestras.replies import parse_approval, parse_boxed
from rollout.orchestras.sequential import slots, solver_verifier
from rollout.records.trajectory import Sampling, Status, Task
from rollout.teams.roles import ROLES, Agent
from rollout.teams.team import Team
from tests.support.play import collect
from tests.support.scripted_engine import ScriptedEngine

TASK = Task(id="t", prompt="What is 3+4?", answers=("7",), env="math", source="sums", split="train")
RIGHT, WRONG, NONE = "so \\boxed{7}", "so \\boxed{8}", "no idea"
APPROVE, REJECT = "<verify>approve</verify>", "<verify>reject</verify>"


class Bytes:
    """A renderer whose tokens are UTF-8 bytes; 0 ends a reply."""

    stop = (0,)

    def render(self, messages):
        return tuple("\n".join(f"{m.role}: {m.content}" for m in messages).encode())

    def decode(self, token_ids):
        return bytes(token for token in token_ids if token).decode()


def play(*replies, max_tokens=99, **options):
    """One trajectory in which the agents say `replies`, and the prompts they saw."""
    engine = ScriptedEngine(lambda prompt, call: (*replies[call].encode(), 0))
    agents = {
        name: Agent(
            name=name, role=ROLES[name], policy="p", sampling=Sampling(max_tokens=max_tokens)
        )
        for name in ("solver", "verifier")
    }
    team = Team(agents, {"p": EngineClient(engine=engine, renderer=Bytes())})
    orchestra = partial(solver_verifier, **options)
    [group] = asyncio.run(
        collect([TASK], team, ENVS["math"], orchestra, group_size=1, seed=0, step=0)
    )
    return group.trajectories[0], [bytes(prompt).decode() for prompt, _ in engine.calls]


def speakers(trajectory):
    return [turn.agent for turn in trajectory.turns]


def test_approved_solution_ends_the_loop():
    trajectory, _ = play(RIGHT, APPROVE)
    assert speakers(trajectory) == ["solver", "verifier"]
    assert (trajectory.outcome, trajectory.answer) == (1.0, "7")
    assert trajectory.status is Status.COMPLETED


def test_approved_mistake_is_scored_as_it_is():
    assert play(WRONG, APPROVE)[0].outcome == 0.0


def test_rejection_gives_the_solver_one_more_attempt_and_no_verdict_on_it():
    trajectory, prompts = play(WRONG, REJECT, RIGHT)
    assert speakers(trajectory) == ["solver", "verifier", "solver"]
    assert trajectory.outcome == 1.0
    assert f"[solver]\n{WRONG}\n\n[verifier]\n{REJECT}\n\n" in prompts[2]


def test_first_prompt_has_no_team_context_and_the_verifier_sees_the_solution():
    _, prompts = play(RIGHT, APPROVE)
    assert TASK.prompt in prompts[0] and "[solver]" not in prompts[0]
    assert f"[solver]\n{RIGHT}\n\n" in prompts[1]


def test_last_attempt_counts_even_when_an_earlier_one_was_right():
    assert play(RIGHT, REJECT, WRONG)[0].outcome == 0.0


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({}, ["solver", "verifier", "solver"]),
        ({"malformed_verdict": "approve"}, ["solver", "verifier"]),
    ],
)
def test_malformed_verdict_rejects_unless_told_to_approve(option, expected):
    trajectory, _ = play(WRONG, "looks fine", RIGHT, **option)
    assert speakers(trajectory) == expected
    assert trajectory.turns[1].valid is False


def test_verdict_cut_at_the_length_limit_is_malformed():
    trajectory, _ = play(RIGHT, APPROVE + "." * 80, RIGHT, max_tokens=60)
    assert trajectory.turns[1].finish_reason == "length"
    assert speakers(trajectory) == ["solver", "verifier", "solver"]


def test_single_loop_never_asks_the_verifier():
    assert speakers(play(WRONG, max_loops=1)[0]) == ["solver"]


def test_three_loops():
    trajectory, _ = play(WRONG, REJECT, WRONG, REJECT, RIGHT, max_loops=3)
    assert speakers(trajectory) == ["solver", "verifier", "solver", "verifier", "solver"]
    assert trajectory.outcome == 1.0


def test_solution_without_a_box_is_invalid_and_scores_zero():
    trajectory, _ = play(NONE, APPROVE)
    assert [turn.valid for turn in trajectory.turns] == [False, True]
    assert trajectory.outcome == 0.0
    assert trajectory.metrics == {"answered": 0.0}


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
def test_verdict_needs_exactly_one_tag(text, verdict):
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
def test_solution_is_the_last_box(text, value):
    assert parse_boxed(text) == value


def test_slots_keep_braces_of_replies_out_of_the_template():
    filled = slots("p", [("solver", "\\boxed{7}"), ("verifier", REJECT), ("solver", "{problem}")])
    assert filled["solution"] == "{problem}"
    content = ROLES["solver"].messages(**filled)[-1].content
    assert (
        "[solver]\n\\boxed{7}\n\n[verifier]\n" in content and "[solver]\n{problem}\n\n" in content
    )
    assert content.endswith("within \\boxed{}.")


def test_the_table_names_it():
    assert ORCHESTRAS["solver_verifier"] is solver_verifier
