"""Stop signals over the life of a process: while Ray starts, while a run works, and at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from mcore_mas.runtime import stop_signal
from mcore_mas.runtime.stop_signal import (
    GRACE_S,
    STOP_SIGNALS,
    Abandoned,
    StopSignal,
    raise_on_stop_signals,
    undo_raise_on_stop_signals,
)

# A process that starts Ray, works in an event loop, shuts down, and ends. At each of these moments
# it calls `reach`, which sends a signal if this is the moment of the test.
_PROCESS = """
import asyncio, atexit, os, signal, sys
from mcore_mas.runtime.stop_signal import (
    StopSignal, Stopped, ignore_stop_signals, preserved_sigterm_handler, raise_on_stop_signals
)

def reach(moment):
    if moment == sys.argv[1]:
        os.kill(os.getpid(), int(sys.argv[2]))

def ray_init():
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
    try:
        reach("Ray starts")
    except Exception:
        pass  # an error that Ray handles

async def work(stop):
    stop.listen()
    try:
        if sys.argv[1] == "at work":
            reach("at work")
            await stop.run_until_stopped(asyncio.sleep(60), " at work")
        reach("the last step")
    finally:
        stop.finish()

class LastObject:
    def __del__(self):
        reach("the interpreter ends")

try:
    raise_on_stop_signals()
    with preserved_sigterm_handler():
        ray_init()
    reach("Ray runs")
    asyncio.run(work(StopSignal()))
    reach("Ray shuts down")
    ignore_stop_signals()
    atexit.register(reach, "exit")
    last_object = LastObject()
    print("finished")
except Stopped as stop:
    ignore_stop_signals()
    print(stop, file=sys.stderr)
    sys.exit(143)
"""


def run_process(moment: str, number: signal.Signals) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PROCESS, moment, str(int(number))]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("moment", ["Ray starts", "Ray runs"])
def test_a_signal_before_the_work_stops_the_process(moment: str, number: signal.Signals) -> None:
    result = run_process(moment, number)
    line = f"stopped by {number.name}; the same command continues from what is saved\n"
    assert (result.returncode, result.stdout, result.stderr) == (143, "", line)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_at_work_stops_the_work(number: signal.Signals) -> None:
    result = run_process("at work", number)
    assert (result.returncode, result.stdout) == (143, "")
    assert result.stderr.splitlines()[-1] == f"stopped by {number.name} at work"


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize(
    "moment", ["the last step", "Ray shuts down", "exit", "the interpreter ends"]
)
def test_a_signal_after_the_work_leaves_a_finished_run(moment: str, number: signal.Signals) -> None:
    result = run_process(moment, number)
    assert (result.returncode, result.stdout) == (0, "finished\n")
    assert "stopped by" not in result.stderr


SIGNALLED_AGAIN = """
import os, signal, sys
from mcore_mas.runtime.stop_signal import ignore_stop_signals, Stopped, raise_on_stop_signals
try:
    raise_on_stop_signals()
    os.kill(os.getpid(), signal.SIGTERM)
except Stopped as stop:
    ignore_stop_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    print(stop, file=sys.stderr)
    sys.exit(143)
"""


def test_a_second_signal_at_the_end_changes_nothing() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SIGNALLED_AGAIN], capture_output=True, text=True, check=False
    )
    line = "stopped by SIGTERM; the same command continues from what is saved\n"
    assert (result.returncode, result.stderr) == (143, line)


DROPPED_EXCEPTION = """
import os, signal, sys, time, weakref
from mcore_mas.runtime.stop_signal import ignore_stop_signals, Stopped, raise_on_stop_signals

class Object:
    pass

def send_signal(reference):
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(0)  # the handler has been called when this returns

try:
    raise_on_stop_signals()
    last_object = Object()
    reference = weakref.ref(last_object, send_signal)
    del last_object
    print("the callback has dropped the exception", flush=True)
    time.sleep(60)
