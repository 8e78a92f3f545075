"""What each token weighs in an update, by hand."""

from collections import Counter

import pytest

from mcore_mas.credit.samples import Sample, align, split, weigh


def sample(agent: str, tokens: int, task: str = "t", turn: int = 0, **fields: object) -> Sample:
    plain = {"policy": "p", "trajectory": task, "prompt_ids": (1,), "completion_ids": (2,) * tokens}
    return Sample(**plain | {"agent": agent, "task": task, "turn": turn} | fields)


def weights(samples: list[Sample], *settings: object) -> list[float]:
    return [s.weight for s in weigh(samples, {"a": 1.0, "b": 0.5, "frozen": 0.0}, *settings)]


def test_a_token_mean_is_over_all_samples_and_agents_may_weigh_less() -> None:
    assert weights([sample("a", 3), sample("b", 1)]) == [0.25, 0.125]


def test_frozen_agents_are_not_in_the_denominator() -> None:
    assert weights([sample("a", 3), sample("frozen", 7), sample("b", 1)]) == [0.25, 0.125]
    assert weights([sample("frozen", 7)]) == []


@pytest.mark.parametrize(
    ("mode", "norm", "expected"),
    [
        ("seq_mean_token_sum", None, [0.5, 0.25]),
        ("seq_mean_token_mean", None, [1 / 6, 0.25]),
        ("seq_mean_token_sum_norm", 10.0, [0.05, 0.025]),
    ],
)
def test_every_aggregation_is_a_number_on_the_token(
    mode: str, norm: float | None, expected: list[float]
) -> None:
    assert weights([sample("a", 3), sample("b", 1)], mode, norm) == pytest.approx(expected)


def test_agents_weigh_equally_however_much_they_say() -> None:
    """Of 8 tokens a says 6: each agent has half of the loss, b's at loss weight 1/2 a quarter."""
    said = [sample("a", 4), sample("b", 2), sample("a", 2), sample("frozen", 9)]
    got = weights(said, "agent_mean")
    assert got == pytest.approx([1 / 12, 1 / 8, 1 / 12])
    assert 4 * got[0] + 2 * got[2] == pytest.approx(0.5) and 2 * got[1] == pytest.approx(0.25)
    assert weights([sample("a", 3), sample("a", 1)], "agent_mean") == weights(
        [sample("a", 3), sample("a", 1)]
    )


def test_a_sample_that_counts_twice_is_two_samples() -> None:
    twice = weights([sample("a", 3, copies=2), sample("a", 1)])
    written_out = weights([sample("a", 3), sample("a", 3), sample("a", 1)])
    assert twice == pytest.approx([written_out[0] + written_out[1], written_out[2]])
    assert weights(
        [sample("a", 3, copies=2), sample("a", 1)], "seq_mean_token_mean"
    ) == pytest.approx([2 / 9, 1 / 3])


def test_sub_agents_are_aligned_to_a_fixed_number_of_turns() -> None:
    calls = [sample("a", 1, "t", turn) for turn in range(5)] + [
        sample("a", 1, "u", turn) for turn in range(2)
    ]
    main = [sample("b", 1, "t", 9)]
    aligned = align(calls + main, {"a": 3, "b": None}, 1, 0)
    copies = Counter({(s.task, s.agent): 0 for s in aligned})
    for s in aligned:
        copies[s.task, s.agent] += s.copies
    assert copies == {("t", "a"): 3, ("u", "a"): 3, ("t", "b"): 1}
    assert sorted(s.copies for s in aligned if s.task == "u") == [1, 2]
    assert align(calls + main, {"a": 3, "b": None}, 1, 0) == aligned
    kept = {
        tuple(s.turn for s in align(calls, {"a": 3}, 1, step) if s.task == "t")
        for step in range(20)
    }
    assert len(kept) > 1  # another step draws others


def test_parts_hold_whole_tasks_and_everything_once() -> None:
    samples = [sample("a", 1, task, turn) for task in "tuvwx" for turn in range(3)]
    parts = split(samples, 2, 1, 0)
    assert sorted(len({s.task for s in part}) for part in parts) == [2, 3]
    assert not {s.task for s in parts[0]} & {s.task for s in parts[1]}
    assert sorted((s.task, s.turn) for part in parts for s in part) == [
        (s.task, s.turn) for s in samples
    ]
    assert [len(part) for part in split(samples[:3], 4, 1, 0)] == [3]
    assert split(samples, 1, 1, 0)[0] != []
    assert split([], 3, 1, 0) == []
