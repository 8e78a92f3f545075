"""Answers that cannot be decided to be right or wrong: they are masked and counted, and get no reward of 0."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from mcore_mas.credit.samples import to_samples
from mcore_mas.training.metrics import rollout_metrics
from rollout.base.errors import Undecided
from rollout.environments.math import MathEnv
from rollout.environments.math_answers import compare_answers
from rollout.environments.math_equality import AnswerComparison
from rollout.environments.protocol import Step
from rollout.records.trajectory import Group, Status, Trajectory
from rollout.rewards import ALLOCATORS
from rollout.rewards.allocation import judge_undecided
from tests.support.casts import SUM, grow, play, scores
from tests.support.played import group, rewards, trajectory, turn

# A stored answer beyond the limits of the comparison: any other text is undecided.
HUGE = "2^{100000000}"
UNDECIDABLE_TASK = replace(SUM, answers=(HUGE,))
PARTLY_DECIDABLE_TASK = replace(SUM, answers=(HUGE, "7"))
RIGHT = "so \\boxed{7}"
WRONG = "so \\boxed{8}"
CHAIN = {"generator": "chain_generator", "verifier": "chain_verifier", "refiner": "chain_refiner"}


def step(text: str, *answers: str) -> Step:
    """Return the environment's step for a reply to a task with these answers."""
    return asyncio.run(MathEnv(replace(SUM, answers=answers)).step(text))


def test_only_the_stored_answer_can_make_a_comparison_undecided() -> None:
    assert compare_answers("5", HUGE) is AnswerComparison.UNDECIDED
    assert compare_answers(HUGE, HUGE) is AnswerComparison.EQUAL
    assert compare_answers(HUGE, "5") is AnswerComparison.DIFFERENT
    assert compare_answers(f"{HUGE}+1", HUGE) is AnswerComparison.UNDECIDED


def test_an_undecided_score_is_an_error_and_no_reward() -> None:
    with pytest.raises(Undecided, match="task t: it cannot be decided whether '8' is right"):
        step("\\boxed{8}", HUGE)
    with pytest.raises(Undecided):
        step("\\boxed{8}", "7", HUGE)
    assert step("\\boxed{7}", HUGE, "7").reward == 1.0
    assert step("no answer", HUGE).reward == 0.0


def test_a_refused_answer_is_wrong_and_counted() -> None:
    refused = step(f"\\boxed{{{HUGE}}}", "7")
    assert refused.reward == 0.0
    assert refused.metrics == {"answered": 1.0, "refused": 1.0}
    assert step(f"\\boxed{{{HUGE}}}", HUGE).metrics == {"answered": 1.0}


def test_undecided_answers_do_not_agree() -> None:
    assert asyncio.run(MathEnv(SUM).same("8", HUGE)) is False
    assert asyncio.run(MathEnv(SUM).same(HUGE, HUGE)) is True


def test_an_undecided_outcome_is_masked_and_counted() -> None:
    undecided, _ = play(
        "debate", {"a": "debater"}, WRONG, task=UNDECIDABLE_TASK, debaters=["a"], rounds=1
    )
    assert undecided.status is Status.FAILED
    assert undecided.outcome is None
    assert undecided.metrics == {"undecided": 1.0}
    assert undecided.error == "Undecided: task t: it cannot be decided whether '8' is right"
    groups = [Group(task=UNDECIDABLE_TASK, trajectories=(undecided,))]
    assert to_samples(groups) == []
    metrics = rollout_metrics(groups)
    assert metrics == {"rollout/failed": 1.0, "rollout/trajectories": 1.0, "rollout/undecided": 1.0}


def test_an_undecided_grade_has_no_score_and_its_turn_is_masked() -> None:
    played, _ = play("chain", CHAIN, WRONG, "\\boxed{0}", RIGHT, task=PARTLY_DECIDABLE_TASK)
    assert played.status is Status.COMPLETED
    assert played.outcome == 1.0
    # The verifier judges the generator's answer, which is undecided.
    assert scores(played) == [None, None, 1.0]
    assert scores(played, "undecided") == [1.0, 1.0, None]
    rewarded = ALLOCATORS["local_team"](Group(task=PARTLY_DECIDABLE_TASK, trajectories=(played,)))
    assert rewards(rewarded) == [[None, None, 2.0]]
    assert [sample.agent for sample in to_samples([rewarded])] == ["refiner"]
    metrics = rollout_metrics([rewarded])
    assert metrics["agent/generator/undecided"] == 1.0
    assert metrics["agent/generator/masked"] == 1.0
    assert "agent/refiner/undecided" not in metrics