except Stopped as stop:
    ignore_stop_signals()
    print(stop, file=sys.stderr)
    sys.exit(143)
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_whose_exception_python_drops_is_sent_again(number: signal.Signals) -> None:
    result = subprocess.run(
        [sys.executable, "-c", DROPPED_EXCEPTION, str(int(number))],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    line = f"stopped by {number.name}; the same command continues from what is saved\n"
    assert result.stdout == "the callback has dropped the exception\n"
    assert (result.returncode, result.stderr) == (143, line)


# Tasks of a team that do not end, which a Ctrl-C interrupts; the process then saves its state and ends.
_TEAM = """
import asyncio, os, signal, sys, time
from mcore_mas.runtime.stop_signal import StopSignal, Stopped, raise_on_stop_signals
from rollout.base.async_tasks import gather_or_cancel

async def blocks():
    time.sleep(600)

async def spins():
    while True:
        pass

async def ignores_its_cancellation():
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass

async def waits_for_a_thread():
    await asyncio.to_thread(time.sleep, 600)

async def play(number):
    if number == 0:
        print("at work", flush=True)
    await globals()[sys.argv[1]]()

async def work(stop):
    stop.listen()
    try:
        await stop.run_until_stopped(gather_or_cancel(map(play, range(20))), " at work")
    except Stopped as stopped:
        print("saved", flush=True)
        stop.end_soon(stopped)
        raise
    finally:
        stop.finish()

raise_on_stop_signals()
try:
    asyncio.run(work(StopSignal()))
except Stopped as stopped:
    print(stopped, file=sys.stderr)
    sys.exit(143)
"""


@pytest.mark.parametrize(
    "code", ["blocks", "spins", "ignores_its_cancellation", "waits_for_a_thread"]
)
def test_ctrl_c_ends_code_of_a_team_that_does_not_end(code: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _TEAM, code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "at work\n"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=50)
    assert (process.returncode, stdout) == (143, "saved\n")
    lines = stderr.splitlines()
    assert lines[0].startswith("SIGINT: stopping after the state of the run is saved;")
    # Code that blocks the event loop is interrupted once, although twenty tasks would run it.
    interrupted = [f"({code}), which blocks the event loop" in line for line in lines[1:-1]]
    assert interrupted == ([True] if code in ("blocks", "spins") else [])
    assert lines[-1] == "stopped by SIGINT at work"


# A team whose code catches every interruption
_DEAF_TEAM = _TEAM.replace(
    "    time.sleep(600)\n",
    """
    while True:
        try:
            print("at work", flush=True)
            time.sleep(600)
        except BaseException:
            pass
""",
    1,
)


def test_the_second_ctrl_c_ends_a_process_whose_code_catches_every_exception() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _DEAF_TEAM, "blocks"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "at work\n"
    assert process.stdout.readline() == "at work\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "at work\n"  # it was interrupted, and goes on
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=50)
    assert process.returncode == 130
    message = "ended by a second Ctrl-C; the same command continues from what is saved"
    assert stderr.splitlines()[-1] == message


@pytest.mark.parametrize(
    ("number", "result"), [(signal.SIGTERM, "finished"), (signal.SIGINT, "cancelled")]
)
def test_ctrl_c_breaks_off_an_update_and_other_signals_wait_for_it(
    number: signal.Signals, result: str
) -> None:
    async def update() -> str:
        os.kill(os.getpid(), number)
        await asyncio.sleep(GRACE_S + 2)
        return "finished"

    async def run_update() -> str:
        stop = StopSignal()
        stop.listen()
        try:
            return await stop.run_until_urgent(update())
        except Abandoned:
            return "cancelled"

    assert asyncio.run(run_update()) == result


def test_an_update_that_ends_soon_after_ctrl_c_is_kept() -> None:
    async def update() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        return "finished"

    async def run_update() -> str:
        stop = StopSignal()
        stop.listen()
        return await stop.run_until_urgent(update())

    assert asyncio.run(run_update()) == "finished"


def test_the_log_has_the_line_before_the_user_can_answer_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A second Ctrl-C ends the process as soon as the user has seen the line at the terminal."""
    descriptors: list[int] = []
    monkeypatch.setattr(stop_signal, "_write_line", lambda file, line: descriptors.append(file))

    def announce(log: TextIO, terminal: TextIO) -> list[int]:
        descriptors.clear()
        monkeypatch.setattr(sys, "stderr", log)
        monkeypatch.setattr(stop_signal, "user_terminal", lambda: terminal)
        StopSignal()._announce("SIGINT: stopping")
        return list(descriptors)

    with (tmp_path / "1").open("w") as first, (tmp_path / "2").open("w") as second:
        assert announce(log=first, terminal=second) == [first.fileno(), second.fileno()]
        assert announce(log=second, terminal=first) == [second.fileno(), first.fileno()]
        # A process that writes to a terminal has no other log.
        assert announce(log=first, terminal=first) == [first.fileno()]


def test_a_program_that_runs_after_the_start_gets_pythons_handlers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # undone after the test
    handler_before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        raise_on_stop_signals(signal.SIGTERM, signal.SIGINT)
        undo_raise_on_stop_signals()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, handler_before)
