"""Training loop: a stop saves what was learned, and old trajectories are removed."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.runtime.checkpoint import Checkpoints
from mcore_mas.runtime.recipe import Identity
from mcore_mas.runtime.stop_signal import Stopped
from mcore_mas.training.loop import train_steps
from mcore_mas.training.step import TrainingSession
from mcore_mas.training.task_schedule import TaskSchedule
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_run import Bytes, box, make_run, task_of
from tests.support.simulated import Log, SimulatedGang, make_session, with_engines

# Calls of a step: two tasks with two trajectories, each with a first and a last turn of the solver.
CALLS_PER_STEP = 4

Rows = list[tuple[int, dict[str, float]]]  # step and metrics of each report


class InterruptingEngine(ScriptedEngine):
    """Scripted engine that sends this process a signal at one of its calls, and answers no more."""

    def __init__(self, script: Any, *, at_call: int | None, signal_number: int) -> None:
        super().__init__(script)
        self._at_call = at_call
        self._signal_number = signal_number

    async def generate(self, prompt_ids: Any, sampling: Any) -> Any:
        if self._at_call is not None and len(self.calls) >= self._at_call:
            os.kill(os.getpid(), self._signal_number)
            await asyncio.Event().wait()
        return await super().generate(prompt_ids, sampling)


def correct_answer(prompt: tuple[int, ...], call: int) -> bytes:
    return box(task_of(prompt))


def make_interrupted_session(
    folder: Path,
    *overrides: str,
    at_call: int | None = None,
    signal_number: int = signal.SIGTERM,
    rows: Rows | None = None,
    validation: int = 0,
    update_s: Callable[[int], float] = lambda _: 0.0,
    script: Callable[[tuple[int, ...], int], bytes] = correct_answer,
) -> TrainingSession:
    """Make a run of four steps.

    Args:
        folder: of the run.
        overrides: of its config.
        at_call: number of the engine call at which the signal is sent; None: never.
        signal_number: the signal.
        rows: collects what is reported.
        validation: number of validation tasks.
        update_s: returns the seconds of an update, by its number.
        script: returns the reply to a prompt, by the number of the call.
    """
    session = make_run(folder, script, "trainer.steps=4", *overrides)
    engine = InterruptingEngine(script, at_call=at_call, signal_number=signal_number)
    engines = dict.fromkeys(session.config.policies, engine)
    groups: Any = {policy: SimulatedGang(update_s) for policy in engines}
    tasks = [task for step in range(4) for task in session.rollouts.schedule.batch(step)]
    reported = rows if rows is not None else []
    log = Log(lambda step, metrics: reported.append((step, dict(metrics))))
    session = make_session(session.config, folder, tasks, engines, groups, log)
    session = with_engines(session, engines, Bytes())
    rollouts = replace(
        session.rollouts,
        schedule=TaskSchedule(tasks, 2, seed=1),
        validation=tuple(tasks[:validation]),
    )
    return replace(session, rollouts=rollouts)


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / "checkpoints" / f"step_{step:06d}" / "manifest.json").read_text())


def trajectory_files(session: TrainingSession) -> list[str]:
    return sorted(file.name for file in session.rollouts.collected.folder.iterdir())


def test_a_rollout_is_cancelled_and_the_steps_before_it_are_saved(tmp_path: Path) -> None:
    rows: Rows = []
    session = make_interrupted_session(tmp_path, at_call=2 * CALLS_PER_STEP + 3, rows=rows)
    message = "stopped by SIGTERM after step 2; the same command continues"
    with pytest.raises(Stopped, match=message):
        asyncio.run(train_steps(session, 0))
    assert [step for step, _ in rows] == [0, 1]
    assert read_manifest(tmp_path, 2)["state"]["unreported"] is None
    assert trajectory_files(session) == ["step_000000.parquet", "step_000001.parquet"]


def test_a_state_that_is_already_saved_is_not_saved_again(tmp_path: Path) -> None:
    session = make_interrupted_session(
        tmp_path, "trainer.checkpoint_every=1", at_call=CALLS_PER_STEP
    )
    with pytest.raises(Stopped, match="after step 1"):
        asyncio.run(train_steps(session, 0))
    assert read_manifest(tmp_path, 1)["step"] == 1


def test_before_the_end_of_the_first_step_nothing_is_saved(tmp_path: Path) -> None:
    session = make_interrupted_session(tmp_path, at_call=0, signal_number=signal.SIGURG)
    message = "stopped by SIGURG before the end of the first step"
    with pytest.raises(Stopped, match=message):
        asyncio.run(train_steps(session, 0))
    assert not (tmp_path / "checkpoints" / "step_000000").exists()


def test_a_cancelled_validation_is_repeated_before_its_step_is_reported(tmp_path: Path) -> None:
    rows: Rows = []
    validate_every_two = "trainer.validate_every=2"
    session = make_interrupted_session(
        tmp_path,
        validate_every_two,
        at_call=1 + 2 * CALLS_PER_STEP,  # in the validation after step 2
        rows=rows,
        validation=1,
    )
    with pytest.raises(Stopped, match="after step 2"):
        asyncio.run(train_steps(session, 0))
    assert [step for step, _ in rows] == [-1, 0]
    manifest = read_manifest(tmp_path, 2)
    assert manifest["metric"] is None
    unreported = manifest["state"]["unreported"]
    assert unreported["reward/mean"] == 1.0

    session = make_interrupted_session(tmp_path, validate_every_two, rows=rows, validation=1)
    checkpoints = Checkpoints(tmp_path / "checkpoints", Identity(run="r", models={}), keep=2)
    session = replace(session, checkpoints=checkpoints)
    asyncio.run(train_steps(session, 2, unreported))
    assert [step for step, _ in rows] == [-1, 0, 1, 2, 3]
    assert rows[2][1] == {
        **unreported,
        "validation/failed": 0.0,
        "validation/accuracy": 1.0,
        "validation/ci_low": 1.0,  # one task gives no variance
        "validation/ci_high": 1.0,
        "validation/valid_ratio": 1.0,
    }
    # the repeated validation counts for the choice of the best checkpoint
    assert [read_manifest(tmp_path, step)["metric"] for step in (2, 4)] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], [0, 1, 2, 3]),
        # the newest checkpoint is of two steps
        (["+trainer.keep_trajectories=1", "trainer.checkpoint_every=2"], [2, 3]),
        (["+trainer.keep_trajectories=3", "trainer.checkpoint_every=1"], [1, 2, 3]),
        # there is no checkpoint before the last step
        (["+trainer.keep_trajectories=1", "trainer.checkpoint_every=9"], [0, 1, 2, 3]),
    ],
)
def test_trajectories_of_the_newest_steps_and_since_the_checkpoint_are_kept(
    tmp_path: Path, overrides: list[str], steps: list[int]
) -> None:
    session = make_interrupted_session(tmp_path, *overrides)
    asyncio.run(train_steps(session, 0))
    assert trajectory_files(session) == [f"step_{step:06d}.parquet" for step in steps]


def test_an_update_that_is_broken_off_is_not_saved_and_its_trajectories_are_used_again(
    tmp_path: Path,
) -> None:
    interrupted: list[int] = []  # numbers of updates; the second Ctrl-C would end the process

    def interrupt_first_update(number: int) -> float:
        """Press Ctrl-C in the first update; all updates take an hour."""
        if not interrupted:
            interrupted.append(number)
            os.kill(os.getpid(), signal.SIGINT)
        return 3600.0

    def mixed_answer(prompt: tuple[int, ...], call: int) -> bytes:
        """Answer every third call wrongly, so that rewards differ and each step has an update."""
        return b"\\boxed{none}" if call % 3 == 0 else correct_answer(prompt, call)

    rows: Rows = []
    session = make_interrupted_session(
        tmp_path,
        "trainer.checkpoint_every=1",
        rows=rows,
        update_s=interrupt_first_update,
        script=mixed_answer,
    )
    message = (
        "stopped by SIGINT in the update of step 1, which is not saved; the same command continues "
        "after step 0, and repeats updates without sampling again"
    )
    with pytest.raises(Stopped, match=message):
        asyncio.run(train_steps(session, 0))
    assert rows == []
    assert session.checkpoints.newest_step == 0
    assert trajectory_files(session) == ["step_000000.parquet"]
    assert session.rollouts.collected.read(0).complete
