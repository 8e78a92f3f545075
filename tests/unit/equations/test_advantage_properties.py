"""What holds of every estimator, whatever was played."""

import inspect

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
        {"trajectory": i, "node": str(i), "score": s, "task": "t"}
        for i, s in enumerate((1.0, 3.0, 4.0))
    ]
    other = [
        {"trajectory": 7 + i, "node": str(i), "score": s, "task": "u"}
        for i, s in enumerate((100.0, -100.0))
    ]
    alone = ESTIMATORS[name](make_turns(rows, steps=[[1.0], [2.0], [3.0]])).values
    among = ESTIMATORS[name](
        make_turns(rows + other, steps=[[1.0], [2.0], [3.0], [9.0], [9.0]])
    ).values
    assert among[:3].tolist() == pytest.approx(alone.tolist())


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - AGENT_LOCAL_ESTIMATORS))
@pytest.mark.parametrize("score", [-0.01, 0.1 + 0.2, 0.7])
def test_equal_scores_have_advantages_of_exactly_zero(name: str, score: float) -> None:
    for n in (2, 3, 7, 11):
        rows = [{"trajectory": i, "node": str(i), "score": score} for i in range(n)]
        assert (
            ESTIMATORS[name](make_turns(rows, steps=[[score, score]] * n)).values.tolist()
            == [0.0] * n
        )


ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2), st.integers(-5, 5)),
    min_size=2,
    max_size=24,
)


def played(rows: list[tuple[int, int, int, int]]) -> list[dict]:
    """Rows of (task, trajectory of that task, agent, score); a trajectory's turns are numbered in their order."""
    seen: dict[tuple[int, int], int] = {}
    out = []
    for task, trajectory, agent, score in rows:
        turn = seen.setdefault((task, trajectory), -1) + 1
        seen[task, trajectory] = turn
        name = f"{task}/{trajectory}"
        state = f"{task}/{turn % 2}"
        out.append({"task": task, "trajectory": name, "agent": agent, "turn": turn, "round": turn, "score": score,
                    "state": state, "tokens": 1 + turn % 3})  # fmt: skip
    return out


def needed(rows: list[dict]) -> dict[str, list]:
    tokens = sum(row["tokens"] for row in rows)
    return {
        "steps": [[float(row["score"]), 1.0] for row in rows],
        "greedy": [1.0] * len(rows),
        "values": [0.1 * (i % 7) for i in range(tokens)],
    }


@pytest.mark.parametrize(
    "name", sorted(set(ESTIMATORS) - {"gae", "reinforce_pp", "reinforce_pp_baseline"})
)
@given(rows=ROWS, random=st.randoms(use_true_random=False))
def test_the_order_of_turns_does_not_matter(name: str, rows, random) -> None:  # type: ignore[no-untyped-def]
    turns = played(rows)
    plain = ESTIMATORS[name](make_turns(turns, **needed(turns))).values.tolist()
    order = list(range(len(turns)))
    random.shuffle(order)
    shuffled = [turns[i] for i in order]
    got = ESTIMATORS[name](make_turns(shuffled, **needed(shuffled))).values.tolist()
    assert got == pytest.approx([plain[i] for i in order], abs=1e-6)


# every vote has one turn in these: the votes' mean is the turns'
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("drmas", ("task", "agent")),
        ("at_grpo", ("task", "state", "agent", "turn")),
    ],
)
@given(rows=ROWS)
def test_advantages_sum_to_zero_among_peers(name: str, columns: tuple[str, ...], rows) -> None:  # type: ignore[no-untyped-def]
    turns = played(rows)
    got = ESTIMATORS[name](make_turns(turns)).values.tolist()
    sums: dict[tuple[object, ...], float] = {}
    for row, advantage in zip(turns, got, strict=True):
        key = tuple(row[column] for column in columns)
        sums[key] = sums.get(key, 0.0) + advantage
    assert list(sums.values()) == pytest.approx([0.0] * len(sums), abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(rows=ROWS)
def test_trajectory_votes_sum_to_zero_over_a_task(name: str, rows) -> None:  # type: ignore[no-untyped-def]
    turns = played(rows)
    got = ESTIMATORS[name](make_turns(turns)).values.tolist()
    votes = {
        (row["task"], row["trajectory"]): advantage
        for row, advantage in zip(turns, got, strict=True)
    }
    for task in {row["task"] for row in turns}:
        assert sum(v for (t, _), v in votes.items() if t == task) == pytest.approx(0.0, abs=1e-6)


@given(rows=ROWS, scale=st.floats(0.5, 50), shift=st.floats(-50, 50))
def test_drmas_is_blind_to_an_agents_affine_reward_scale(rows, scale: float, shift: float) -> None:  # type: ignore[no-untyped-def]
    turns = played(rows)
    plain = ESTIMATORS["drmas"](make_turns(turns)).values.tolist()
    scaled = [
        row | {"score": row["score"] * scale + shift} if row["agent"] == 0 else row for row in turns
    ]
    assert ESTIMATORS["drmas"](make_turns(scaled)).values.tolist() == pytest.approx(plain, abs=1e-4)


@pytest.mark.slow
@given(rows=ROWS)
def test_a_tree_of_width_one_is_a_plain_trajectory(rows) -> None:  # type: ignore[no-untyped-def]
    plain = played(rows)
    tree = [row | {"node": ".".join("0" * (row["turn"] + 1))} for row in plain]
    for name in sorted(set(ESTIMATORS) - {"mcts", "mars2"}):  # these two compare nodes
        columns = needed(plain)
        got, wanted = (
            ESTIMATORS[name](make_turns(those, **columns)).values for those in (tree, plain)
        )
        assert got.tolist() == pytest.approx(wanted.tolist(), abs=1e-9), name


@given(rows=ROWS, lengths=st.lists(st.integers(1, 9), min_size=24, max_size=24))
def test_the_length_of_replies_does_not_change_a_turns_statistics(rows, lengths) -> None:  # type: ignore[no-untyped-def]
    turns = played(rows)
    longer = [row | {"tokens": n} for row, n in zip(turns, lengths, strict=False)]
    columns = {name: values for name, values in needed(turns).items() if name != "values"}
    for name in sorted(
        set(ESTIMATORS) - {"gae", "reinforce_pp", "reinforce_pp_baseline"}
    ):  # which weigh by tokens
        got = ESTIMATORS[name](make_turns(longer, **columns)).values
        assert got.tolist() == ESTIMATORS[name](make_turns(turns, **columns)).values.tolist(), name


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
        after, out = 0.0, []
        for value in reversed(values[start : start + length]):
            after = value + decay * after
            out.append(after)
        expected += reversed(out)
        start += length
    got = reverse_scan(torch.tensor(values, dtype=torch.float64), decay, torch.tensor(lengths))
    assert got.tolist() == pytest.approx(expected, abs=1e-9)


def test_every_estimator_has_keyword_options_with_defaults_and_a_source() -> None:
    for name, estimator in ESTIMATORS.items():
        options = [
            p for p in inspect.signature(estimator).parameters.values() if p.kind is p.KEYWORD_ONLY
        ]
        assert all(option.default is not inspect.Parameter.empty for option in options), name
        text = estimator.__doc__ or ""
        assert "arXiv" in text or "MARTI" in text, name
