"""Signals end a process at any time after its start, and its last line names the signal."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import psutil
import pytest

from mcore_mas.runtime.pipeline_messages import failure_message
from tests.support.run_folder import make_run
from tests.support.starts import Forked

STOP_SIGNALS = [signal.SIGTERM, signal.SIGURG, signal.SIGUSR1, signal.SIGINT]


def start_training(
    run: Path, kind: type[subprocess.Popen[Any]] = subprocess.Popen
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mcore_mas", "train", str(run / "config.yaml")]
    return kind(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def has_handler(process: subprocess.Popen[str], number: int) -> bool:
    """Return True if a process has a handler of the signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    assert match is not None
    caught_signals = int(match[1], 16)
    return bool(caught_signals >> (number - 1) & 1)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_ends_a_process_that_still_imports(number: signal.Signals, tmp_path: Path) -> None:
    process = start_training(tmp_path)  # there is no run here, but the process does not know it yet
    wait_until(lambda: has_handler(process, signal.SIGUSR1), process)
    assert not any("torch" in file.path for file in psutil.Process(process.pid).memory_maps())
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 143
    assert stderr == f"stopped by {number.name}; the same command continues from what is saved\n"


# Prints the imported libraries at the point where handlers are installed, and ends there
REPORT_IMPORTS = """
import sys
from mcore_mas.runtime import stop_signal
def report_imports(*numbers):
    print(sorted({"typer", "rich", "yaml", "numpy"} & set(sys.modules)))
    raise stop_signal.Stopped("stopped")
stop_signal.raise_on_stop_signals = report_imports
"""


def test_the_installed_script_handles_signals_before_it_imports_the_commands() -> None:
    """pip makes the script from pyproject.toml; it must start like `python -m mcore_mas`."""
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, function = pyproject["project"]["scripts"]["mcore-mas"].split(":")
    script = f"{REPORT_IMPORTS}from {module} import {function}\n{function}()"
    completed = subprocess.run(
        [sys.executable, "-c", script, "train"], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 143
    assert completed.stdout == "[]\n"
    assert completed.stderr == "stopped\n"


@pytest.mark.slow
def test_a_signal_while_models_are_loaded_ends_the_run_at_once(tmp_path: Path) -> None:
    one_policy = ("agents.verifier.policy=solver", "~policies.verifier", "policies.solver.tp=1")
    run = make_run(tmp_path, *one_policy, "data.validation=2", "trainer.steps=1")
    process = start_training(run, Forked)
    wait_until((run / "train" / "ranks" / "solver-0.txt").is_file, process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 143, stderr
    message = "stopped by SIGINT while it was loading; the same command continues"
    assert stderr.splitlines()[-1] == message
    _, alive = psutil.wait_procs(children, timeout=30)
    running = [child.cmdline() for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    assert running == []


JOB = """
import sys, time
from mcore_mas.runtime.joblog import logged
with logged(sys.argv[1]):
    print("at work")
    time.sleep(600)
"""


def test_the_log_of_a_stopped_job_names_the_signal(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    process = subprocess.Popen([sys.executable, "-c", JOB, str(log)], text=True)
    wait_until(lambda: log.is_file() and "at work\n" in log.read_text(), process)
    process.terminate()
    assert process.wait(60) == 1
    # The log has no traceback, because a stop is not a bug.
    assert log.read_text().splitlines() == [
        "at work",
        "error: stopped by SIGTERM; the same command continues from what is saved",
    ]


PIPELINE = """
import time
from rollout.base.terminal import end_at_second_interrupt
end_at_second_interrupt("error: ended by a second Ctrl-C")
try:
    print("at work", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("waits for its jobs", flush=True)
    time.sleep(600)
"""


def test_a_second_ctrl_c_ends_a_waiting_pipeline_with_one_line() -> None:
    pipeline = pexpect.spawn(sys.executable, ["-c", PIPELINE], timeout=60, encoding="utf-8")
    for message in ("at work", "waits for its jobs"):
        pipeline.expect_exact(message)
        pipeline.sendintr()
    pipeline.expect_exact("error: ended by a second Ctrl-C")
    pipeline.expect(pexpect.EOF)
    pipeline.close()
    assert pipeline.exitstatus == 130
    assert "Traceback" not in pipeline.before


# A job that takes long to stop after a signal
SLOW_JOB = """
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


def test_the_first_ctrl_c_is_acknowledged_at_once_and_the_second_ends_the_job(
    tmp_path: Path,
) -> None:
    """The job runs at a terminal and writes to a log, as jobs of the pipeline do."""
    log = tmp_path / "job.log"
    job = pexpect.spawn(sys.executable, ["-c", SLOW_JOB, str(log)], timeout=60, encoding="utf-8")
    while not (log.is_file() and "at work\n" in log.read_text()):
        assert job.isalive()
        time.sleep(0.02)
    job.sendintr()
    job.expect_exact(
        "SIGINT: stopping after the state of the run is saved; a Ctrl-C from now on ends it at once"
    )
    job.sendintr()
    job.expect(pexpect.EOF)
    job.close()
    assert job.exitstatus == 130
    _, acknowledgement, error = log.read_text().splitlines()  # without a traceback
    assert acknowledgement.startswith("SIGINT: stopping after")
    assert error == "error: ended by a second Ctrl-C; the same command continues from what is saved"
    assert failure_message([str(log)], 0, []).strip().startswith(error)


# Job that stops well, and a pipeline of two such jobs with the last lines of ours
SAVING_JOB = """
import asyncio, sys
from mcore_mas.runtime.joblog import logged
from mcore_mas.runtime.stop_signal import StopSignal
async def at_work():
    stop = StopSignal()
    stop.listen()
    print("at work")
    await stop.run_until_stopped(asyncio.sleep(600), "; the same command continues")
with logged(sys.argv[1]):
    asyncio.run(at_work())
"""
SNAKEFILE = """
import atexit, sys
from mcore_mas.runtime.pipeline_messages import failure_message
rule all:
    input: "1.done", "2.done"
rule work:
    output: "{n}.done"
    log: "{n}.log"
    shell: "{sys.executable} job.py {log}"
onerror:
    logs = [path for job in workflow.dag.needrun_jobs() for path in job.log]
    atexit.register(print, failure_message(logs, 0.0, log), file=sys.stderr)
"""


@pytest.mark.slow
def test_ctrl_c_on_a_pipeline_calls_no_job_that_stopped_an_error(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    (tmp_path / "job.py").write_text(SAVING_JOB)
    arguments = ["-m", "snakemake", "--cores", "2", "--quiet", "all"]
    pipeline = pexpect.spawn(sys.executable, arguments, cwd=tmp_path, timeout=60, encoding="utf-8")
    logs = [tmp_path / "1.log", tmp_path / "2.log"]
    while not all(log.is_file() and "at work\n" in log.read_text() for log in logs):
        assert pipeline.isalive()
        time.sleep(0.05)
    pipeline.sendintr()
    # The jobs end in any order.
    pipeline.expect(
        "stopped by SIGINT; the same command continues\r\n  logs: (1.log, 2|2.log, 1).log"
    )
    printed = pipeline.before
    pipeline.expect(pexpect.EOF)
    assert "error" not in printed + pipeline.before
