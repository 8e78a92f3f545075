"""Logs of jobs: they have the output of all processes of a job, and the cause of a failure as the last line."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import psutil

from mcore_mas.runtime.pipeline_messages import failure_message


def run_job(log: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run the statement `body` in another process whose output goes to a log."""
    code = (
        "import os, pathlib, subprocess, sys, time\n"
        "from mcore_mas.runtime.joblog import logged\n"
        f"with logged({str(log)!r}):\n    {body}"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_all_output_goes_to_the_log_also_of_children(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "job.log"
    job = run_job(
        log, "print('one'); subprocess.run(['echo', 'two']); print('three', file=sys.stderr)"
    )
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")
    assert log.read_text() == "one\ntwo\nthree\n"


def test_the_log_of_a_failure_ends_with_its_cause(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    job = run_job(log, "raise ValueError('first\\n  second')")
    assert (job.returncode, job.stdout, job.stderr) == (1, "", "")
    assert log.read_text().splitlines()[0] == "Traceback (most recent call last):"
    assert log.read_text().splitlines()[-1] == "error: ValueError: first second"


def test_tracebacks_of_libraries_have_no_terminal_commands(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    body = (
        "import asyncio, logging; from rollout.base.http_server import server_config\n"
        "    server_config(None, drain_s=1, lifespan=False)\n"
        "    error = ValueError('\\x1b]0;owned\\x07 \\u202e')\n"
        "    logging.getLogger('uvicorn.error').error('in the application', exc_info=error)\n"
        "    context = {'message': 'never retrieved', 'exception': error}\n"
        "    asyncio.new_event_loop().call_exception_handler(context)"
    )
    assert run_job(log, body).returncode == 0
    lines = log.read_text().splitlines()
    assert lines[:2] == ["ERROR: in the application", r"ValueError: \x1b]0;owned\x07 \u202e"]
    assert lines[-2:] == ["never retrieved", r"ValueError: \x1b]0;owned\x07 \u202e"]


def test_the_log_of_a_failure_has_no_terminal_commands(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    run_job(log, r"raise ValueError('\x1b]0;owned\x07 \x9b2J a\rb \u202eevil')")
    text = log.read_bytes().decode()
    assert r"ValueError: \x1b]0;owned\x07 \x9b2J a\rb \u202eevil" in text.split("\n")[-3]
    assert not set(text) & set("\x1b\x07\r\x9b\u202e")


def test_a_job_that_is_started_again_appends_to_its_log(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    run_job(log, "raise ValueError('first')")
    log.unlink()  # as Snakemake does
    run_job(log, "print('second')")
    assert log.read_text().splitlines()[-3:] == [
        "error: ValueError: first",
        "----- started again -----",
        "second",
    ]
    # The cause of the first start's failure is not reported as that of the second.
    assert "error: the job ended without saying why" in failure_message([str(log)], 0.0, [])


def test_a_job_with_a_log_can_still_write_to_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    leader, follower = pty.openpty()
    code = (
        "from mcore_mas.runtime.joblog import logged\n"
        "from mcore_mas.runtime.user_terminal import user_terminal\n"
        f"with logged({str(log)!r}):\n"
        "    print('to the log')\n"
        "    print('to the screen', file=user_terminal(), end='')"
    )
    subprocess.run([sys.executable, "-c", code], stdout=follower, stderr=follower, check=True)
    os.close(follower)
    assert os.read(leader, 1000) == b"to the screen"
    os.close(leader)
    assert log.read_text() == "to the log\n"
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_pipe_and_a_file_get_messages_behind_the_log(tmp_path: Path) -> None:
    code = (
        "from mcore_mas.runtime.joblog import logged\n"
        "from mcore_mas.tracking.progress import ProgressReporter\n"
        f"with logged({str(tmp_path / 'job.log')!r}):\n"
        "    reporter = ProgressReporter('r train', 2)\n"
        "    reporter.step(1, {'reward': 0.5, 'accuracy': 0.25})\n"
        "    reporter.step(2, {'reward': 0.75})"
    )
    line = "r train: 2/2  reward 0.75  accuracy 0.25  left 0:00\n"
    piped = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=True)
    assert piped.stderr == line.encode()
    assert (tmp_path / "job.log").read_text().splitlines() == [
        "r train: 1/2  reward 0.5  accuracy 0.25",
        "r train: 2/2  reward 0.75  left 0:00",
    ]
    for variables, expected in (({}, line), ({"SLURM_JOB_ID": "7"}, "")):
        with (tmp_path / "stderr").open("w") as file:
            environment = {**os.environ, **variables}
            subprocess.run([sys.executable, "-c", code], stderr=file, env=environment, check=True)
        assert (tmp_path / "stderr").read_text() == expected


def test_a_job_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    log = tmp_path / "job.log"
    job = (
        "import os, pathlib, time\n"
        "from mcore_mas.runtime.joblog import logged\n"
        f"with logged({str(log)!r}):\n"
        f"    pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()) + '.')\n"
        "    time.sleep(60)"
    )
    starter = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {job!r}])"
    parent = subprocess.Popen([sys.executable, "-c", starter])
    deadline = time.monotonic() + 30
    while not (pid_file.is_file() and pid_file.read_text().endswith(".")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = psutil.Process(int(pid_file.read_text().rstrip(".")))
    parent.kill()
    parent.wait()
    child.wait(timeout=60)
    assert not child.is_running()
