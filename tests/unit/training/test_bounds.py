"""Bounds of a policy on how far behind it may be, and of a step on how long it may take."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.runtime.stop_signal import Stopped
from mcore_mas.training.loop import train_steps
from rollout.base.async_tasks import CLEANUP_S
from rollout.records.files import read_trajectories
from rollout.records.trajectory import Status
from tests.support.simulated import (
    Log,
    SimulatedEngine,
    Text,
    engines_of,
    simulated_run,
    with_engines,
)
from tests.support.virtual_time import run_virtually

SHAPE = ["trainer.tasks_per_step=2", "trainer.group_size=2"]
TURNS = "+trainer.alternate={order: [solver, verifier]}"


def ahead(*overrides: str) -> list[int]:
    """The last step that may be collected while step 0, 1, ... is trained, of 6."""
    config = RunConfig.check(
        resolve(["experiment=demo_math", "trainer.steps=6", *overrides]), "test"
    )
    return [
        max(later for later in range(step, 6) if config.may_collect(later, step))
        for step in range(6)
    ]


def bounds(solver: int, verifier: int) -> list[str]:
    return [f"+policies.solver.staleness={solver}", f"+policies.verifier.staleness={verifier}"]


@pytest.mark.parametrize(
    ("overrides", "last"),
    [
        ([], [0, 1, 2, 3, 4, 5]),
        (["+trainer.staleness=2"], [2, 3, 4, 5, 5, 5]),
        (
            ["+trainer.staleness=2", "+policies.solver.staleness=1"],
            [1, 2, 3, 4, 5, 5],
        ),  # the smallest binds the team
        (bounds(0, 3), [0, 1, 2, 3, 4, 5]),
        # solver is trained in steps 0, 2 and 4, verifier in 1, 3 and 5: two steps are one hand-over of each
        ([TURNS, "+trainer.staleness=1"], [2, 3, 4, 5, 5, 5]),
        ([TURNS, *bounds(0, 1)], [0, 2, 2, 4, 4, 5]),  # only beside the verifier's training
        ([TURNS, *bounds(2, 1)], [3, 3, 5, 5, 5, 5]),
        (
            ["+agents.solver.loss_weight=0", "+agents.verifier.loss_weight=0"],
            [0, 1, 2, 3, 4, 5],
        ),  # nothing trains
    ],
)
def test_how_far_ahead_each_step_may_be_collected(overrides, last):
    assert ahead(*overrides) == last


def test_bounds_of_single_policies_hold_and_are_met(tmp_path):
    rows, versions = [], {"solver": set(), "verifier": set()}

    def report(step, metrics):
        rows.append(dict(metrics))
        for name, sync in run.weight_sync.items():  # which keeps those that turns may yet be of
            versions[name].update(sync.versions)

    run = simulated_run(
        tmp_path,
        "trainer.tasks_per_step=2",
        "trainer.group_size=8",  # every step has a signal, and so an update
        TURNS,
        *bounds(0, 1),
        "trainer.steps=6",
        tokens=lambda _: 12,
        seconds=lambda _: 60.0,
        report=report,
    )
    run_virtually(train_steps(run, 0))
    assert versions == {"solver": {0, 1, 3, 5}, "verifier": {0, 2, 4, 6}}
    # step 2 was collected beside the training of step 1, which is the verifier's, and trains the solver, which was not
    # handed over since; its verifier's turns are one hand-over behind, and are not trained
    for step, row in enumerate(rows):
        trained = run.config.in_turn(step)[0]
        assert row[f"policy/{trained}/staleness/max"] == 0.0
    played = read_trajectories(run.rollouts.collected.folder / "step_000002.parquet")
    versions = {(t.policy, t.oldest_version) for p in played for t in p.turns}
    assert versions == {("solver", 1), ("verifier", 0)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["+collection.call_s=9", "+collection.trajectory_s=5"],
            "collection: call_s 9 never comes: trajectory_s 5 is",
        ),
        (
            ["+collection.tool_s=9", "+collection.batch_s=5"],
            "collection: tool_s 9 never comes: batch_s 5 is over befo",
        ),
        (
            ["+agents.verifier.loss_weight=0", "+policies.verifier.staleness=1"],
            r"policies\.verifier\.staleness: nothing trains this policy; leave it out",
        ),
        (
            ["+policies.solver.staleness=-1"],
            r"policies\.solver\.staleness: Input should be greater than or equal to 0",
        ),
        (
            ["+trainer.oversample=0.5"],
            r"trainer\.oversample: Input should be greater than or equal to 1 \(got 0\.5\)",
        ),
        (
            ["+trainer.staleness=1", "+engine.sleep=true"],
            r"engine\.sleep: engines have no rest while staleness is 1",
        ),
        (
            [
                "policies.verifier.model=''",
                "+policies.verifier.remote={model: m}",
                "+policies.verifier.max_in_flight=2",
            ],
            r"policies\.verifier: max_in_flight bounds the requests to an engine; for a remote model set remote\.conc",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(overrides, message):
    with pytest.raises(ConfigError, match=message) as refused:
        resolve(["experiment=demo_math", *overrides])
    assert "\n" not in str(refused.value)


def timed(run, step=0):
    """The experience of a step, and how long it took."""

    async def main():
        return await run.rollouts.collect_batch(step), asyncio.get_running_loop().time()

    return run_virtually(main())


def test_a_steps_deadline_is_for_all_its_batches(tmp_path):
    class Sure(SimulatedEngine):
        async def stream(self, prompt_ids, sampling, hear):
            return await super().stream(prompt_ids, replace(sampling, seed=0), hear)

    def play(name, *overrides):
        run = simulated_run(
            tmp_path / name,
            *SHAPE,
            "filter={name: informative, resample: 2}",
            *overrides,
            tokens=lambda _: 12,
        )
        for engine in engines_of(run).values():
            engine.__class__ = Sure
        return timed(run)

    # all say the same, so that the filter asks for further batches
    whole, took = play("whole")
    assert whole.batches == 3
    each = took / 3
    short, ended = play("short", f"+collection.batch_s={1.5 * each}")
    assert (short.batches, ended) == (2, pytest.approx(1.5 * each))
    first, second = short.groups[:2], short.groups[2:]
    assert {t.status for g in first for t in g.trajectories} == {Status.COMPLETED}
    assert {t.status for g in second for t in g.trajectories} == {
        Status.ABORTED
    }  # and the step goes on
    assert f"the batch's deadline of {1.5 * each:g} s passed" in second[0].trajectories[0].error


def test_the_greedy_trajectories_are_played_beside_the_others(tmp_path):
    settings = [*SHAPE, "orchestra.options.max_loops=1"]
    _, plain = timed(simulated_run(tmp_path / "a", *settings, tokens=lambda _: 12))
    experience, beside = timed(
        simulated_run(tmp_path / "b", *settings, "advantage={name: remax}", tokens=lambda _: 12)
    )
    assert plain == beside
    assert {"greedy"} <= set(experience.samples[0].scores)


def noting(said):
    log = Log()
    log.notes = said
    return log


def test_what_is_lost_is_said_in_a_line_of_its_step(tmp_path):
    said = []

    class Slow(SimulatedEngine):
        calls = 0

        async def stream(self, prompt_ids, sampling, hear):
            type(self).calls += 1
            if type(self).calls == 2:
                await asyncio.sleep(1000)
            return await super().stream(prompt_ids, sampling, hear)

    settings = ["trainer.steps=2", "+collection.call_s=100", "+trainer.oversample=1.5"]
    run = simulated_run(tmp_path, *SHAPE, *settings, tokens=lambda _: 12)
    for engine in engines_of(run).values():
        engine.__class__ = Slow
    run_virtually(train_steps(replace(run, logbook=noting(said)), 0))
    assert said == []  # over-sampling made up for it, and gave it up
    Slow.calls = 0
    run = simulated_run(tmp_path / "2", *SHAPE, *settings[:2], tokens=lambda _: 12)
    for engine in engines_of(run).values():
        engine.__class__ = Slow
    run_virtually(train_steps(replace(run, logbook=noting(said)), 0))
    [line] = said
    assert line.startswith("step 0: 1 of 4 trajectories are lost (1 late); the first, 0/")
    assert line.endswith("LateCall: solver (turn 0): nothing came within 100 s")


def test_a_signal_is_not_held_up_by_what_ignores_its_cancellation(tmp_path):
    class Deaf(SimulatedEngine):
        async def stream(self, prompt_ids, sampling, hear):
            if self.version:
                os.kill(os.getpid(), signal.SIGTERM)
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    await asyncio.sleep(1000)
            return await super().stream(prompt_ids, sampling, hear)

    run = simulated_run(tmp_path, *SHAPE, "trainer.steps=3", tokens=lambda _: 12)
    deaf = Deaf(lambda _: 12)
    run = with_engines(run, dict.fromkeys(run.config.policies, deaf), Text())

    async def main():
        with pytest.raises(Stopped, match="after step 1"):
            await train_steps(run, 0)
        at = asyncio.get_running_loop().time()
        await asyncio.sleep(CLEANUP_S)
        return at

    assert run_virtually(main()) < 5 + CLEANUP_S
    found = run.checkpoints.newest(print)
    assert found is not None and found.step == 1
