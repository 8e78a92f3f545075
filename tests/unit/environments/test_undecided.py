"""Answers of which nobody can say whether they are right: never a reward of 0, masked and counted."""

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from mcore_mas.credit.samples import to_samples
from mcore_mas.training.metrics import rollout_metrics
from rollout.base.errors import Undecided
from rollout.environments.math import MathEnv
from rollout.environments.math_answers import compare_answers
from rollout.environments.math_equality import AnswerComparison, Comparer
from rollout.records.trajectory import Group, Status
from rollout.rewards import ALLOCATORS
from rollout.rewards.allocation import judge_undecided
from tests.support.casts import SUM, grow, play, scores
from tests.support.played import group, rewards, trajectory, turn

HUGE = "2^{100000000}"  # a truth that is over a limit: what does not look like it is undecided
HARD, HARDLY = replace(SUM, answers=(HUGE,)), replace(SUM, answers=(HUGE, "7"))
RIGHT, WRONG = "so \\boxed{7}", "so \\boxed{8}"
CHAIN = {"generator": "chain_generator", "verifier": "chain_verifier", "refiner": "chain_refiner"}


def score(text, *answers):
    return asyncio.run(MathEnv(replace(SUM, answers=answers)).step(text))


def stop(comparer):
    for child in comparer._idle.queue:
        child.stop()


@pytest.mark.slow
def test_an_endless_comparison_is_undecided_and_the_next_one_works():
    comparer = Comparer(limit_s=1)
    try:
        assert comparer.compare("10000000!", "5") is AnswerComparison.UNDECIDED
        assert comparer.compare("0.5", "\\frac{1}{2}") is AnswerComparison.EQUAL
        assert comparer.compare("0.4", "\\frac{1}{2}") is AnswerComparison.DIFFERENT
    finally:
        stop(comparer)


@pytest.mark.slow
def test_a_question_does_not_queue_behind_one_that_hangs():
    comparer = Comparer()
    found = []
    try:
        assert comparer.compare("0.5", "\\frac{1}{2}") is AnswerComparison.EQUAL
        busy = comparer._idle.queue[-1]._process.pid
        os.kill(busy, signal.SIGSTOP)
        hanging = threading.Thread(target=lambda: found.append(comparer.compare("1", "2")))
        hanging.start()
        while comparer._idle.qsize() == 2:
            time.sleep(0.01)
        assert comparer.compare("0.5", "\\frac{1}{2}") is AnswerComparison.EQUAL
        assert hanging.is_alive()
        os.kill(busy, signal.SIGKILL)
        hanging.join()
        assert found == [AnswerComparison.UNDECIDED]
    finally:
        stop(comparer)


def test_the_truth_can_make_an_answer_undecided_and_the_answer_cannot():
    assert compare_answers("5", HUGE) is AnswerComparison.UNDECIDED
    assert compare_answers(HUGE, HUGE) is AnswerComparison.EQUAL
    assert compare_answers(HUGE, "5") is AnswerComparison.DIFFERENT
    assert compare_answers(f"{HUGE}+1", HUGE) is AnswerComparison.UNDECIDED


def test_an_undecided_score_is_an_error_and_no_reward():
    with pytest.raises(Undecided, match="task t: it cannot be decided whether '8' is right"):
        score("\\boxed{8}", HUGE)
    with pytest.raises(Undecided):
        score("\\boxed{8}", "7", HUGE)
    assert score("\\boxed{7}", HUGE, "7").reward == 1.0
    assert score("no answer", HUGE).reward == 0.0


def test_a_refused_answer_is_wrong_and_counted():
    step = score(f"\\boxed{{{HUGE}}}", "7")
    assert (step.reward, step.metrics) == (0.0, {"answered": 1.0, "refused": 1.0})
    assert score(f"\\boxed{{{HUGE}}}", HUGE).metrics == {"answered": 1.0}


def test_undecided_answers_do_not_agree():
    assert asyncio.run(MathEnv(SUM).same("8", HUGE)) is False
    assert asyncio.run(MathEnv(SUM).same(HUGE, HUGE)) is True


def test_an_undecided_outcome_is_masked_and_counted():
    lost, _ = play("debate", {"a": "debater"}, WRONG, task=HARD, debaters=["a"], rounds=1)
    assert (lost.status, lost.outcome, lost.metrics) == (Status.FAILED, None, {"undecided": 1.0})
    assert lost.error == "Undecided: task t: it cannot be decided whether '8' is right"
    groups = [Group(task=HARD, trajectories=(lost,))]
    assert to_samples(groups) == []
    metrics = rollout_metrics(groups)
    assert metrics == {"rollout/failed": 1.0, "rollout/trajectories": 1.0, "rollout/undecided": 1.0}