def test_an_undecided_branch_is_dropped_and_counted() -> None:
    replies = {("solver", 0, ""): RIGHT, ("solver", 0, "1"): WRONG}
    roles = {"solver": "self_verifier"}
    tree = grow("self_verify", roles, replies, task=PARTLY_DECIDABLE_TASK, max_turns=1)
    assert tree.status is Status.COMPLETED
    assert tree.outcome == 1.0
    assert tree.metrics == {"answered": 1.0, "dropped_branches/Undecided": 1.0, "undecided": 1.0}


UNDECIDED_SCORES = {"undecided": 1.0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.0, None, 0.0, 0.0]),
        # 0 + 0.5 (0 - 1), where 1 is the earlier score; then 0 + 0.5 (0 - 1/2), their mean
        ({"history": "before"}, [1.0, None, -0.5, -0.25]),
        # a ends with 1, b and c end with 0
        ({"beta": 0.5}, [1.5, None, 0.0, 0.0]),
    ],
)
def test_shaping_leaves_undecided_turns_out(
    options: dict[str, Any], expected: list[float | None]
) -> None:
    turns = [
        turn(0, "a", {"local": 1.0}),
        turn(1, "b", UNDECIDED_SCORES),
        turn(2, "c", {"local": 0.0}),
        turn(3, "b", {"local": 0.0}),
    ]
    rewarded = ALLOCATORS["shaping"](group(trajectory(*turns)), **options)
    assert rewards(rewarded) == [expected]


def test_shaping_masks_turns_that_are_rewarded_by_an_undecided_end() -> None:
    turns = [
        turn(0, "a", {"local": 1.0}),
        turn(1, "b", {"local": 0.5}),
        turn(2, "b", UNDECIDED_SCORES),
    ]
    allocated = ALLOCATORS["shaping"](group(trajectory(*turns)), beta=0.5)
    assert rewards(allocated) == [[1.5, None, None]]


def test_tree_shaping_leaves_undecided_turns_out() -> None:
    turns = [
        turn(0, "a", {"local": 1.0}, node="0"),
        turn(0, "a", UNDECIDED_SCORES, node="1"),
        turn(0, "a", {"local": 0.0}, node="2"),
    ]
    allocated = ALLOCATORS["tree_shaping"](group(trajectory(*turns, leaf="0")), gamma=0.5)
    assert rewards(allocated) == [[1.5, None, -0.5]]  # 1 + 0.5 (1 - 0), and 0 + 0.5 (0 - 1)


def decided(sample: int, agent: str, outcome: float) -> Trajectory:
    """Return a trajectory with one turn, whose answer is right (1) or wrong (0)."""
    return trajectory(turn(0, agent, {"team": outcome}), sample=sample, outcome=outcome)


def undecided(sample: int, agent: str) -> Trajectory:
    """Return a trajectory with one turn, whose answer is undecided."""
    return trajectory(
        turn(0, agent, {}),
        sample=sample,
        outcome=None,
        status=Status.FAILED,
        error="Undecided: ?",
        metrics={"undecided": 1.0},
    )


def test_an_agent_that_is_undecided_too_often_is_wrong() -> None:
    one_of_20 = [undecided(0, "a"), *(decided(n, "a", 1.0) for n in range(1, 20))]
    two_of_20 = [
        undecided(0, "b"),
        undecided(1, "b"),
        *(decided(n, "b", 0.0) for n in range(2, 20)),
    ]
    first, second = judge_undecided([group(*one_of_20), group(*two_of_20)], 0.05)
    assert first.trajectories == tuple(one_of_20)  # 1 of 20 is not more than 0.05
    for judged, before in zip(second.trajectories, two_of_20, strict=True):
        assert judged.status is Status.COMPLETED
        assert judged.outcome == 0.0
        assert judged.error == ""
        assert judged.turns[0].scores["team"] == 0.0
        # The undecided ones are still counted.
        assert ("undecided" in judged.metrics) == ("undecided" in before.metrics)
    samples = to_samples([ALLOCATORS["shared_outcome"](second)])
    trained = {sample.trajectory for sample in samples}
    assert len(trained) == len({trajectory.id for trajectory in two_of_20})


