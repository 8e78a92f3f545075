"""Credit watched over a run, with the numbers by which it stops."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.config.credit import AdvantageConfig
from mcore_mas.config.trainer import TrainerConfig
from mcore_mas.credit.samples import CreditError, Sample
from mcore_mas.credit.watch import CreditWatch
from mcore_mas.training.loop import train_steps
from tests.support.scripted_run import Bytes, box, make_run, task_of
from tests.support.simulated import SimulatedGang, engines_of, make_session, with_engines


def trainer(**changes: Any) -> TrainerConfig:
    return TrainerConfig(steps=1, tasks_per_step=1, group_size=2, **changes)


def turn(trajectory: str, agent: str, reward: float, advantage: float = 0.0) -> Sample:
    return Sample(
        policy="p", agent=agent, task="t", trajectory=trajectory, turn=0, prompt_ids=(1,), completion_ids=(2,),
        reward=reward, advantages=(advantage,),
    )  # fmt: skip


def test_d1_an_advantage_beyond_the_bound_stops_the_run_with_one_line() -> None:
    samples = [turn("a", "solver", 1.0, -0.7), turn("b", "searcher", 0.0, -7.5e5)]
    CreditWatch().check(trainer(max_advantage=None), 0, samples)
    CreditWatch().check(trainer(), 0, [turn("a", "solver", 1.0, -1000.0)])
    with pytest.raises(CreditError) as stopped:
        CreditWatch().check(trainer(), 3, samples)
    assert str(stopped.value) == (
        "step 3: agent searcher has an advantage of 7.5e+05 (trajectory b, turn 0), beyond trainer.max_advantage 1000; "
        "its rewards are out of scale, or their σ is nearly zero: see `mcore-mas explain`, and change "
        "the advantage, the reward or the bound"
    )


def test_an_advantage_that_is_no_number_stops_the_run_wherever_it_stands() -> None:
    for advantages in ([1.0, math.nan, 2.0], [math.nan, 1.0, 2.0], [1.0, 2.0, math.nan]):
        samples = [
            turn(f"t{i}", "solver", 0.0, advantage) for i, advantage in enumerate(advantages)
        ]
        one = replace(samples[0], completion_ids=(1, 2, 3), advantages=tuple(advantages))
        for given in (samples, [one]):
            with pytest.raises(
                CreditError, match=r"agent solver has an advantage of nan \(trajectory t"
            ):
                CreditWatch().check(trainer(), 0, given)


def test_d2_a_run_whose_first_steps_have_no_advantage_stops() -> None:
    flat, signal = [turn("a", "solver", 1.0)], [turn("a", "solver", 1.0, 0.5)]
    watch = CreditWatch()
    for step in range(2):
        watch.check(trainer(signal_within=3), step, flat)
    with pytest.raises(CreditError, match="step 2: no turn of the first 3 steps has an advantage"):
        watch.check(trainer(signal_within=3), 2, flat)
    seen = CreditWatch()
    for step, samples in enumerate([flat, signal, flat, flat, flat]):
        seen.check(trainer(signal_within=3), step, samples)
    resumed = CreditWatch()  # begins at step 2: the steps before are not known
    for step in range(2, 9):
        resumed.check(trainer(signal_within=3), step, flat)


@pytest.mark.parametrize(
    ("rewards", "valid_share", "reason"),
    [
        ((0.0, 0.0), 0.0, r"no reply of this step was well-formed \(agent/\*/valid_ratio is 0\)"),
        ((0.0, 0.0), 0.5, "every reward of this step is 0; take easier tasks"),
        ((1.0, 1.0), 1.0, "every reward of this step is 1; take harder tasks"),
        ((0.0, 1.0), 1.0, "all turns that are compared got equal rewards; change tasks"),
    ],
)
def test_d2_the_line_says_why_there_is_no_advantage(
    rewards: tuple[float, float], valid_share: float, reason: str
) -> None:
    samples = [turn(name, "solver", reward) for name, reward in zip("ab", rewards, strict=True)]
    with pytest.raises(CreditError, match=f"so nothing was learned: {reason}"):
        CreditWatch().check(trainer(signal_within=1), 0, samples, valid_share)


def test_d2_a_real_loop_in_which_all_rewards_are_equal_ends_after_the_first_steps(
    tmp_path: Path,
) -> None:
    def always_right(prompt: tuple[int, ...], call: int) -> bytes:
        return box(task_of(prompt))

    run = make_run(tmp_path, always_right, "trainer.steps=4", "trainer.signal_within=2")
    gangs: Any = {policy: SimulatedGang(lambda _: 0.0) for policy in run.config.policies}
    tasks = run.rollouts.schedule.batch(0) + run.rollouts.schedule.batch(1)
    session = make_session(run.config, tmp_path, tasks, engines_of(run), gangs, run.logbook)  # type: ignore[arg-type]
    session = with_engines(session, engines_of(run), Bytes())
    with pytest.raises(CreditError, match="step 1: no turn of the first 2 steps has an advantage"):
        asyncio.run(train_steps(session, 0))


def test_rewards_of_very_different_scales_are_told_of_where_credit_by_task_mixes_them() -> None:
    """A solver's 0 or 1 beside a spender's -50 to 0: the trajectory's vote is the spender's noise."""
    mixed = [
        turn("a", "solver", 1.0),
        turn("b", "solver", 0.0),
        turn("a", "spender", -50.0),
        turn("b", "spender", 0.0),
    ]

    def told(name: str, samples: list[Sample], **options: str) -> str:
        rule = AdvantageConfig(name=name, options=options)
        return CreditWatch().scale_warning(samples, {"solver": rule, "spender": rule})

    assert told("grpo", mixed) == (
        "agents' reward scales differ 50x (spender 50, solver 1): group-relative credit by task will mostly be noise; "
        "use drmas or normalised rewards"
    )
    assert told("rloo", mixed) and told("reinforce_pp_baseline", mixed) and told("gigpo", mixed)
    assert told("drmas", mixed) == told("grpo", mixed, peers="agent") == told("remax", mixed) == ""
    assert told("grpo", mixed[:2]) == ""  # the spender's turns are not there
    shared = [
        turn("a", "solver", 1.0),
        turn("b", "solver", 0.0),
        turn("a", "spender", 9.9),
        turn("b", "spender", 0.0),
    ]
    assert told("grpo", shared) == ""
    assert (
        told("grpo", [turn("a", "solver", 5.0), turn("a", "spender", 99.0)]) == ""
    )  # nobody's rewards differ
    watch, rules = CreditWatch(), {"solver": AdvantageConfig(name="grpo")}
    other = [turn("a", "buyer", -9e3), turn("b", "buyer", 0.0)]
    steps = [mixed, shared, mixed, [*mixed, *other], mixed]
    assert [bool(watch.scale_warning(samples, rules)) for samples in steps] == [
        True,
        False,
        False,
        True,
        False,
    ]
