"""Weights of tokens in an update against values computed by hand."""

from collections import Counter
from typing import Any

import pytest

from mcore_mas.credit.samples import Sample, align, split, weigh

AGENT_WEIGHTS = {"a": 1.0, "b": 0.5, "frozen": 0.0}


def sample(agent: str, tokens: int, task: str = "t", turn: int = 0, **fields: Any) -> Sample:
    """Return a sample of some tokens, with some fields changed."""
    defaults: dict[str, Any] = {
        "policy": "p",
        "trajectory": task,
        "prompt_ids": (1,),
        "completion_ids": (2,) * tokens,
        "agent": agent,
        "task": task,
        "turn": turn,
    }
    return Sample(**{**defaults, **fields})


def weights(samples: list[Sample], *settings: Any) -> list[float]:
    """Return the weight of a token of each sample that is trained."""
    return [sample.weight for sample in weigh(samples, AGENT_WEIGHTS, *settings)]


def test_a_token_mean_is_over_all_samples_and_agents_may_weigh_less() -> None:
    assert weights([sample("a", 3), sample("b", 1)]) == [0.25, 0.125]


def test_tokens_of_frozen_agents_do_not_count() -> None:
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
def test_every_aggregation_is_a_weight_of_tokens(
    mode: str, norm: float | None, expected: list[float]
) -> None:
    assert weights([sample("a", 3), sample("b", 1)], mode, norm) == pytest.approx(expected)


def test_agent_mean_gives_agents_equal_shares_whatever_the_number_of_their_tokens() -> None:
    """Agent a has 6 of 8 tokens and half of the loss; b with loss weight 1/2 has a quarter."""
    samples = [sample("a", 4), sample("b", 2), sample("a", 2), sample("frozen", 9)]
    first, second, third = weights(samples, "agent_mean")
    assert first == third == pytest.approx(1 / 12)
    assert second == pytest.approx(1 / 8)
    assert 4 * first + 2 * third == pytest.approx(0.5)
    assert 2 * second == pytest.approx(0.25)
    one_agent = [sample("a", 3), sample("a", 1)]
    assert weights(one_agent, "agent_mean") == weights(one_agent)


def test_a_sample_with_two_copies_counts_as_two_samples() -> None:
    with_copies = [sample("a", 3, copies=2), sample("a", 1)]
    written_out = weights([sample("a", 3), sample("a", 3), sample("a", 1)])
    expected = [written_out[0] + written_out[1], written_out[2]]
    assert weights(with_copies) == pytest.approx(expected)
    assert weights(with_copies, "seq_mean_token_mean") == pytest.approx([2 / 9, 1 / 3])


def test_sub_agents_are_aligned_to_a_fixed_number_of_turns() -> None:
    calls = [sample("a", 1, "t", turn) for turn in range(5)]
    calls += [sample("a", 1, "u", turn) for turn in range(2)]
    main = [sample("b", 1, "t", 9)]
    aligned = align(calls + main, {"a": 3, "b": None}, 1, 0)
    copies = Counter[tuple[str, str]]()
    for aligned_sample in aligned:
        copies[aligned_sample.task, aligned_sample.agent] += aligned_sample.copies
    assert copies == {("t", "a"): 3, ("u", "a"): 3, ("t", "b"): 1}
    assert sorted(sample.copies for sample in aligned if sample.task == "u") == [1, 2]
    assert align(calls + main, {"a": 3, "b": None}, 1, 0) == aligned

    # Each step draws other turns.
    drawn_turns = set()
    for step in range(20):
        aligned = align(calls, {"a": 3}, 1, step)
        drawn_turns.add(tuple(sample.turn for sample in aligned if sample.task == "t"))
    assert len(drawn_turns) > 1


def test_parts_have_whole_tasks_and_every_sample_once() -> None:
    samples = []
    for task in "tuvwx":
        samples += [sample("a", 1, task, turn) for turn in range(3)]
    first, second = split(samples, 2, 1, 0)
    tasks = [{sample.task for sample in part} for part in (first, second)]
    assert sorted(len(task_names) for task_names in tasks) == [2, 3]
    assert not tasks[0] & tasks[1]
    in_parts = sorted((sample.task, sample.turn) for sample in [*first, *second])
    assert in_parts == [(sample.task, sample.turn) for sample in samples]

    one_task = samples[:3]
    assert [len(part) for part in split(one_task, 4, 1, 0)] == [3]
    assert split(samples, 1, 1, 0)[0] != []
    assert split([], 3, 1, 0) == []
