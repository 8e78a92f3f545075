"""Properties of all advantage estimators, on random turns."""

import inspect
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_mas.equations.advantages import (
    AGENT_LOCAL_ESTIMATORS,
    ESTIMATORS,
)
from mcore_mas.equations.turns import reverse_scan
from tests.support.turns import make_turns


@pytest.mark.parametrize(
    "name",
    sorted(set(ESTIMATORS) - AGENT_LOCAL_ESTIMATORS - {"reinforce_pp", "reinforce_pp_baseline"}),
)
def test_groups_of_other_tasks_do_not_matter(name: str) -> None:
    rows = [
        {"task": "t", "trajectory": 0, "node": "0", "score": 1.0},
        {"task": "t", "trajectory": 1, "node": "1", "score": 3.0},
        {"task": "t", "trajectory": 2, "node": "2", "score": 4.0},
    ]
    rows_of_other_task = [
        {"task": "u", "trajectory": 7, "node": "0", "score": 100.0},
        {"task": "u", "trajectory": 8, "node": "1", "score": -100.0},
    ]
    steps = [[1.0], [2.0], [3.0], [9.0], [9.0]]
    alone = ESTIMATORS[name](make_turns(rows, step_rewards=steps[:3])).values
    together = ESTIMATORS[name](make_turns(rows + rows_of_other_task, step_rewards=steps)).values
    assert together[:3].tolist() == pytest.approx(alone.tolist())


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - AGENT_LOCAL_ESTIMATORS))
@pytest.mark.parametrize("score", [-0.01, 0.1 + 0.2, 0.7])
def test_equal_scores_have_advantages_of_exactly_zero(name: str, score: float) -> None:
    for count in (2, 3, 7, 11):
        rows = [{"trajectory": i, "node": str(i), "score": score} for i in range(count)]
        turns = make_turns(rows, step_rewards=[[score, score]] * count)
        assert ESTIMATORS[name](turns).values.tolist() == [0.0] * count


# Tuples of task, trajectory of the task, agent and score
ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2), st.integers(-5, 5)),
    min_size=2,
    max_size=24,
)


def number_turns(rows: list[tuple[int, int, int, int]]) -> list[dict[str, Any]]:
    """Return the rows of `make_turns` for drawn tuples; turns of a trajectory are numbered in their order."""
    turn_counts = Counter[tuple[int, int]]()
    numbered = []
    for task, trajectory, agent, score in rows:
        turn = turn_counts[task, trajectory]
        turn_counts[task, trajectory] += 1
        numbered.append(
            {
                "task": task,
                "trajectory": f"{task}/{trajectory}",
                "agent": agent,
                "turn": turn,
                "round": turn,
                "score": score,
                "state": f"{task}/{turn % 2}",
                "tokens": 1 + turn % 3,
            }
        )
    return numbered


