"""Advantages by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_mas.core.advantages import ESTIMATORS, standardise
from mcore_mas.samples import Sample, estimate


def sample(task: str, trajectory: str, turn: int, agent: str, reward: float) -> Sample:
    return Sample(
        policy="p",
        agent=agent,
        task=task,
        trajectory=trajectory,
        turn=turn,
        prompt_ids=(1,),
        completion_ids=(2,),
        reward=reward,
    )


def advantages(rows: list[Sample], name: str, **options: object) -> list[float]:
    return [s.advantage for s in estimate(rows, name, **options)]


def two_scales() -> list[Sample]:
    """The verifier speaks three times in one trajectory and once in the other; its rewards are 4 to 5, not 0 to 1."""
    return [
        sample("t", "a", 0, "solver", 1.0),
        sample("t", "a", 1, "verifier", 5.0),
        sample("t", "a", 2, "verifier", 5.0),
        sample("t", "a", 3, "verifier", 5.0),
        sample("t", "b", 0, "solver", 0.0),
        sample("t", "b", 1, "verifier", 4.0),
    ]


def test_drmas_compares_every_agent_with_itself() -> None:
    got = advantages(two_scales(), "drmas")
    # solver: votes 1, 0: μ 1/2, σ √(1/2).  verifier: votes 5, 5, 5, 4: μ 4.75, σ 1/2
    assert got[0] == pytest.approx(0.5 / 0.5**0.5, rel=1e-5)
    assert got[4] == pytest.approx(-0.5 / 0.5**0.5, rel=1e-5)
    assert got[1:4] == pytest.approx([0.5] * 3, rel=1e-5)
    assert got[5] == pytest.approx(-1.5, rel=1e-5)


def test_grpo_gives_every_turn_the_value_of_its_trajectory() -> None:
    got = advantages(two_scales(), "grpo")
    # votes: a = (1 + 5 + 5 + 5) / 4 = 4, b = (0 + 4) / 2 = 2: μ 3, σ √2
    assert got == pytest.approx([1 / 2**0.5] * 4 + [-1 / 2**0.5] * 2, rel=1e-5)


def test_dr_grpo_only_centres() -> None:
    assert advantages(two_scales(), "dr_grpo") == pytest.approx([1.0] * 4 + [-1.0] * 2)


def test_groups_of_other_tasks_do_not_matter() -> None:
    rows = two_scales()
    other = [sample("u", "c", 0, "solver", 100.0), sample("u", "d", 0, "solver", -100.0)]
    for name in ESTIMATORS:
        assert advantages(rows + other, name)[: len(rows)] == pytest.approx(advantages(rows, name))


def test_a_lone_vote_is_zero_or_raw() -> None:
    lone = [sample("t", "a", 0, "solver", 0.7), sample("t", "a", 1, "verifier", 0.2)]
    assert advantages(lone, "drmas") == [0.0, 0.0]
    assert advantages(lone, "drmas", lone="raw") == [0.7, 0.2]


def test_mean_and_deviation_may_have_different_keys() -> None:
    scores = torch.tensor([1.0, 3.0, 10.0, 14.0])
    turn = torch.arange(4)
    agent = torch.tensor([0, 0, 1, 1])
    task = torch.zeros(4, dtype=torch.int64)
    got = standardise(scores, vote=turn, mean=agent, std=task, eps=0.0)
    sigma = (((1 - 7) ** 2 + (3 - 7) ** 2 + (10 - 7) ** 2 + (14 - 7) ** 2) / 3) ** 0.5
    assert got.tolist() == pytest.approx([-1 / sigma, 1 / sigma, -2 / sigma, 2 / sigma])


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(-5, 5)), min_size=2, max_size=24),
    st.floats(0.5, 50),
    st.floats(-50, 50),
    st.randoms(use_true_random=False),
)
def test_drmas_is_blind_to_an_agents_scale_and_to_order(rows, scale, shift, random) -> None:  # type: ignore[no-untyped-def]
    samples = [sample(str(t), f"{t}/{i}", i, f"agent{a}", float(r)) for i, (t, a, r) in enumerate(rows)]
    plain = advantages(samples, "drmas")
    scaled = [
        sample(s.task, s.trajectory, s.turn, s.agent, s.reward * scale + shift if s.agent == "agent0" else s.reward)
        for s in samples
    ]
    assert advantages(scaled, "drmas") == pytest.approx(plain, abs=1e-4)
    order = list(range(len(samples)))
    random.shuffle(order)
    assert advantages([samples[i] for i in order], "drmas") == pytest.approx([plain[i] for i in order], abs=1e-6)
    for task in {s.task for s in samples}:
        for agent in {s.agent for s in samples}:
            group = [a for s, a in zip(samples, plain, strict=True) if (s.task, s.agent) == (task, agent)]
            assert sum(group) == pytest.approx(0.0, abs=1e-6)
