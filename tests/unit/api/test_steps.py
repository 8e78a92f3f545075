"""The steps of a training that a program takes one by one; Ctrl-C while a team is measured or talked to."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.api import run as module
from mcore_mas.api.objects import TaskError
from mcore_mas.evaluation import evaluate as evaluating
from mcore_mas.runtime.stop_signal import Stopped, StopSignal
from mcore_mas.training import train as training
from rollout.records.trajectory import Trajectory
from tests.support.played import trajectory

PROGRAM = """
import asyncio
from pathlib import Path

from mcore_mas.api.run import _Steps
from mcore_mas.training import train
from mcore_mas.runtime.stop_signal import Stopped


def steps_without_end(config, after_step):
    async def go():
        number = 0
        while await after_step(number, {}):
            number += 1
        await asyncio.to_thread(print, "saved step", number)  # as a checkpoint is written
        raise Stopped("stopped")

    asyncio.run(go())


train.train = steps_without_end
steps = _Steps(Path("run/config.yaml"))
print("took step", steps.next()["step"], "and", steps.next()["step"])
"""


def test_a_program_that_ends_in_the_middle_of_its_loop_stops_the_training_and_ends() -> None:
    """It once waited for ever for the training, which waited to be asked for its next step."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "took step 0 and 1\nsaved step 1\n", done.stderr
    assert (done.returncode, done.stderr) == (0, "run: stopped\n")


def test_what_keeps_a_training_from_saving_is_said_behind_a_break(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody takes a further row, which it would be raised with."""

    def full(config: Path, after_step: Callable[[int, dict[str, float]], Awaitable[bool]]) -> None:
        async def go() -> None:
            assert not await after_step(0, {})
            raise OSError(
                errno.ENOSPC, "No space left on device", "run/train/checkpoints/step_000001"
            )

        asyncio.run(go())

    monkeypatch.setattr(training, "train", full)
    steps = module._Steps(Path("run/config.yaml"))
    assert steps.next() == {"step": 0}
    steps.close()
    steps.close()
    said = capsys.readouterr().err
    assert said.startswith(
        "run: OSError: [Errno 28] No space left on device: 'run/train/checkpoints/step_000001'; mak"
    )
    assert said.count("\n") == 1


class _Run(module.Run):
    """A run whose config nobody reads."""

    def __init__(self) -> None:
        self.folder, self.config, self._steps = Path("run"), _Config(), None

    def _prepared(self) -> Path:
        return self.folder / "config.yaml"


class _Config:
    evaluation = property(lambda self: self)

    def model_copy(self, update: dict[str, Any]) -> _Config:
        return self


def test_a_break_out_of_an_async_loop_is_over_before_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`break` does not wait for the checkpoint there; the next training was refused, because the first was still on."""
    free = threading.Lock()

    def train(config: Path, after_step: Callable[[int, dict[str, float]], Any]) -> None:
        async def go() -> None:
            for number in range(3):
                if not await after_step(number, {}):
                    await asyncio.sleep(0.2)  # the checkpoint
                    raise Stopped("stopped")

        if not free.acquire(blocking=False):
            raise TaskError("in use")
        try:
            asyncio.run(go())
        finally:
            free.release()

    async def program() -> list[float]:
        run, taken = _Run(), []
        async for row in run:
            taken.append(row["step"])
            break
        return taken + [row["step"] async for row in run]

    monkeypatch.setattr(training, "train", train)
    assert asyncio.run(program()) == [0, 0, 1, 2]


def test_ctrl_c_ends_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It plays in a thread, which was waited for until it had played everything."""
    began = threading.Event()

    def evaluate(config: object, state: str, out: Path, stop: StopSignal) -> dict[str, Any]:
        async def play() -> None:
            stop.listen()
            began.set()
            await stop.run_until_stopped(asyncio.sleep(60))

        return {"rows": asyncio.run(play())}

    def result(self: Any, timeout: float | None = None) -> None:
        began.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluating, "evaluate", evaluate)
    monkeypatch.setattr(
        "concurrent.futures.Future.result", result
    )  # Ctrl-C comes while the caller waits
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _Run().evaluate()
    assert time.monotonic() - start < 30


def test_a_person_is_asked_in_the_callers_thread_until_end_or_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C was not heard in the thread in which the team plays, and Ctrl-D lost what was said."""
    played: list[str] = []
    lines: list[object] = []

    def converse(config: object, state: str, prompts: Iterator[str]) -> Iterator[Trajectory]:
        try:
            for prompt in prompts:
                assert threading.current_thread() is not threading.main_thread()
                played.append(prompt)
                yield trajectory()
        finally:
            played.append("closed")

    def asked(prompt: str) -> str:
        assert threading.current_thread() is threading.main_thread()
        line = lines.pop(0)
        if isinstance(line, type):
            raise line
        return str(line)

    monkeypatch.setattr(evaluating, "converse", converse)
    monkeypatch.setattr("builtins.input", asked)
    for end in ("", EOFError):
        lines[:], played[:] = ["a?", "b?", end], []
        assert len(_Run().chat()) == 2 and played == ["a?", "b?", "closed"]
    lines[:], played[:] = ["a?", KeyboardInterrupt], []
    with pytest.raises(KeyboardInterrupt):
        _Run().chat()
    assert played == ["a?", "closed"]
    played[:] = []
    assert len(_Run().chat("a?", "b?", "c?")) == 3 and played == ["a?", "b?", "c?", "closed"]