def test_a_dropped_branch_that_was_undecided_leaves_the_trajectory_as_it_is() -> None:
    # The metric `undecided` of the first three counts branches that were dropped.
    completed = replace(decided(0, "a", 1.0), metrics={"undecided": 1.0})
    late = replace(
        undecided(1, "a"),
        status=Status.LATE,
        error="Late: ?",
        metrics={"late/batch": 1.0, "undecided": 1.0},
    )
    failed = replace(
        undecided(2, "a"),
        error="EngineError: ?",
        metrics={"dropped_branches/Undecided": 1.0, "undecided": 1.0},
    )
    (judged,) = judge_undecided([group(completed, late, failed, undecided(3, "a"))], 0.05)
    assert judged.trajectories[:3] == (completed, late, failed)
    assert judged.trajectories[3].status is Status.COMPLETED
    assert judged.trajectories[3].outcome == 0.0


def test_turns_of_an_agent_that_is_undecided_too_often_are_wrong() -> None:
    # Agent b is undecided in 1 of 21 turns, and agent a in 2 of 22, its last answer included.
    turns = []
    for number in range(42):
        agent = "a" if number % 2 else "b"
        turns.append(
            turn(number, agent, UNDECIDED_SCORES if number in (0, 1, 3) else {"local": 1.0})
        )
    (judged,) = judge_undecided([group(trajectory(*turns, outcome=1.0))], 0.05)
    scores_by_turn = [judged_turn.scores for judged_turn in judged.trajectories[0].turns]
    assert scores_by_turn[0] == UNDECIDED_SCORES
    assert scores_by_turn[1] == {"local": 0.0}
    assert scores_by_turn[2] == {"local": 1.0}
    assert scores_by_turn[3] == {"local": 0.0}


def test_a_tree_whose_branches_are_all_undecided_is_wrong() -> None:
    replies = {("solver", 0, ""): RIGHT, ("solver", 0, "1"): WRONG}
    roles = {"solver": "self_verifier"}
    tree = grow("self_verify", roles, replies, task=UNDECIDABLE_TASK, max_turns=1)
    assert tree.failure_reason == "undecided"
    assert [turn.scores for turn in tree.turns] == [UNDECIDED_SCORES]
    (judged,) = judge_undecided([Group(task=UNDECIDABLE_TASK, trajectories=(tree,))], 0.05)
    assert judged.trajectories[0].outcome == 0.0
    assert rewards(ALLOCATORS["local_team"](judged)) == [[0.0]]
    assert rewards(ALLOCATORS["tree_shaping"](judged)) == [[0.0]]


def test_the_undecided_last_round_of_a_tree_gets_no_reward_of_the_team() -> None:
    turns = [
        turn(0, "a", {"local": 1.0, "team": 2.0, "branch": 3.0}, node="0"),
        turn(0, "a", {"local": 0.0, "team": 0.5, "branch": 0.5}, node="1"),
        turn(1, "a", {"local": 1.0}, node="0.0"),
        turn(2, "b", UNDECIDED_SCORES, node="0.0"),
    ]
    tree = replace(undecided(0, "b"), turns=tuple(turns), leaf="0.0")
    (judged,) = judge_undecided([group(tree)], 0.05)
    assert scores(judged.trajectories[0], "team") == [2.0, 0.5, 0.0, 0.0]
    assert scores(judged.trajectories[0], "branch") == [3.0, 0.5, 1.0, 1.0]
    # 1 + (3 - 1), 0 + (0.5 - 0), 1 + (1 - 1), 0 + (1 - 1)
    assert rewards(ALLOCATORS["local_team"](judged)) == [[3.0, 0.5, 1.0, 0.0]]


def test_an_undecided_attempt_of_ab_mcts_is_wrong() -> None:
    roles = {"generator": "tree_solver"}
    played, _ = play("ab_mcts", roles, WRONG, task=UNDECIDABLE_TASK, max_nodes=2)
    assert played.failure_reason == "undecided"
    assert [(turn.node, turn.scores) for turn in played.turns] == [("0", UNDECIDED_SCORES)]
    (judged,) = judge_undecided([Group(task=UNDECIDABLE_TASK, trajectories=(played,))], 0.05)
    assert rewards(ALLOCATORS["tree_shaping"](judged)) == [[0.0]]
