"""Told to stop: what is under way and can be done again is abandoned, what was learned is saved."""

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.runtime.checkpoint import Checkpoints
from mcore_mas.runtime.recipe import Identity
from mcore_mas.runtime.stop_signal import Stopped
from mcore_mas.training.async_rollout import Schedule
from mcore_mas.training.loop import train_steps
from mcore_mas.training.step import TrainingSession
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_run import Bytes, box, make_run, task_of
from tests.support.simulated import Log, SimulatedGang, make_session, with_engines

CALLS = 4  # of a step: two tasks, two trajectories, of which the solver opens and ends each


class StuckEngine(ScriptedEngine):
    """Sends this process a signal at call `at`, and answers no more."""

    at: int
    stop: int = signal.SIGTERM

    async def generate(self, prompt_ids: Any, sampling: Any) -> Any:
        if len(self.calls) >= self.at:
            os.kill(os.getpid(), self.stop)
            await asyncio.Event().wait()
        return await super().generate(prompt_ids, sampling)


def stuck(
    tmp_path: Path, at: int, rows: list[Any], *overrides: str, validation: int = 0
) -> TrainingSession:
    def script(prompt: tuple[int, ...], call: int) -> bytes:
        return box(task_of(prompt))

    run = make_run(tmp_path, script, "trainer.steps=4", *overrides)
    engine = StuckEngine(script)
    engine.at = at
    engines = dict.fromkeys(run.config.policies, engine)
    gangs: Any = {policy: SimulatedGang(lambda _: 0.0) for policy in engines}
    tasks = [run.rollouts.schedule.batch(step)[i] for step in range(4) for i in range(2)]
    log = Log(lambda step, metrics: rows.append((step, dict(metrics))))
    run = with_engines(
        make_session(run.config, tmp_path, tasks, engines, gangs, log), engines, Bytes()
    )
    schedule = Schedule(tasks, 2, seed=1)
    return replace(
        run, rollouts=replace(run.rollouts, schedule=schedule, validation=tuple(tasks[:validation]))
    )


def manifest(run: TrainingSession, step: int) -> dict[str, Any]:
    return json.loads(
        (
            run.rollouts.collected.folder.parent
            / "checkpoints"
            / f"step_{step:06d}"
            / "manifest.json"
        ).read_text()
    )


def test_a_collection_is_abandoned_and_the_steps_before_it_are_saved(tmp_path: Path) -> None:
    rows: list[Any] = []
    run = stuck(tmp_path, 2 * CALLS + 3, rows)
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 2; the same command goes on"):
        asyncio.run(train_steps(run, 0))
    assert [step for step, _ in rows] == [0, 1]
    assert manifest(run, 2)["state"]["unreported"] is None
    assert sorted(path.name for path in run.rollouts.collected.folder.iterdir()) == [
        "step_000000.parquet",
        "step_000001.parquet",
    ]


def test_nothing_is_saved_twice_and_nothing_of_no_steps(tmp_path: Path) -> None:
    run = stuck(tmp_path / "saved", CALLS, [], "trainer.checkpoint_every=1")
    with pytest.raises(Stopped, match="after step 1"):
        asyncio.run(train_steps(run, 0))
    assert manifest(run, 1)["step"] == 1
    run = stuck(tmp_path / "first", 0, [])
    run.rollouts.team.policies["solver"].engine.stop = signal.SIGURG  # type: ignore[attr-defined]
    with pytest.raises(Stopped, match="stopped by SIGURG before the end of the first step"):
        asyncio.run(train_steps(run, 0))
    assert not (tmp_path / "first" / "checkpoints" / "step_000000").exists()


def test_a_step_whose_validation_was_abandoned_is_reported_after_it_was_made_up(
    tmp_path: Path,
) -> None:
    rows: list[Any] = []
    settings = ("trainer.validate_every=2",)
    run = stuck(
        tmp_path, 1 + 2 * CALLS, rows, *settings, validation=1
    )  # inside the validation after step 2
    with pytest.raises(Stopped, match="after step 2"):
        asyncio.run(train_steps(run, 0))
    assert [step for step, _ in rows] == [-1, 0]
    assert manifest(run, 2)["metric"] is None
    unreported = manifest(run, 2)["state"]["unreported"]
    assert unreported["reward/mean"] == 1.0
    again = stuck(tmp_path, 10**9, rows, *settings, validation=1)
    again = replace(
        again,
        checkpoints=Checkpoints(tmp_path / "checkpoints", Identity(run="r", models={}), keep=2),
    )
    asyncio.run(train_steps(again, 2, unreported))
    assert [step for step, _ in rows] == [-1, 0, 1, 2, 3]
    assert rows[2][1] == {
        **unreported,
        "validation/failed": 0.0,
        "validation/accuracy": 1.0,
        "validation/ci_low": 1.0,  # of one task, of which nothing more is known
        "validation/ci_high": 1.0,
        "validation/valid_ratio": 1.0,
    }
    # the made-up validation counts when the best is looked for
    assert [manifest(again, step)["metric"] for step in (2, 4)] == [1.0, 1.0]
