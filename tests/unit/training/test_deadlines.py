"""Deadlines and surplus trajectories of a step, in virtual time; settings that make no sense."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError
from mcore_mas.runtime.stop_signal import Stopped
from mcore_mas.training.async_rollout import RolloutBatch
from mcore_mas.training.loop import train_steps
from mcore_mas.training.step import TrainingSession
from rollout.base.async_tasks import CLEANUP_S
from rollout.records.trajectory import Status
from tests.support.simulated import (
    Log,
    SimulatedEngine,
    Text,
    simulated_run,
    with_engines,
)
from tests.support.simulated_training import (
    SMALL_STEPS,
    train,
    written_trajectories,
)
from tests.support.virtual_time import run_virtually


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["+collection.call_s=9", "+collection.trajectory_s=5"],
            "collection: call_s 9 has no effect, because trajectory_s 5 is",
        ),
        (
            ["+collection.tool_s=9", "+collection.batch_s=5"],
            "collection: tool_s 9 has no effect, because batch_s 5 is over befo",
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
            r"engine\.sleep: with a staleness of 1, engines sample while policies",
        ),
        (
            [
                "policies.verifier.model=''",
                "+policies.verifier.remote={model: m}",
                "+policies.verifier.max_in_flight=2",
            ],
            r"policies\.verifier: max_in_flight bounds the requests to an engine; for a remote "
            r"model set remote\.conc",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_line(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        resolve(["experiment=demo_math", *overrides])
    assert "\n" not in str(refused.value)


def collect(session: TrainingSession) -> tuple[RolloutBatch, float]:
    """Collect step 0; return its batch, and the virtual seconds that it took."""

    async def main() -> tuple[RolloutBatch, float]:
        batch = await session.rollouts.collect_batch(0)
        return batch, asyncio.get_running_loop().time()

    return run_virtually(main())


def test_the_deadline_of_a_step_includes_its_extra_batches(tmp_path: Path) -> None:
    class AgreeingEngine(SimulatedEngine):
        """Engine whose replies are all equal, so that a filter rejects every task."""

        async def stream(self, prompt_ids: Any, sampling: Any, on_tokens: Any) -> Any:
            return await super().stream(prompt_ids, replace(sampling, seed=0), on_tokens)

    def collect_with(name: str, *overrides: str) -> tuple[RolloutBatch, float]:
        session = simulated_run(
            tmp_path / name,
            *SMALL_STEPS,
            "filter={name: informative, resample: 2}",
            *overrides,
            tokens=lambda seed: 12,
            engine_class=AgreeingEngine,
        )
        return collect(session)

    batch, took_s = collect_with("without_deadline")
    assert batch.batches == 3
    deadline_s = took_s / 2  # in the second of the three batches
    batch, took_s = collect_with("with_deadline", f"+collection.batch_s={deadline_s}")
    assert batch.batches == 2
    assert took_s == pytest.approx(deadline_s)

    first, second = batch.groups[:2], batch.groups[2:]
    assert {t.status for group in first for t in group.trajectories} == {Status.COMPLETED}
    assert {t.status for group in second for t in group.trajectories} == {Status.ABORTED}
    error = second[0].trajectories[0].error
    assert f"the batch's deadline of {deadline_s:g} s passed" in error


def test_greedy_trajectories_are_played_side_by_side_with_the_others(tmp_path: Path) -> None:
    settings = [*SMALL_STEPS, "orchestra.options.max_loops=1"]
    plain = simulated_run(tmp_path / "plain", *settings, tokens=lambda seed: 12)
    remax = simulated_run(
        tmp_path / "remax", *settings, "advantage={name: remax}", tokens=lambda seed: 12
    )
    _, plain_s = collect(plain)
    batch, remax_s = collect(remax)
    assert plain_s == remax_s
    assert "greedy" in batch.samples[0].scores


class TestLateTrajectories:
    OVERRIDES = ("trainer.steps=2", "+collection.call_s=100")

    def notes_of_training(self, folder: Path, *overrides: str) -> list[str]:
        """Train with an engine whose second call is late; return the notes of the logbook."""
        calls = 0

        class SlowEngine(SimulatedEngine):
            async def stream(self, prompt_ids: Any, sampling: Any, on_tokens: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == 2:
                    await asyncio.sleep(1000)
                return await super().stream(prompt_ids, sampling, on_tokens)

        session = simulated_run(
            folder,
            *SMALL_STEPS,
            *self.OVERRIDES,
            *overrides,
            tokens=lambda seed: 12,
            engine_class=SlowEngine,
        )
        log = Log()
        session = replace(session, logbook=log)  # type: ignore[arg-type]
        run_virtually(train_steps(session, 0))
        return log.notes

    def test_a_late_trajectory_is_noted(self, tmp_path: Path) -> None:
        [note] = self.notes_of_training(tmp_path)
        assert note.startswith("step 1: 1 of 4 trajectories are lost (1 late); the first, sample ")
        assert note.endswith("LateCall: solver (turn 0): nothing came within 100 s")

    def test_a_surplus_trajectory_replaces_a_late_one(self, tmp_path: Path) -> None:
        assert self.notes_of_training(tmp_path, "+trainer.oversample=1.5") == []


def test_the_slowest_surplus_trajectories_of_each_group_are_aborted(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    session = simulated_run(
        tmp_path,
        "trainer.tasks_per_step=2",
        "trainer.group_size=4",
        "trainer.steps=2",
        "+trainer.oversample=1.5",
        report=lambda step, metrics: rows.append(dict(metrics)),
    )
    train(session)
    for row in rows:
        assert row["rollout/trajectories"] == 12.0
        assert row["rollout/aborted"] == 4.0
    completed = Counter(
        trajectory.task_id
        for trajectory in written_trajectories(session, 0)
        if trajectory.status is Status.COMPLETED
    )
    assert list(completed.values()) == [4, 4]


def test_a_stop_does_not_wait_for_requests_that_ignore_their_cancellation(tmp_path: Path) -> None:
    class DeafEngine(SimulatedEngine):
        """Engine that stops the process after the first step, and ignores one cancellation."""

        async def stream(self, prompt_ids: Any, sampling: Any, on_tokens: Any) -> Any:
            if self.version:
                os.kill(os.getpid(), signal.SIGTERM)
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    await asyncio.sleep(1000)
            return await super().stream(prompt_ids, sampling, on_tokens)

    session = simulated_run(tmp_path, *SMALL_STEPS, "trainer.steps=3", tokens=lambda seed: 12)
    engine = DeafEngine(lambda seed: 12)
    session = with_engines(session, dict.fromkeys(session.config.policies, engine), Text())

    async def stop_after_first_step() -> float:
        with pytest.raises(Stopped, match="after step 1"):
            await train_steps(session, 0)
        stopped_at = asyncio.get_running_loop().time()
        await asyncio.sleep(CLEANUP_S)
        return stopped_at

    assert run_virtually(stop_after_first_step()) < 5 + CLEANUP_S
    checkpoint = session.checkpoints.recover_newest(print)
    assert checkpoint is not None
    assert checkpoint.step == 1
