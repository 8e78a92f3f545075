"""A job's log and what is said about a failed job."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import psutil
from ray.exceptions import RayTaskError

from mcore_mas.runtime.joblog import cause, failure_message, success_message
from rollout.records.files import RecordError


def run_job(log: Path, body: str) -> subprocess.CompletedProcess[str]:
    code = "import os, pathlib, subprocess, sys, time\nfrom mcore_mas.runtime.joblog import logged, terminal\n"
    command = [sys.executable, "-c", f"{code}with logged({str(log)!r}):\n    {body}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_all_output_goes_to_the_log_also_of_children(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "job.log"
    done = run_job(
        log, "print('one'); subprocess.run(['echo', 'two']); print('three', file=sys.stderr)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert log.read_text() == "one\ntwo\nthree\n"


def test_a_failure_ends_the_log_with_its_cause(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    done = run_job(log, "raise ValueError('first\\n  second')")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    assert log.read_text().splitlines()[0] == "Traceback (most recent call last):"
    assert log.read_text().splitlines()[-1] == "error: ValueError: first second"


def test_tracebacks_of_libraries_command_no_terminal(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    body = (
        "import asyncio, logging; from rollout.base.http_server import server_config\n"
        "    server_config(None, drain_s=1, lifespan=False)\n"
        "    said = ValueError('\\x1b]0;owned\\x07 \\u202e')\n"
        "    logging.getLogger('uvicorn.error').error('in the application', exc_info=said)\n"
        "    asyncio.new_event_loop().call_exception_handler({'message': 'never retrieved', 'exception': said})"
    )
    assert run_job(log, body).returncode == 0
    lines = log.read_text().splitlines()
    assert lines[:2] == ["ERROR: in the application", r"ValueError: \x1b]0;owned\x07 \u202e"]
    assert lines[-2:] == ["never retrieved", r"ValueError: \x1b]0;owned\x07 \u202e"]


def test_nothing_in_a_log_of_a_failure_commands_a_terminal(tmp_path: Path) -> None:
    log, killed = tmp_path / "job.log", tmp_path / "killed.log"
    run_job(log, r"raise ValueError('\x1b]0;owned\x07 \x9b2J a\rb \u202eevil')")
    assert (
        r"ValueError: \x1b]0;owned\x07 \x9b2J a\rb \u202eevil"
        in log.read_bytes().decode().split("\n")[-3]
    )
    killed.write_text("what a program said: \x1b]52;c;aGk=\x07", newline="")
    said = failure_message([str(log), str(killed)], 0.0, [])
    assert r"  | what a program said: \x1b]52;c;aGk=\x07" in said.splitlines()
    assert not set(log.read_bytes().decode() + said) & set("\x1b\x07\r\x9b\u202e")


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
    # the first cause is not its own
    assert "error: the job ended without saying why" in failure_message([str(log)], 0.0, [])


def test_own_messages_stand_without_the_name_of_their_class() -> None:
    assert cause(RecordError("a.parquet: no such file")) == "a.parquet: no such file"
    assert cause(KeyError("x")) == "KeyError: 'x'"
    assert cause(AssertionError()) == "AssertionError"


def test_an_error_in_a_process_of_rays_is_said_as_its_own() -> None:
    for error, line in [
        (ValueError("Invalid beta"), "ValueError: Invalid beta"),
        (RecordError("a: b"), "a: b"),
    ]:
        there = RayTaskError(
            "_Rank.join", "\x1b[36mray::_Rank.join()\nTraceback", error, "rank", 1, "127.0.0.1"
        )
        again = RayTaskError("train", "Traceback", there, "train", 1, "127.0.0.1")
        assert cause(there) == cause(there.as_instanceof_cause()) == cause(again) == line


def test_success_names_what_was_made(tmp_path: Path) -> None:
    assert success_message(tmp_path, "demo").startswith(
        f"\nDone.\n`mcore-mas studio {tmp_path}` opens"
    )
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/demo.html").touch()
    assert f"Done.   Report: {tmp_path}/reports/demo.html\n" in success_message(tmp_path, "demo")


def test_a_job_that_ends_well_while_the_pipeline_is_stopped_was_not_killed(tmp_path: Path) -> None:
    job, snakemake = tmp_path / "job.log", tmp_path / "snakemake.log"
    job.write_text("step 8\n")
    snakemake.write_text(
        "[Sat Nov 28]\nFinished\nTerminating processes on user request, this might take some time.\n"
    )
    said = f"\nerror: the pipeline was stopped; the same command goes on from what is saved\n  logs: {job}"
    assert failure_message([str(job)], 0.0, [str(snakemake)]) == said
    job.write_text("error: stopped by SIGTERM after step 3\n")
    assert "error: stopped by SIGTERM after step 3" in failure_message(
        [str(job)], 0.0, [str(snakemake)]
    )


def test_failure_names_each_cause_and_log(tmp_path: Path) -> None:
    said, again, silent = tmp_path / "said.log", tmp_path / "again.log", tmp_path / "silent.log"
    for path in (said, again):
        path.write_text("Traceback ...\nerror: a.parquet: no such file\n")
    silent.write_text("".join(f"step {i}\n" for i in range(40)))
    before, never = (
        tmp_path / "before.log",
        tmp_path / "never.log",
    )  # of an earlier pipeline, and of no job yet
    before.write_text("error: long ago\n")
    os.utime(before, (1.0, 1.0))
    text = failure_message(map(str, (said, silent, again, before, never)), 2.0, [], lines=3)
    assert text.count("error: ") == 2
    assert f"error: a.parquet: no such file\n  logs: {said}, {again}" in text
    assert f"the end of its log:\n  | step 37\n  | step 38\n  | step 39\n  logs: {silent}" in text
    assert "Traceback" not in text
    assert (
        failure_message([str(before)], 2.0, ["a.log"]) == "\nerror: no job wrote a log; see a.log"
    )


def test_a_job_that_died_without_a_word_has_what_slurm_says(tmp_path: Path) -> None:
    said, silent, refused = (tmp_path / f"{name}.log" for name in ("said", "silent", "refused"))
    said.write_text("error: a.parquet: no such file\n")
    silent.write_text("step 1\n")
    kept, gone = tmp_path / "slurm/15.log", tmp_path / "slurm/16.log"
    kept.parent.mkdir()
    kept.touch()
    workflow = tmp_path / "workflow.log"  # as Snakemake 9.27 writes it

    def event(job: str, status: str, log: Path, own: Path) -> str:
        what = f"SLURM-job '{job}' failed, SLURM status is: '{status}'. Detailed failure reason unavailable."
        return f"[Sun Nov 22 15:54:43 2026]\nError in rule train:\n    message: {what}\n    log: {log}, {own} (check)\n"

    sbatch = "SLURM sbatch failed. The error message was 'sbatch: error: Requested node configuration\nis not available'."  # noqa: E501
    lines = [event("15", "TIMEOUT", silent, kept), event("15", "FAILED", said, kept)]
    lines += [
        f"[Sun Nov 22 15:54:44 2026]\nError in rule train:\n    message: {sbatch}\n    log: {refused} (check)\n"
    ]
    workflow.write_text("".join(lines))
    text = failure_message(map(str, (said, silent, refused)), 2.0, [workflow])
    assert f"error: a.parquet: no such file\n  logs: {said}" in text  # its own word comes first
    assert f"error: Slurm job 15: TIMEOUT; see {kept}\n  logs: {silent}" in text
    assert (
        "error: Slurm does not take the job: sbatch: error: Requested node configuration is not available\n"
        in text
    )
    account = "Job submission failed with exception: The given account x appears to be invalid. Available accounts:\n"
    account += "labFor further error details see the cluster/cloud log"  # as they are joined there
    event_of_one = (
        "[Sun Nov 22 15:54:44 2026]\nError in rule train:\n    message: {}\n    log: {} (check)"
    )
    workflow.write_text(event_of_one.format(account, refused))
    text = failure_message([str(refused)], 2.0, [workflow])
    assert (
        "error: Slurm does not take the job: The given account x appears to be invalid. Available accounts: lab\n"
        in text
    )
    workflow.write_text(
        event("15", "FAILED", silent, kept) + event("15", "FAILED", said, kept)
    )  # a group of two stages
    assert failure_message(map(str, (silent, said)), 2.0, [workflow]).count("error: ") == 1
    kept.write_text(
        "slurmstepd-n0: error: StepId=15.0 exceeded memory limit (9 > 8), being killed\nsrun: error\n"
    )
    workflow.write_text(event("15", "FAILED", silent, kept))
    text = failure_message([str(silent)], 2.0, [workflow])
    assert (
        f"error: Slurm job 15: FAILED, StepId=15.0 exceeded memory limit (9 > 8), being killed; see {kept}"
        in text
    )
    workflow.write_text(event("16", "CANCELLED", refused, gone))
    assert "error: Slurm job 16: CANCELLED\n" in failure_message(
        [str(refused)], 2.0, [workflow]
    )  # it never ran
    workflow.write_text(event("16", "FAILED", refused, gone))
    assert (
        "error: Slurm job 16: FAILED, and its log is not here; do all machines share this folder?"
        in failure_message([str(refused)], 2.0, [workflow])
    )


def test_the_terminal_is_still_there_behind_the_log(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    leader, follower = pty.openpty()
    code = (
        "from mcore_mas.runtime.joblog import logged, terminal\n"
        f"with logged({str(log)!r}):\n    print('to the log'); print('to the screen', file=terminal(), end='')"
    )
    subprocess.run([sys.executable, "-c", code], stdout=follower, stderr=follower, check=True)
    os.close(follower)
    assert os.read(leader, 1000) == b"to the screen"
    os.close(leader)
    assert (log.read_text(), log.stat().st_mode & 0o777) == ("to the log\n", 0o600)


def test_a_job_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    ready, log = tmp_path / "pid", tmp_path / "job.log"
    job = (
        "import os, pathlib, time\nfrom mcore_mas.runtime.joblog import logged\n"
        f"with logged({str(log)!r}):\n"
        f"    pathlib.Path({str(ready)!r}).write_text(str(os.getpid()) + '.')\n"
        "    time.sleep(60)"
    )
    starter = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {job!r}])"
    parent = subprocess.Popen([sys.executable, "-c", starter])
    deadline = time.monotonic() + 30
    while not (ready.is_file() and ready.read_text().endswith(".")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = psutil.Process(int(ready.read_text().rstrip(".")))
    parent.kill()
    parent.wait()
    child.wait(timeout=10)
    assert not child.is_running()
