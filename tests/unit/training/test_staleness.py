"""Collection ahead of training, in virtual time: turns are never older than their policy allows."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.stop_signal import Stopped
from mcore_mas.training.loop import train_steps
from rollout.records.trajectory import Status, Turn
from rollout.sync.transport import WeightUpdate
from tests.support.simulated import (
    Log,
    SimulatedEngine,
    engines_of,
    handed_over,
    simulated_run,
)
from tests.support.simulated_training import (
    SMALL_STEPS,
    train,
    written_trajectories,
)
from tests.support.virtual_time import run_virtually

ALTERNATE = "+trainer.alternate={order: [solver, verifier]}"
POLICIES = ("solver", "verifier")


def staleness_of(solver: int, verifier: int) -> list[str]:
    return [f"+policies.solver.staleness={solver}", f"+policies.verifier.staleness={verifier}"]


class TestConfig:
    @pytest.mark.parametrize(
        ("overrides", "last_steps"),
        [
            ([], [0, 1, 2, 3, 4, 5]),
            (["+trainer.staleness=2"], [2, 3, 4, 5, 5, 5]),
            # the smallest staleness of a policy holds for the team
            (["+trainer.staleness=2", "+policies.solver.staleness=1"], [1, 2, 3, 4, 5, 5]),
            (staleness_of(0, 3), [0, 1, 2, 3, 4, 5]),
            # the solver is trained in the steps 0, 2 and 4, and the verifier in 1, 3 and 5
            ([ALTERNATE, "+trainer.staleness=1"], [2, 3, 4, 5, 5, 5]),
            ([ALTERNATE, *staleness_of(0, 1)], [0, 2, 2, 4, 4, 5]),
            ([ALTERNATE, *staleness_of(2, 1)], [3, 3, 5, 5, 5, 5]),
            # nothing is trained
            (
                ["+agents.solver.loss_weight=0", "+agents.verifier.loss_weight=0"],
                [0, 1, 2, 3, 4, 5],
            ),
        ],
    )
    def test_the_last_step_that_may_be_collected_during_each_step(
        self, overrides: list[str], last_steps: list[int]
    ) -> None:
        values = resolve(["experiment=demo_math", "trainer.steps=6", *overrides])
        config = RunConfig.from_values(values, "test")
        for step, last in enumerate(last_steps):
            allowed = [later for later in range(step, 6) if config.may_collect(later, step)]
            assert max(allowed) == last

    @pytest.mark.parametrize(
        ("overrides", "steps"),
        [
            ([], 1),
            (["+trainer.staleness=2"], 3),
            (["+trainer.staleness=2", "+policies.solver.staleness=1"], 2),
            (["+trainer.staleness=9"], 6),  # all steps of the run
            # the solver changes once and the verifier once before step 2 is trained
            ([ALTERNATE, "+trainer.staleness=1"], 3),
            # from step 0 on 1 step, and from step 1 on the steps 1 and 2
            ([ALTERNATE, *staleness_of(0, 1)], 2),
            ([ALTERNATE, *staleness_of(2, 1)], 4),
        ],
    )
    def test_the_steps_that_may_be_collected_at_the_same_time(
        self, overrides: list[str], steps: int
    ) -> None:
        values = resolve(["experiment=demo_math", "trainer.steps=6", *overrides])
        assert RunConfig.from_values(values, "test").concurrent_steps == steps

    def test_a_policy_that_shares_memory_with_its_trainer_cannot_be_collected_ahead(self) -> None:
        message = r"policy 'solver': offload frees .* set offload to false, or"
        with pytest.raises(ConfigError, match=message):
            resolve(
                [
                    "experiment=demo_math",
                    "+trainer.staleness=1",
                    "+policies.solver.offload=true",
                ]
            )

    def test_a_frozen_policy_with_offload_does_not_keep_others_from_being_collected_ahead(
        self,
    ) -> None:
        teacher = [
            "+policies.teacher={model: m, offload: true}",
            "+policies.solver.teacher={policy: teacher}",
        ]
        values = resolve(["experiment=demo_math", "+trainer.staleness=1", *teacher])
        assert RunConfig.from_values(values, "test").collects_ahead


@dataclass(frozen=True)
class Timing:
    """Times of a simulated run.

    Attributes:
        seed: of the run.
        pace: length of replies; updates take about as long at 1.
        updates_s: seconds of the updates, in turn.
        hand_over_s: seconds of a weight sync.
        slots: requests that a policy's engine has at a time.
        oversample: `trainer.oversample`.
        overrides: of the config.
    """

    seed: int = 1
    pace: float = 5.0
    updates_s: tuple[float, ...] = (5.0, 0.0)
    hand_over_s: float = 0.3
    slots: int = 3
    oversample: float = 1.0
    overrides: tuple[str, ...] = ()


TIMINGS = strategies.builds(
    Timing,
    seed=strategies.integers(0, 2**16),
    pace=strategies.sampled_from([0.1, 1.0, 5.0]),
    updates_s=strategies.lists(strategies.floats(0.0, 40.0), min_size=2, max_size=4).map(tuple),
    hand_over_s=strategies.sampled_from([0.0, 0.3, 20.0]),
    slots=strategies.sampled_from([1, 3, 100]),
    oversample=strategies.sampled_from([1.0, 1.5]),
    overrides=strategies.sampled_from([(), ("+trainer.updates_per_step=2",), (ALTERNATE,)]),
)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_no_turn_is_trained_further_behind_than_allowed_whatever_takes_how_long(
    tmp_path: Path, staleness: int
) -> None:
    counts: Counter[str] = Counter()

    @settings(max_examples=5)
    @given(TIMINGS)
    @example(Timing())
    def holds(timing: Timing) -> None:
        counts["runs"] += 1
        counts.update(train_and_check_ages(tmp_path / str(counts["runs"]), staleness, timing))

    holds()
    assert counts["turns as old as allowed"]
    assert counts["turns with several versions"]


def train_and_check_ages(folder: Path, staleness: int, timing: Timing) -> Counter[str]:
    """Train, and compare the ages that the run reports with those in its trajectories.

    Returns:
        Numbers of turns by their kind.
    """
    steps = 4
    rows: list[dict[str, float]] = []
    # Versions that the engines were given before each step. A step may be without an update.
    versions_before: list[dict[str, list[int]]] = [{policy: [0] for policy in POLICIES}]
    session = simulated_run(
        folder,
        *SMALL_STEPS,
        f"seed={timing.seed}",
        f"trainer.steps={steps}",
        f"+trainer.staleness={staleness}",
        f"+trainer.oversample={timing.oversample}",
        *(f"+policies.{policy}.max_in_flight={timing.slots}" for policy in POLICIES),
        *timing.overrides,
        tokens=lambda seed: 12 + int(seed % 60 * timing.pace),
        seconds=lambda update: timing.updates_s[update % len(timing.updates_s)],
        hand_over_s=timing.hand_over_s,
    )

    def report(step: int, metrics: Any) -> None:
        rows.append(dict(metrics))
        versions_before.append(
            {policy: list(sync.versions) for policy, sync in session.weight_sync.items()}
        )

    session = replace(session, logbook=Log(report))  # type: ignore[arg-type]
    train(session)
    assert len(rows) == steps

    counts: Counter[str] = Counter()
    for step, row in enumerate(rows):
        turns: list[Turn] = []
        for trajectory in written_trajectories(session, step):
            if trajectory.status is Status.COMPLETED:
                turns += trajectory.turns
        for turn in turns:
            check_spans(turn)
        ages = []
        for turn in turns:
            if turn.policy in session.config.in_turn(step):
                versions = versions_before[step][turn.policy]
                ages.append(sum(version > turn.oldest_version for version in versions))
        check_reported_ages(row, ages)
        assert max(ages, default=0) <= staleness
        counts["turns as old as allowed"] += ages.count(staleness)
        counts["turns with several versions"] += sum(len(turn.versions) > 1 for turn in turns)
    return counts


def check_spans(turn: Turn) -> None:
    """Check that the versions of a turn follow each other and cover its tokens."""
    assert turn.versions[0].start == 0
    assert turn.versions[-1].end == len(turn.completion_ids)
    for span, following in pairwise(turn.versions):
        assert span.end == following.start
        assert span.version < following.version


def check_reported_ages(row: dict[str, float], ages: list[int]) -> None:
    """Check the staleness metrics of a step."""
    prefix = "staleness/turns_"
    reported = {name: value for name, value in row.items() if name.startswith(prefix)}
    assert reported == {f"{prefix}{age}": ages.count(age) for age in ages}
    if ages:
        assert row["staleness/max"] == max(ages)
        assert row["staleness/mean"] == pytest.approx(sum(ages) / len(ages))


def test_bounds_of_single_policies_hold(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    all_versions: dict[str, set[int]] = {policy: set() for policy in POLICIES}

    def report(step: int, metrics: Any) -> None:
        rows.append(dict(metrics))
        for policy, sync in session.weight_sync.items():
            all_versions[policy].update(sync.versions)

    session = simulated_run(
        tmp_path,
        "trainer.tasks_per_step=2",
        "trainer.group_size=8",  # large enough that every step has an update
        ALTERNATE,
        *staleness_of(0, 1),
        "trainer.steps=6",
        tokens=lambda seed: 12,
        seconds=lambda update: 60.0,
        report=report,
    )
    run_virtually(train_steps(session, 0))
    assert all_versions == {"solver": {0, 1, 3, 5}, "verifier": {0, 2, 4, 6}}

    # Step 2 trains the solver. It was collected beside step 1, which trains the verifier: the
    # solver's turns are of the newest version, and the verifier's one version behind.
    for step, row in enumerate(rows):
        [trained] = session.config.in_turn(step)
        assert row[f"policy/{trained}/staleness/max"] == 0.0
    turns = [turn for t in written_trajectories(session, 2) for turn in t.turns]
    assert {(turn.policy, turn.oldest_version) for turn in turns} == {
        ("solver", 1),
        ("verifier", 0),
    }


def test_without_staleness_nothing_is_collected_while_a_step_is_trained(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    session = simulated_run(
        tmp_path / "trained",
        *SMALL_STEPS,
        "trainer.steps=3",
        seconds=lambda update: 100.0,
        report=lambda step, metrics: rows.append(dict(metrics)),
    )
    train(session)

    collected = simulated_run(tmp_path / "collected", *SMALL_STEPS, "trainer.steps=3")

    async def collect_one_by_one() -> None:
        for step in range(3):
            await collected.rollouts.collect_batch(step)
            for engine in engines_of(collected).values():
                await engine.commit_update(handed_over(step + 1))

    run_virtually(collect_one_by_one())
    for step in range(3):
        trajectories = written_trajectories(session, step)
        assert trajectories == written_trajectories(collected, step)
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        assert {turn.policy_version for turn in turns} == {step}
    assert not any(name.startswith("staleness") for row in rows for name in row)
    group: Any
    for group in session.groups.values():
        for microbatches in group.updates:
            assert all(microbatch.ages is None for microbatch in microbatches)


def test_microbatches_have_the_ages_of_their_turns(tmp_path: Path) -> None:
    session = simulated_run(
        tmp_path,
        *SMALL_STEPS,
        "trainer.steps=3",
        "+trainer.staleness=1",
        tokens=lambda seed: 12,
        seconds=lambda update: 60.0,
    )
    train(session)
    group: Any = session.groups["solver"]
    first, *later = group.updates
    assert all(microbatch.ages is None for microbatch in first)
    # all later steps were collected while the step before them was trained
    for microbatches in later:
        ages = {age for microbatch in microbatches for age in microbatch.ages.tolist()}
        assert ages == {1.0}


def test_turns_that_are_too_old_are_not_trained(tmp_path: Path) -> None:
    class StuckEngine(SimulatedEngine):
        """Engine that claims to have taken new weights."""

        async def commit_update(self, update: WeightUpdate) -> None:
            pass

    session = simulated_run(
        tmp_path,
        *SMALL_STEPS,
        "trainer.steps=4",
        "+trainer.staleness=1",
        seconds=lambda update: 60.0,
        engine_class=StuckEngine,
    )
    message = r"sampled by version 0 of policy \w+, which is 2 weight updates old; .* allows 1"
    with pytest.raises(TrainingError, match=message):
        train(session)


def test_a_run_that_is_stopped_continues_without_losing_or_repeating_a_step(
    tmp_path: Path,
) -> None:
    overrides = [*SMALL_STEPS, "trainer.steps=5", "+trainer.staleness=2"]
    reported: list[int] = []

    def update_s(update: int) -> float:
        is_in_second_step = update == 1 and len(reported) < 2
        if is_in_second_step:
            os.kill(os.getpid(), signal.SIGTERM)
        return 60.0

    def report(step: int, metrics: Any) -> None:
        reported.append(step)

    session = simulated_run(tmp_path, *overrides, seconds=update_s, report=report)
    with pytest.raises(Stopped, match="after step 2"):
        train(session)
    collected_ahead = written_trajectories(session, 2)
    checkpoint = session.checkpoints.recover_newest(print)
    assert checkpoint is not None
    assert checkpoint.step == 2

    resumed = simulated_run(tmp_path, *overrides, seconds=update_s, report=report)
    for engine in engines_of(resumed).values():
        asyncio.run(engine.commit_update(handed_over(2)))
    for sync in resumed.weight_sync.values():
        sync.versions[:] = [0, 2]
    train(resumed, first=2)
    assert reported == [0, 1, 2, 3, 4]
    assert written_trajectories(resumed, 2) == collected_ahead


def test_a_failure_of_a_step_that_is_collected_ahead_ends_that_step(tmp_path: Path) -> None:
    reported: list[int] = []
    session = simulated_run(
        tmp_path,
        *SMALL_STEPS,
        "trainer.steps=4",
        "+trainer.staleness=2",
        "+collection.trajectory_s=0.5",
        tokens=lambda seed: 12,
        seconds=lambda update: 60.0,
        report=lambda step, metrics: reported.append(step),
    )
    message = "step 1: all 4 trajectories failed; the first: the trajectory's deadline"
    with pytest.raises(TrainingError, match=message):
        train(session)
    assert reported == []


def test_threads_take_no_virtual_time() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        sleeping = asyncio.create_task(asyncio.sleep(5))
        await asyncio.to_thread(time.sleep, 0.05)
        after_thread = loop.time()
        await sleeping
        return after_thread, loop.time()

    assert run_virtually(main()) == (0.0, 5.0)