def columns_for(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the further columns that some estimators need."""
    tokens = sum(row["tokens"] for row in rows)
    return {
        "step_rewards": [[float(row["score"]), 1.0] for row in rows],
        "greedy_rewards": [1.0] * len(rows),
        "values": [0.1 * (i % 7) for i in range(tokens)],
    }


@pytest.mark.parametrize(
    "name", sorted(set(ESTIMATORS) - {"gae", "reinforce_pp", "reinforce_pp_baseline"})
)
@given(rows=ROWS, random=st.randoms(use_true_random=False))
def test_the_order_of_turns_does_not_matter(name: str, rows, random) -> None:  # type: ignore[no-untyped-def]
    turns = number_turns(rows)
    advantages = ESTIMATORS[name](make_turns(turns, **columns_for(turns))).values.tolist()
    order = list(range(len(turns)))
    random.shuffle(order)
    shuffled = [turns[i] for i in order]
    of_shuffled = ESTIMATORS[name](make_turns(shuffled, **columns_for(shuffled))).values.tolist()
    assert of_shuffled == pytest.approx([advantages[i] for i in order], abs=1e-6)


# In these estimators each turn is a vote.
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("drmas", ("task", "agent")),
        ("at_grpo", ("task", "state", "agent", "turn")),
    ],
)
@given(rows=ROWS)
def test_advantages_sum_to_zero_among_peers(name: str, columns: tuple[str, ...], rows) -> None:  # type: ignore[no-untyped-def]
    turns = number_turns(rows)
    advantages = ESTIMATORS[name](make_turns(turns)).values.tolist()
    sums: dict[tuple[object, ...], float] = {}
    for row, advantage in zip(turns, advantages, strict=True):
        key = tuple(row[column] for column in columns)
        sums[key] = sums.get(key, 0.0) + advantage
    assert list(sums.values()) == pytest.approx([0.0] * len(sums), abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(rows=ROWS)
def test_trajectory_votes_sum_to_zero_over_a_task(name: str, rows) -> None:  # type: ignore[no-untyped-def]
    turns = number_turns(rows)
    advantages = ESTIMATORS[name](make_turns(turns)).values.tolist()
    by_task: dict[int, dict[str, float]] = {}
    for row, advantage in zip(turns, advantages, strict=True):
        by_task.setdefault(row["task"], {})[row["trajectory"]] = advantage
    for by_trajectory in by_task.values():
        assert sum(by_trajectory.values()) == pytest.approx(0.0, abs=1e-6)


@given(rows=ROWS, scale=st.floats(0.5, 50), shift=st.floats(-50, 50))
def test_drmas_does_not_depend_on_an_agents_affine_reward_scale(
    rows, scale: float, shift: float
) -> None:  # type: ignore[no-untyped-def]
    turns = number_turns(rows)
    expected = ESTIMATORS["drmas"](make_turns(turns)).values.tolist()
    scaled = [dict(row) for row in turns]
    for row in scaled:
        if row["agent"] == 0:
            row["score"] = row["score"] * scale + shift
    advantages = ESTIMATORS["drmas"](make_turns(scaled)).values.tolist()
    assert advantages == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@given(rows=ROWS)
def test_a_tree_of_width_one_is_a_plain_trajectory(rows) -> None:  # type: ignore[no-untyped-def]
    turns = number_turns(rows)
    tree = [{**row, "node": ".".join("0" * (row["turn"] + 1))} for row in turns]
    columns = columns_for(turns)
    for name in sorted(set(ESTIMATORS) - {"mcts", "mars2"}):  # these two compare nodes
        advantages = ESTIMATORS[name](make_turns(tree, **columns)).values
        expected = ESTIMATORS[name](make_turns(turns, **columns)).values
        assert advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-9), name


@given(rows=ROWS, lengths=st.lists(st.integers(1, 9), min_size=24, max_size=24))
def test_the_length_of_replies_does_not_change_advantages_of_turns(rows, lengths) -> None:  # type: ignore[no-untyped-def]
    turns = number_turns(rows)
    other_lengths = [{**row, "tokens": length} for row, length in zip(turns, lengths, strict=False)]
    columns = columns_for(turns)
    del columns["values"]  # one for each token
    by_token = {"gae", "reinforce_pp", "reinforce_pp_baseline"}
    for name in sorted(set(ESTIMATORS) - by_token):
        advantages = ESTIMATORS[name](make_turns(other_lengths, **columns)).values
        expected = ESTIMATORS[name](make_turns(turns, **columns)).values
        assert advantages.tolist() == expected.tolist(), name


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
    st.floats(0, 1),
    st.randoms(use_true_random=False),
)
def test_reverse_scan_is_the_recursion(lengths: list[int], decay: float, random) -> None:  # type: ignore[no-untyped-def]
    values = [random.uniform(-1, 1) for _ in range(sum(lengths))]
    expected: list[float] = []
    start = 0
    for length in lengths:
        following = 0.0
        reversed_results = []
        for value in reversed(values[start : start + length]):
            following = value + decay * following
            reversed_results.append(following)
        expected += reversed(reversed_results)
        start += length
    result = reverse_scan(torch.tensor(values, dtype=torch.float64), decay, torch.tensor(lengths))
    assert result.tolist() == pytest.approx(expected, abs=1e-9)


def test_every_estimator_has_keyword_options_with_defaults_and_a_source() -> None:
    for name, estimator in ESTIMATORS.items():
        options = [
            p for p in inspect.signature(estimator).parameters.values() if p.kind is p.KEYWORD_ONLY
        ]
        assert all(option.default is not inspect.Parameter.empty for option in options), name
        text = estimator.__doc__ or ""
        assert "arXiv" in text or "MARTI" in text, name
