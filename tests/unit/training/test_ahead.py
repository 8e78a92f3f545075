"""Collection ahead of training, in virtual time: never further than allowed, nothing left over, nothing twice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings, strategies

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.stop_signal import Stopped
from mcore_mas.training.loop import train_steps
from rollout.records.files import read_trajectories
from tests.support.simulated import Log, SimulatedEngine, engines_of, handed_over, simulated_run
from tests.support.virtual_time import run_virtually

SHAPE = ["trainer.tasks_per_step=2", "trainer.group_size=2"]


def written(run, step):
    return read_trajectories(run.rollouts.collected.folder / f"step_{step:06d}.parquet")


def train(run, first=0):
    async def main():
        try:
            await train_steps(run, first)
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert [engine.running for engine in engines_of(run).values()] == [0, 0]

    run_virtually(main())


DELAYS = strategies.fixed_dictionaries(
    {
        "seed": strategies.integers(0, 2**16),
        "pace": strategies.sampled_from(
            [0.1, 1.0, 5.0]
        ),  # replies much faster, as fast, much slower than updates
        "updates_s": strategies.lists(
            strategies.floats(0.0, 40.0), min_size=2, max_size=4
        ),  # in turn
        "hand_over_s": strategies.sampled_from([0.0, 0.3, 20.0]),
        "slots": strategies.sampled_from([1, 3, 100]),
        "oversample": strategies.sampled_from([1.0, 1.5]),
        "own": strategies.sampled_from(
            [
                (),
                ("+trainer.updates_per_step=2",),
                ("+trainer.alternate={order: [solver, verifier]}",),
            ]
        ),
    }
)
SLOW_REPLIES = {
    "seed": 1,
    "pace": 5.0,
    "updates_s": [5.0, 0.0],
    "hand_over_s": 0.3,
    "slots": 3,
    "oversample": 1.0,
    "own": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_no_turn_is_trained_further_behind_than_allowed_whatever_takes_how_long(
    tmp_path, staleness
):
    seen: Counter[str] = Counter()

    @settings(max_examples=5)
    @given(DELAYS)
    @example(SLOW_REPLIES)
    def holds(delays):
        seen["runs"] += 1
        seen.update(check_ages(tmp_path / str(seen["runs"]), staleness, **delays))

    holds()
    assert seen["at the bound"]  # it is met, not only kept
    assert seen["straddling"]  # weights came while replies were under way


def check_ages(folder, staleness, *, seed, pace, updates_s, hand_over_s, slots, oversample, own):
    """Train and count every turn's age by hand; how many turns were as old as allowed, and how many changed weights."""
    steps = 4
    rows: list[dict[str, float]] = []
    handed = [
        {"solver": [0], "verifier": [0]}
    ]  # before each step: without a signal there is no update
    run = simulated_run(
        folder,
        *SHAPE,
        f"seed={seed}",
        f"trainer.steps={steps}",
        f"+trainer.staleness={staleness}",
        f"+trainer.oversample={oversample}",
        *(f"+policies.{policy}.max_in_flight={slots}" for policy in handed[0]),
        *own,
        tokens=lambda at: 12 + int(at % 60 * pace),
        seconds=lambda update: updates_s[update % len(updates_s)],
        hand_over_s=hand_over_s,
    )

    def report(step, metrics):
        rows.append(dict(metrics))
        handed.append({name: list(sync.versions) for name, sync in run.weight_sync.items()})

    run = replace(run, logbook=Log(report))
    train(run)
    seen: Counter[str] = Counter()
    for step, row in enumerate(rows):
        turns = [turn for t in written(run, step) if t.status == "completed" for turn in t.turns]
        for turn in turns:
            assert turn.versions[0].start == 0 and turn.versions[-1].end == len(turn.completion_ids)
            assert all(
                a.end == b.start for a, b in zip(turn.versions, turn.versions[1:], strict=False)
            )
            assert all(
                a.version < b.version
                for a, b in zip(turn.versions, turn.versions[1:], strict=False)
            )
        # at the update, as told by the trajectories alone
        trained = [turn for turn in turns if turn.policy in run.config.in_turn(step)]
        ages = [sum(v > turn.oldest_version for v in handed[step][turn.policy]) for turn in trained]
        assert max(ages, default=0) <= staleness
        counts = {f"staleness/turns_{age}": ages.count(age) for age in ages}
        assert {name: n for name, n in row.items() if name.startswith("staleness/turns_")} == counts
        if ages:
            assert row["staleness/max"] == max(ages)
            assert row["staleness/mean"] == pytest.approx(sum(ages) / len(ages))
        seen["at the bound"] += ages.count(staleness)
        seen["straddling"] += sum(len(turn.versions) > 1 for turn in turns)
    assert len(rows) == steps
    return seen


def test_threads_take_no_virtual_time():
    async def main():
        beside = asyncio.create_task(asyncio.sleep(5))
        await asyncio.to_thread(time.sleep, 0.05)
        between = asyncio.get_running_loop().time()
        await beside
        return between, asyncio.get_running_loop().time()

    assert run_virtually(main()) == (0.0, 5.0)


