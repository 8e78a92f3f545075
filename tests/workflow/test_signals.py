"""Signals from the first line of a process on: it ends at once, and its last line says why."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pexpect
import psutil
import pytest

from mcore_mas.runtime.pipeline_messages import failure_message
from tests.support.run_folder import make_run

STOPS = [signal.SIGTERM, signal.SIGURG, signal.SIGUSR1, signal.SIGINT]


def train(run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mcore_mas", "train", str(run / "config.yaml")]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def listens(process: subprocess.Popen[str], number: int) -> bool:
    """Whether a handler of the signal is there."""
    [caught] = [
        line.split()[1]
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if line.startswith("SigCgt")
    ]
    return bool(int(caught, 16) >> (number - 1) & 1)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_to_stop_is_heard_while_the_process_imports(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = train(tmp_path)  # there is no such run, which it has not found out yet
    wait_until(lambda: listens(process, signal.SIGUSR1), process)
    assert not any("torch" in file.path for file in psutil.Process(process.pid).memory_maps())
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (
        143,
        f"stopped by {number.name}; the same command goes on from what is saved\n",
    )


STARTED = """
import sys
from mcore_mas.runtime import stop_signal
def heard(*numbers):
    print(sorted({"typer", "rich", "yaml", "numpy"} & set(sys.modules)))
    raise stop_signal.Stopped("stopped")
stop_signal.stop_at_start = heard
"""


def test_the_installed_script_hears_signals_before_it_imports_the_commands() -> None:
    """As `python -m mcore_mas` does: what pip makes of pyproject.toml, up to where it listens."""
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "scripts"
    ]
    module, function = scripts["mcore-mas"].split(":")
    script = f"{STARTED}from {module} import {function}\n{function}()"
    done = subprocess.run(
        [sys.executable, "-c", script, "train"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "[]\n", "stopped\n")


@pytest.mark.slow
def test_a_signal_while_models_are_loaded_ends_the_run_at_once(tmp_path: Path) -> None:
    alone = ("agents.verifier.policy=solver", "~policies.verifier", "policies.solver.tp=1")
    run = make_run(tmp_path, *alone, "data.validation=2", "trainer.steps=1")
    process = train(run)
    joining = run / "train" / "ranks" / "solver-0.txt"
    wait_until(joining.is_file, process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143, said
    assert (
        said.splitlines()[-1] == "stopped by SIGINT while it was loading; the same command goes on"
    )
    _, alive = psutil.wait_procs(children, timeout=30)
    assert [one.cmdline() for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


JOB = """
import sys, time
from mcore_mas.runtime.joblog import logged
with logged(sys.argv[1]):
    print("at work")
    time.sleep(600)
"""


def test_a_job_of_any_stage_says_by_what_it_was_stopped(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    process = subprocess.Popen([sys.executable, "-c", JOB, str(log)], text=True)
    wait_until(lambda: log.is_file() and "at work\n" in log.read_text(), process)
    process.terminate()
    assert process.wait(60) == 1
    stopped = "error: stopped by SIGTERM; the same command goes on from what is saved"
    assert log.read_text().splitlines() == ["at work", stopped]  # no traceback: nothing is wrong


PIPELINE = """
import time
from rollout.base.processes import end_at_second_interrupt
end_at_second_interrupt("error: ended by a second Ctrl-C")
try:
    print("at work", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("waits for its jobs", flush=True)
    time.sleep(600)
"""


def test_a_second_ctrl_c_ends_a_pipeline_that_waits_with_one_line() -> None:
    pipeline = pexpect.spawn(sys.executable, ["-c", PIPELINE], timeout=60, encoding="utf-8")
    for said in ("at work", "waits for its jobs"):
        pipeline.expect_exact(said)
        pipeline.sendintr()
    pipeline.expect_exact("error: ended by a second Ctrl-C")
    pipeline.expect(pexpect.EOF)
    pipeline.close()
    assert pipeline.exitstatus == 130 and "Traceback" not in pipeline.before


PATIENT = """
import asyncio, sys
from mcore_mas.runtime.joblog import logged
from mcore_mas.runtime.stop_signal import StopSignal
async def at_work():
    StopSignal().listen()
    print("at work")
    await asyncio.sleep(600)
with logged(sys.argv[1]):
    asyncio.run(at_work())
"""


def test_ctrl_c_is_answered_at_once_and_the_second_is_the_cause(tmp_path: Path) -> None:
    """At a terminal, of a job that writes to a log, as jobs of the pipeline do."""
    log = tmp_path / "job.log"
    job = pexpect.spawn(sys.executable, ["-c", PATIENT, str(log)], timeout=60, encoding="utf-8")
    while not (log.is_file() and "at work\n" in log.read_text()):
        assert job.isalive()
        time.sleep(0.02)
    job.sendintr()
    job.expect_exact(
        "SIGINT: stopping, once what was learned is saved; another Ctrl-C does not wait for that"
    )
    job.sendintr()
    job.expect(pexpect.EOF)
    job.close()
    assert job.exitstatus == 130
    said = log.read_text().splitlines()
    assert said[1].startswith("SIGINT: stopping, once") and len(said) == 3  # no traceback
    assert said[2] == "error: ended by a second Ctrl-C; the same command goes on from what is saved"
    assert failure_message([str(log)], 0, []).strip().startswith(said[2])