def test_an_undecided_grade_is_not_measured_and_its_turn_is_masked():
    found, _ = play("chain", CHAIN, WRONG, "\\boxed{0}", RIGHT, task=HARDLY)
    assert (found.status, found.outcome) == (Status.COMPLETED, 1.0)
    assert scores(found) == [None, None, 1.0]  # the verifier's verdict is on what is undecided
    assert scores(found, "undecided") == [1.0, 1.0, None]
    paid = ALLOCATORS["local_team"](Group(task=HARDLY, trajectories=(found,)))
    assert rewards(paid) == [[None, None, 2.0]]
    assert [sample.agent for sample in to_samples([paid])] == ["refiner"]
    metrics = rollout_metrics([paid])
    assert (metrics["agent/generator/undecided"], metrics["agent/generator/masked"]) == (1.0, 1.0)
    assert "agent/refiner/undecided" not in metrics


def test_an_undecided_branch_is_dropped_and_counted():
    replies = {("solver", 0, ""): RIGHT, ("solver", 0, "1"): WRONG}
    tree = grow("self_verify", {"solver": "self_verifier"}, replies, task=HARDLY, max_turns=1)
    assert (tree.status, tree.outcome) == (Status.COMPLETED, 1.0)
    assert tree.metrics == {"answered": 1.0, "dropped_branches/Undecided": 1.0, "undecided": 1.0}


LOST = {"undecided": 1.0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.0, None, 0.0, 0.0]),
        (
            {"history": "before"},
            [1.0, None, -0.5, -0.25],
        ),  # 0 + 0.5 (0 - mean of 1), then of 1 and 0
        ({"beta": 0.5}, [1.5, None, 0.0, 0.0]),  # a ends with 1, b and c with 0
    ],
)
def test_shaping_leaves_undecided_turns_out(options, expected):
    turns = [
        turn(0, "a", {"local": 1.0}),
        turn(1, "b", LOST),
        turn(2, "c", {"local": 0.0}),
        turn(3, "b", {"local": 0.0}),
    ]
    assert rewards(ALLOCATORS["shaping"](group(trajectory(*turns)), **options)) == [expected]


def test_shaping_masks_who_is_paid_by_an_undecided_end():
    turns = [turn(0, "a", {"local": 1.0}), turn(1, "b", {"local": 0.5}), turn(2, "b", LOST)]
    allocated = ALLOCATORS["shaping"](group(trajectory(*turns)), beta=0.5)
    assert rewards(allocated) == [[1.5, None, None]]


def test_tree_shaping_leaves_undecided_turns_out():
    turns = [
        turn(0, "a", {"local": 1.0}, node="0"),
        turn(0, "a", LOST, node="1"),
        turn(0, "a", {"local": 0.0}, node="2"),
    ]
    allocated = ALLOCATORS["tree_shaping"](group(trajectory(*turns, leaf="0")), gamma=0.5)
    assert rewards(allocated) == [[1.5, None, -0.5]]  # 1 + 0.5 (1 - 0), and 0 + 0.5 (0 - 1)


def answered(sample, agent, verdict):
    """A trajectory in which `agent` spoke last: right, wrong or undecided."""
    scores = {"team": float(verdict == "right")} if verdict != "undecided" else {}
    ended = {
        "status": Status.FAILED,
        "error": "Undecided: ?",
        "outcome": None,
        "metrics": {"undecided": 1.0},
    }
    more = ended if verdict == "undecided" else {"outcome": float(verdict == "right")}
    return trajectory(turn(0, agent, scores), sample=sample, **more)


def test_an_agent_that_is_undecided_too_often_is_wrong():
    few = [answered(n, "a", "undecided" if n == 0 else "right") for n in range(20)]
    many = [answered(n, "b", "undecided" if n < 2 else "wrong") for n in range(20)]
    [first, second] = judge_undecided([group(*few), group(*many)], 0.05)
    assert first.trajectories == tuple(few)  # 1 of 20 is not more than 0.05
    for judged, before in zip(second.trajectories, many, strict=True):
        assert (judged.status, judged.outcome, judged.error) == (Status.COMPLETED, 0.0, "")
        assert judged.turns[0].scores["team"] == 0.0
        assert ("undecided" in judged.metrics) == ("undecided" in before.metrics)  # still counted
    trained = {sample.trajectory for sample in to_samples([ALLOCATORS["shared_outcome"](second)])}
    assert len(trained) == len({t.id for t in many})


def test_turns_graded_alone_are_wrong_from_an_agent_that_is_undecided_too_often():
    turns = [
        turn(n, "a" if n % 2 else "b", {"undecided": 1.0} if n in (0, 1, 3) else {"local": 1.0})
        for n in range(42)
    ]
    [found] = judge_undecided([group(trajectory(*turns, outcome=1.0))], 0.05)
    scored = [one.scores for one in found.trajectories[0].turns]
    assert scored[0] == {"undecided": 1.0}  # b: 1 of 21
    assert scored[1] == scored[3] == {"local": 0.0}  # a: 2 of 22, its last answer included
    assert scored[2] == {"local": 1.0}
