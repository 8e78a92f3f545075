"""A training in a thread: a program takes its steps one by one."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mcore_mas.api.training_thread import TrainingThread
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.stop_signal import Stopped, StopSignal
from mcore_mas.training import train as training

PROGRAM = """
import asyncio
from pathlib import Path

from mcore_mas.api.training_thread import TrainingThread
from mcore_mas.runtime.stop_signal import Stopped
from mcore_mas.training import train


def steps_without_end(config, after_step, stop):
    async def take_steps():
        number = 0
        while await after_step(number, {}):
            number += 1
        await asyncio.to_thread(print, "saved step", number)  # as a checkpoint is written
        raise Stopped("stopped")

    asyncio.run(take_steps())


train.train = steps_without_end
steps = TrainingThread(Path("run/config.yaml"))
print("took step", steps.next()["step"], "and", steps.next()["step"])
"""


@pytest.mark.slow
def test_a_program_that_ends_in_its_loop_stops_the_training_with_a_checkpoint() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout == "took step 0 and 1\nsaved step 1\n", result.stderr
    assert result.returncode == 0
    assert result.stderr == "run: stopped\n"


ENDLESS_PROGRAM = """
import sys
from pathlib import Path

from tests.support.api import AGENTS, make_run


async def endless(task, team, env):
    while True:
        await team.act("writer", problem=task.prompt)
        print("asked", flush=True)


if __name__ == "__main__":
    no_limit = {"max_turns": None}
    writer, _ = AGENTS
    run = make_run(
        Path(sys.argv[1]), agents=[writer], orchestra=endless, collection=no_limit
    )
    run.train()
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_step_whose_orchestra_never_returns(
    forked_programs: None, tmp_path: Path
) -> None:
    script = tmp_path / "endless_program.py"
    script.write_text(ENDLESS_PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    # The check of prompts, which comes first, asks for 50 turns of each of two tasks.
    for _ in range(101):
        assert "asked" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert "stopped by Ctrl-C before the end of the first step" in errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "queue.py" not in errors
    assert "threading.py" not in errors


def test_an_error_after_the_last_row_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(
        config: Path,
        after_step: Callable[[int, dict[str, float]], Awaitable[bool]],
        stop: StopSignal,
    ) -> None:
        async def take_step() -> None:
            assert not await after_step(0, {})
            checkpoint = "run/train/checkpoints/step_000001"
            raise OSError(errno.ENOSPC, "No space left on device", checkpoint)

        asyncio.run(take_step())

    monkeypatch.setattr(training, "train", train)
    thread = TrainingThread(Path("run/config.yaml"))
    assert thread.next() == {"step": 0}
    thread.close()
    thread.close()
    error = capsys.readouterr().err
    message = "No space left on device: 'run/train/checkpoints/step_000001'; make room"
    assert error.startswith("run: OSError: [Errno 28] ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "log"),
    [(Stopped("stopped"), None), (TrainingError("no reward"), "error: no reward\n")],
)
def test_an_error_at_the_end_of_the_program_does_not_hide_the_error_of_the_training(
    error: BaseException,
    log: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(config: Path, after_step: object, stop: StopSignal) -> None:
        try:
            raise error
        finally:  # as asyncio does from Python 3.12 on
            raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(training, "train", train)
    thread = TrainingThread(tmp_path / "config.yaml")
    thread.close()
    assert capsys.readouterr().err == f"{tmp_path}: {error}\n"
    log_file = tmp_path / "logs" / "train.log"
    assert (log_file.read_text() if log_file.exists() else None) == log
