"""Checks of advantages, reward scales and shares of the gradient, which stop a run or warn."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.config.estimators import AdvantageConfig
from mcore_mas.config.trainer import TrainerConfig, WatchConfig
from mcore_mas.credit.samples import CreditError, Sample
from mcore_mas.credit.watch import CreditWatch
from mcore_mas.training.loop import train_steps
from mcore_mas.training.policy_trainer import PolicyTrainer
from tests.support.scripted_run import Bytes, box, make_run, task_of
from tests.support.simulated import (
    Log,
    SimulatedGang,
    engines_of,
    make_session,
    simulated_run,
    with_engines,
)
from tests.support.virtual_time import run_virtually

# Overrides of the math team of the demo, after which both agents train one policy.
SHARED = ("+agents.verifier.policy=solver", "~policies.verifier")


def trainer(**changes: Any) -> TrainerConfig:
    return TrainerConfig(steps=1, tasks_per_step=1, group_size=2, **changes)


def turn(trajectory: str, agent: str, reward: float, advantage: float = 0.0) -> Sample:
    """Return the sample of a turn with one token."""
    return Sample(
        policy="p",
        agent=agent,
        task="t",
        trajectory=trajectory,
        turn=0,
        prompt_ids=(1,),
        completion_ids=(2,),
        reward=reward,
        advantages=(advantage,),
    )


def test_an_advantage_beyond_the_bound_stops_the_run_with_one_line() -> None:
    samples = [turn("a", "solver", 1.0, -0.7), turn("b", "searcher", 0.0, -7.5e5)]
    CreditWatch().check(trainer(max_advantage=None), 0, samples)
    CreditWatch().check(trainer(), 0, [turn("a", "solver", 1.0, -1000.0)])
    with pytest.raises(CreditError) as error:
        CreditWatch().check(trainer(), 3, samples)
    assert str(error.value) == (
        "step 4: agent searcher has an advantage of 7.5e+05 (trajectory b, turn 0), beyond trainer.max_advantage 1000; "
        "its rewards are out of scale, or their σ is nearly zero: see `mcore-mas explain`, and change "
        "the advantage, the reward or the bound"
    )


def test_an_advantage_of_nan_stops_the_run_at_any_position() -> None:
    for advantages in ([1.0, math.nan, 2.0], [math.nan, 1.0, 2.0], [1.0, 2.0, math.nan]):
        three_turns = [
            turn(f"t{i}", "solver", 0.0, advantage) for i, advantage in enumerate(advantages)
        ]
        one_turn = replace(three_turns[0], completion_ids=(1, 2, 3), advantages=tuple(advantages))
        for samples in (three_turns, [one_turn]):
            for bound in (1000.0, None):
                with pytest.raises(CreditError) as error:
                    CreditWatch().check(trainer(max_advantage=bound), 0, samples)
                position = advantages.index(math.nan) if samples is three_turns else 0
                assert str(error.value) == (
                    f"step 1: agent solver has an advantage of nan (trajectory t{position}, turn 0), expected a "
                    "number; see `mcore-mas explain`, and change the advantage or the reward"
                )


def test_a_run_whose_first_steps_have_no_advantage_stops() -> None:
    settings = trainer(signal_within=3)
    without_advantage = [turn("a", "solver", 1.0)]
    with_advantage = [turn("a", "solver", 1.0, 0.5)]
    watch = CreditWatch()
    for step in range(2):
        watch.check(settings, step, without_advantage)
    with pytest.raises(CreditError, match="step 3: no turn of the first 3 steps has an advantage"):
        watch.check(settings, 2, without_advantage)

    # One advantage in the first three steps is enough.
    watch = CreditWatch()
    watch.check(settings, 0, without_advantage)
    watch.check(settings, 1, with_advantage)
    for step in range(2, 5):
        watch.check(settings, step, without_advantage)

    # A run that continues at step 2 does not know the earlier steps, and never stops.
    watch = CreditWatch()
    for step in range(2, 9):
        watch.check(settings, step, without_advantage)


def test_a_training_whose_last_steps_have_no_advantage_is_named_at_its_end() -> None:
    watch = CreditWatch()
    watch.check(trainer(), 0, [turn("a", "solver", 1.0, 0.5)])
    for step in range(1, 5):
        watch.check(trainer(), step, [turn("a", "solver", 0.0)], 0.5)
    assert watch.collapse_warning() == ""  # four steps
    assert not watch.has_just_collapsed
    watch.check(trainer(), 5, [turn("a", "solver", 0.0)], 0.0)
    assert watch.collapse_warning() == (
        "no turn of the last 5 steps has an advantage, so nothing was learned in them; in the last "
        "step: no reply of this step was well-formed (agent/*/valid_ratio is 0); reward attempts at "
        "the format, show it in the prompt, or begin with a cold start; see `mcore-mas show`"
    )
    assert watch.has_just_collapsed
    watch.check(trainer(), 6, [turn("a", "solver", 1.0, 0.5)])
    assert watch.collapse_warning() == ""
    assert not watch.has_just_collapsed


def test_the_log_of_a_collapsed_training_has_the_warning_in_its_fifth_step_and_at_its_end(
    tmp_path: Path,
) -> None:
    def always_right(prompt: tuple[int, ...], call: int) -> bytes:
        return box(task_of(prompt))

    settings = ["trainer.steps=6", "trainer.tasks_per_step=1", "trainer.signal_within=null"]
    run = make_run(tmp_path, always_right, *settings)
    gangs: Any = {policy: SimulatedGang(lambda _: 0.0) for policy in run.config.policies}
    tasks = [task for step in range(6) for task in run.rollouts.schedule.batch(step)]
    session = make_session(run.config, tmp_path, tasks, engines_of(run), gangs, run.logbook)  # type: ignore[arg-type]
    session = with_engines(session, engines_of(run), Bytes())
    asyncio.run(train_steps(session, 0))
    assert isinstance(session.logbook, Log)
    notes = [note for note in session.logbook.notes if "has an advantage" in note]
    in_training, at_end = notes
    assert in_training.startswith(
        "step 5: no turn of the last 5 steps has an advantage, so nothing"
    )
    assert at_end.startswith("no turn of the last 6 steps has an advantage, so nothing was learned")


@pytest.mark.parametrize(
    ("rewards", "valid_share", "reason"),
    [
        ((0.0, 0.0), 0.0, r"no reply of this step was well-formed \(agent/\*/valid_ratio is 0\)"),
        ((0.0, 0.0), 0.5, "every reward of this step is 0; take easier tasks"),
        ((1.0, 1.0), 1.0, "every reward of this step is 1; take harder tasks"),
        (
            (0.0, 1.0),
            1.0,
            "turns that are compared with each other got equal rewards; change tasks",
        ),
    ],
)
def test_the_error_has_the_reason_why_there_is_no_advantage(
    rewards: tuple[float, float], valid_share: float, reason: str
) -> None:
    samples = [turn(name, "solver", reward) for name, reward in zip("ab", rewards, strict=True)]
    with pytest.raises(CreditError, match=f"so nothing was learned: {reason}"):
        CreditWatch().check(trainer(signal_within=1), 0, samples, valid_share)


def test_the_error_of_a_step_without_turns_names_failures_and_the_filter() -> None:
    message = "so nothing was learned: no turn of this step was left to compare"
    with pytest.raises(CreditError, match=message):
        CreditWatch().check(trainer(signal_within=1), 0, [], 1.0)


def test_a_real_loop_in_which_all_rewards_are_equal_ends_after_the_first_steps(
    tmp_path: Path,
) -> None:
    def always_right(prompt: tuple[int, ...], call: int) -> bytes:
        return box(task_of(prompt))

    run = make_run(tmp_path, always_right, "trainer.steps=4", "trainer.signal_within=2")
    gangs: Any = {policy: SimulatedGang(lambda _: 0.0) for policy in run.config.policies}
    tasks = run.rollouts.schedule.batch(0) + run.rollouts.schedule.batch(1)
    session = make_session(run.config, tmp_path, tasks, engines_of(run), gangs, run.logbook)  # type: ignore[arg-type]
    session = with_engines(session, engines_of(run), Bytes())
    with pytest.raises(CreditError, match="step 2: no turn of the first 2 steps has an advantage"):
        asyncio.run(train_steps(session, 0))


def test_credit_by_task_warns_of_rewards_with_very_different_scales() -> None:
    """The solver gets 0 or 1 and the spender -50 to 0, so that a trajectory's mean is the spender's noise."""
    solver_turns = [turn("a", "solver", 1.0), turn("b", "solver", 0.0)]
    different_scales = [*solver_turns, turn("a", "spender", -50.0), turn("b", "spender", 0.0)]

    def warning(name: str, samples: list[Sample], **options: str) -> str:
        estimator = AdvantageConfig(name=name, options=options)
        estimators = {"solver": estimator, "spender": estimator}
        return CreditWatch().scale_warning(samples, estimators)

    assert warning("grpo", different_scales) == (
        "agents' reward scales differ 50x (spender 50, solver 1): group-relative credit by task will mostly be noise; "
        "use drmas or normalised rewards"
    )
    for name in ("rloo", "reinforce_pp_baseline", "gigpo"):
        assert warning(name, different_scales)

    # Credit by agent does not mix the rewards.
    assert warning("drmas", different_scales) == ""
    assert warning("grpo", different_scales, peers="agent") == ""
    assert warning("remax", different_scales) == ""

    # There is nothing to mix with one agent, with similar scales, or with equal rewards of each agent.
    assert warning("grpo", solver_turns) == ""
    similar_scales = [*solver_turns, turn("a", "spender", 9.9), turn("b", "spender", 0.0)]
    assert warning("grpo", similar_scales) == ""
    one_trajectory = [turn("a", "solver", 5.0), turn("a", "spender", 99.0)]
    assert warning("grpo", one_trajectory) == ""


def test_a_warning_of_scales_is_given_once_for_each_set_of_agents() -> None:
    solver_turns = [turn("a", "solver", 1.0), turn("b", "solver", 0.0)]
    with_spender = [*solver_turns, turn("a", "spender", -50.0), turn("b", "spender", 0.0)]
    similar_scales = [*solver_turns, turn("a", "spender", 9.9), turn("b", "spender", 0.0)]
    with_buyer = [*with_spender, turn("a", "buyer", -9e3), turn("b", "buyer", 0.0)]
    watch = CreditWatch()
    estimators = {"solver": AdvantageConfig(name="grpo")}
    assert watch.scale_warning(with_spender, estimators)
    assert not watch.scale_warning(similar_scales, estimators)
    assert not watch.scale_warning(with_spender, estimators)
    assert watch.scale_warning(with_buyer, estimators)
    assert not watch.scale_warning(with_spender, estimators)


def test_agents_without_a_turn_in_the_first_five_steps_are_named_once() -> None:
    watch = CreditWatch()
    agents = ["solver", "critic", "judge"]
    warnings = [
        # The judge is asked in the fourth step only.
        watch.idle_warning(
            agents, {"solver", "judge"} if step == 3 else {"solver"}, is_last=step == 7
        )
        for step in range(8)
    ]
    assert [step for step, warning in enumerate(warnings) if warning] == [4]
    assert warnings[4] == (
        "agent critic took no turn in the last 5 steps, so it was not trained meanwhile; check when the orchestra "
        "asks it, or leave it out of the team"
    )


def test_agents_without_a_turn_in_a_shorter_run_are_named_after_its_last_step() -> None:
    watch = CreditWatch()
    agents = ["solver", "critic", "judge"]
    assert watch.idle_warning(agents, {"solver"}, is_last=True) == (
        "agents critic, judge took no turn in the last step, so they were not trained meanwhile; check when the "
        "orchestra asks them, or leave them out of the team"
    )
    assert CreditWatch().idle_warning(agents, agents, is_last=True) == ""


def test_a_real_loop_notes_an_extra_agent_that_the_orchestra_never_asks(tmp_path: Path) -> None:
    extra = "+agents.judge={role: verifier, policy: verifier}"
    session = simulated_run(tmp_path, "trainer.steps=2", "trainer.tasks_per_step=2", extra)
    run_virtually(train_steps(session, 0))
    assert isinstance(session.logbook, Log)
    notes = [note for note in session.logbook.notes if "took no turn" in note]
    assert [note.partition(",")[0] for note in notes] == [
        "step 2: agent judge took no turn in the last 2 steps"
    ]


def test_an_agent_that_has_nearly_the_whole_gradient_for_some_steps_is_reported_once() -> None:
    settings = WatchConfig(share=0.8, steps=3)
    # The bound itself is not too much, and a smaller share begins the count again.
    solver_shares = [0.9, 0.9, 0.8, 0.9, 0.85, 0.81, 0.9, 0.1, 0.9, 0.9, 0.9]
    watch = CreditWatch()
    warnings = [
        watch.share_warning(settings, {"solver": share, "verifier": 1 - share})
        for share in solver_shares
    ]
    assert [number for number, warning in enumerate(warnings) if warning] == [5]
    assert warnings[5] == (
        "solver had more than 80% of the gradient of a shared policy in 3 steps in a row, so the "
        "other agents of this policy hardly train; set loss.balance=agents, lower the loss_weight of "
        "this agent, or give it a policy of its own (trainer.watch)"
    )


def test_a_step_in_which_the_policy_is_not_trained_leaves_the_count() -> None:
    watch = CreditWatch()
    shares = [{"solver": 0.95}, {}, {"solver": 0.95}]
    warnings = [watch.share_warning(WatchConfig(steps=2), step_shares) for step_shares in shares]
    assert [bool(warning) for warning in warnings] == [False, False, True]


def test_without_a_bound_no_share_is_reported() -> None:
    watch = CreditWatch()
    assert not watch.share_warning(WatchConfig(share=None, steps=1), {"solver": 1.0})


def test_a_real_loop_notes_a_dominant_agent_and_reports_its_share(tmp_path: Path) -> None:
    class UnequalGang(SimulatedGang):
        async def update(self, microbatches: Any, schedule_position: Any = None) -> Any:
            metrics = await super().update(microbatches, schedule_position)
            norms = {"agent/solver/grad_norm": 19.0, "agent/verifier/grad_norm": 1.0}
            return metrics | norms

    settings = ["trainer.steps=3", "trainer.tasks_per_step=2", "trainer.watch.steps=2", *SHARED]
    rows: dict[int, Any] = {}
    session = simulated_run(
        tmp_path, *settings, report=lambda step, metrics: rows.update({step: metrics})
    )
    gang: Any = UnequalGang(lambda _: 0.0)
    trainers = {"solver": PolicyTrainer("solver", session.config, gang)}
    run_virtually(train_steps(replace(session, trainers=trainers), 0))
    assert rows[0]["agent/solver/gradient_share"] == 0.95
    assert rows[0]["agent/verifier/gradient_share"] == 0.05
    assert isinstance(session.logbook, Log)
    notes = [note for note in session.logbook.notes if "of the gradient" in note]
    assert [note.partition(" of the")[0] for note in notes] == ["step 2: solver had more than 90%"]