def test_without_staleness_a_step_trains_what_it_collects_and_nothing_runs_beside(tmp_path):
    rows: list[dict[str, float]] = []
    run = simulated_run(
        tmp_path / "run",
        *SHAPE,
        "trainer.steps=3",
        seconds=lambda _: 100.0,
        report=lambda step, metrics: rows.append(dict(metrics)),
    )
    train(run)
    plain = simulated_run(tmp_path / "plain", *SHAPE, "trainer.steps=3")

    async def by_hand():
        for step in range(3):
            await plain.rollouts.collect_batch(step)
            for engine in engines_of(plain).values():
                await engine.commit_update(handed_over(step + 1))

    run_virtually(by_hand())
    for step in range(3):
        assert written(run, step) == written(plain, step)
        assert {turn.policy_version for t in written(run, step) for turn in t.turns} == {step}
    assert not any(name.startswith("staleness") for row in rows for name in row)
    assert all(
        batch.ages is None
        for gang in run.groups.values()
        for update in gang.updates
        for batch in update
    )


def test_stale_replies_say_so_in_their_micro_batches(tmp_path):
    run = simulated_run(
        tmp_path,
        *SHAPE,
        "trainer.steps=3",
        "+trainer.staleness=1",
        tokens=lambda _: 12,
        seconds=lambda _: 60.0,
    )
    train(run)
    first, *later = run.groups["solver"].updates
    assert all(batch.ages is None for batch in first)
    for update in later:  # collected while the step before was trained
        assert {age for batch in update for age in batch.ages.tolist()} == {1.0}


def test_training_stops_before_it_trains_what_is_too_old(tmp_path):
    run = simulated_run(
        tmp_path, *SHAPE, "trainer.steps=4", "+trainer.staleness=1", seconds=lambda _: 60.0
    )

    class Stuck(SimulatedEngine):
        async def commit_update(self, update):
            pass  # says that it has them

    for engine in engines_of(run).values():
        engine.__class__ = Stuck
    with pytest.raises(
        TrainingError,
        match=r"sampled by version 0 of policy \w+, which is 2 hand-overs behind; .* allows 1",
    ):
        train(run)


def test_a_run_that_is_told_to_stop_goes_on_without_losing_or_repeating_a_step(tmp_path):
    settings = [*SHAPE, "trainer.steps=5", "+trainer.staleness=2"]
    reported: list[int] = []

    def seconds(updates: int) -> float:
        if (
            updates == 1 and not reported[1:]
        ):  # in the middle of the second step's update, which is finished
            os.kill(os.getpid(), signal.SIGTERM)
        return 60.0

    def report(step, metrics):
        reported.append(step)

    run = simulated_run(tmp_path, *settings, seconds=seconds, report=report)
    with pytest.raises(Stopped, match="after step 2"):
        train(run)
    ahead = written(run, 2)  # was collected, and not trained
    found = run.checkpoints.newest(print)
    assert found is not None and found.step == 2

    again = simulated_run(tmp_path, *settings, seconds=seconds, report=report)
    for engine in engines_of(again).values():
        asyncio.run(engine.commit_update(handed_over(2)))
    for sync in again.weight_sync.values():
        sync.versions[:] = [0, 2]
    train(again, first=2)
    assert reported == [0, 1, 2, 3, 4]
    assert written(again, 2) == ahead


def test_what_fails_ahead_fails_the_step_it_belongs_to(tmp_path):
    reported: list[int] = []
    run = simulated_run(
        tmp_path,
        *SHAPE,
        "trainer.steps=4",
        "+trainer.staleness=2",
        "+collection.trajectory_s=0.5",
        tokens=lambda seed: 12,
        seconds=lambda _: 60.0,
        report=lambda step, metrics: reported.append(step),
    )
    with pytest.raises(
        TrainingError,
        match="step 0: all 4 trajectories failed; the first: the trajectory's deadline",
    ):
        train(run)
    assert reported == []


def test_oversampling_gives_up_the_slowest_of_each_group(tmp_path):
    rows: list[dict[str, float]] = []
    run = simulated_run(
        tmp_path,
        "trainer.tasks_per_step=2",
        "trainer.group_size=4",
        "trainer.steps=2",
        "+trainer.oversample=1.5",
        report=lambda step, metrics: rows.append(dict(metrics)),
    )
    train(run)
    assert [(row["rollout/trajectories"], row["rollout/aborted"]) for row in rows] == [
        (12.0, 4.0)
    ] * 2
    completed = {t.task_id: 0 for t in written(run, 0)}
    for t in written(run, 0):
        completed[t.task_id] += t.status == "completed"
    assert set(completed.values()) == {4}


def test_what_shares_memory_with_its_trainer_is_not_collected_ahead():
    settings = ["experiment=demo_math", "+trainer.staleness=1", "+policies.solver.offload=true"]
    with pytest.raises(ConfigError, match=r"policy 'solver': offload frees .* choose one of them"):
        resolve(settings)
