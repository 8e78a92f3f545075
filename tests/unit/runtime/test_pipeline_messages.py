"""The last lines of a pipeline name what was made, or each cause of a failure with the logs of its jobs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcore_mas.runtime.pipeline_messages import failure_message, success_message


def test_success_names_what_was_made(tmp_path: Path) -> None:
    assert success_message(tmp_path, "demo").startswith(
        f"\nDone.\n`mcore-mas studio {tmp_path}` opens"
    )
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/demo.html").touch()
    assert f"Done.   Report: {tmp_path}/reports/demo.html\n" in success_message(tmp_path, "demo")


def test_success_begins_with_the_gains(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/demo.csv").write_text(
        "experiment,policy_state,dataset,metric,value,ci_low,ci_high\n"
        "math,base,all,avg@4,0.4,0.35,0.45\n"
        "math,trained,all,avg@4,0.836,0.79,0.87\n"
        "math,trained-base,all,avg@4,0.436,0.386,0.484\n"
        "math,base,all,pass@4,0.7,0.6,0.8\n"
        "math,base,add_2digit,avg@4,0.6,0.5,0.7\n"
        "untrained,base,all,avg@4,0.5,0.4,0.6\n"
    )
    assert success_message(tmp_path, "demo").splitlines()[1:3] == [
        "math       avg@4: 40.0 % before training, 83.6 % after: +43.6 points [+38.6, +48.4]",
        "Done.",
    ]


def test_failure_names_each_cause_and_its_logs(tmp_path: Path) -> None:
    first, second, silent = (tmp_path / f"{name}.log" for name in ("first", "second", "silent"))
    for log in (first, second):
        log.write_text("Traceback ...\nerror: a.parquet: no such file\n")
    silent.write_text("".join(f"step {number}\n" for number in range(40)))
    earlier = tmp_path / "earlier.log"  # written by an earlier pipeline
    earlier.write_text("error: long ago\n")
    os.utime(earlier, (1.0, 1.0))
    missing = tmp_path / "missing.log"  # its job has not begun

    logs = [str(log) for log in (first, silent, second, earlier, missing)]
    message = failure_message(logs, 2.0, [], lines=3)
    assert message.count("error: ") == 2
    assert f"error: a.parquet: no such file\n  logs: {first}, {second}" in message
    end = "the end of its log:\n  | step 37\n  | step 38\n  | step 39\n"
    assert f"{end}  logs: {silent}" in message
    assert "Traceback" not in message


def test_failure_without_any_log_names_snakemakes_own(tmp_path: Path) -> None:
    message = failure_message([str(tmp_path / "missing.log")], 2.0, ["a.log"])
    assert message == "\nerror: no job wrote a log; see a.log"


def test_a_job_that_ends_well_while_the_pipeline_is_stopped_was_not_killed(tmp_path: Path) -> None:
    job, snakemake = tmp_path / "job.log", tmp_path / "snakemake.log"
    job.write_text("step 8\n")
    snakemake.write_text(
        "[Sat Nov 28]\nFinished\nTerminating processes on user request, this might take some time.\n"
    )
    cause = "error: the pipeline was stopped; the same command continues from what is saved"
    assert failure_message([str(job)], 0.0, [str(snakemake)]) == f"\n{cause}\n  logs: {job}"

    job.write_text("error: stopped by SIGTERM after step 3\n")
    message = failure_message([str(job)], 0.0, [str(snakemake)])
    assert "error: stopped by SIGTERM after step 3" in message


def test_the_end_of_a_log_is_printed_without_terminal_commands(tmp_path: Path) -> None:
    log = tmp_path / "killed.log"
    log.write_text("what a program said: \x1b]52;c;aGk=\x07", newline="")
    message = failure_message([str(log)], 0.0, [])
    assert r"  | what a program said: \x1b]52;c;aGk=\x07" in message.splitlines()
    assert not set(message) & set("\x1b\x07\r\x9b\u202e")


def ended(number: int, state: str, log: Path, slurm_log: Path) -> str:
    """Return what Snakemake 9.27 logs about a job that Slurm has ended."""
    return (
        f"[Sun Nov 22 15:54:43 2026]\nError in rule train:\n    message: SLURM-job '{number}' failed, "
        f"SLURM status is: '{state}'. Detailed failure reason unavailable.\n"
        f"    log: {log}, {slurm_log} (check)\n"
    )


def refused(reason: str, log: Path) -> str:
    """Return what Snakemake 9.27 logs about a job that Slurm has not accepted."""
    return (
        f"[Sun Nov 22 15:54:44 2026]\nError in rule train:\n    message: {reason}\n"
        f"    log: {log} (check)\n"
    )


@pytest.fixture
def slurm_log(tmp_path: Path) -> Path:
    """The log that Slurm keeps of job 15."""
    path = tmp_path / "slurm/15.log"
    path.parent.mkdir()
    path.touch()
    return path


def test_slurm_says_why_a_job_ended_that_did_not_say_it_itself(
    tmp_path: Path, slurm_log: Path
) -> None:
    explained, silent = tmp_path / "explained.log", tmp_path / "silent.log"
    explained.write_text("error: a.parquet: no such file\n")
    silent.write_text("step 1\n")
    workflow = tmp_path / "workflow.log"
    workflow.write_text(
        ended(15, "TIMEOUT", silent, slurm_log) + ended(15, "FAILED", explained, slurm_log)
    )
    message = failure_message([str(explained), str(silent)], 2.0, [workflow])
    assert f"error: a.parquet: no such file\n  logs: {explained}" in message
    assert f"error: Slurm job 15: TIMEOUT; see {slurm_log}\n  logs: {silent}" in message


def test_a_group_of_stages_in_one_job_has_one_cause(tmp_path: Path, slurm_log: Path) -> None:
    explained, silent = tmp_path / "explained.log", tmp_path / "silent.log"
    explained.write_text("error: a.parquet: no such file\n")
    silent.write_text("step 1\n")
    workflow = tmp_path / "workflow.log"
    workflow.write_text(
        ended(15, "FAILED", silent, slurm_log) + ended(15, "FAILED", explained, slurm_log)
    )
    message = failure_message([str(silent), str(explained)], 2.0, [workflow])
    assert message.count("error: ") == 1


SBATCH = (
    "SLURM sbatch failed. The error message was 'sbatch: error: Requested node configuration\n"
    "is not available'."
)
ACCOUNT = (  # Snakemake joins the two lines at the end without a space
    "Job submission failed with exception: The given account x appears to be invalid. "
    "Available accounts:\nlabFor further error details see the cluster/cloud log"
)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (SBATCH, "sbatch: error: Requested node configuration is not available"),
        (ACCOUNT, "The given account x appears to be invalid. Available accounts: lab"),
    ],
)
def test_a_job_that_slurm_does_not_take(tmp_path: Path, reason: str, expected: str) -> None:
    log, workflow = tmp_path / "refused.log", tmp_path / "workflow.log"
    workflow.write_text(refused(reason, log))
    message = failure_message([str(log)], 2.0, [workflow])
    assert f"error: Slurm does not take the job: {expected}\n" in message


def test_a_job_that_used_too_much_memory(tmp_path: Path, slurm_log: Path) -> None:
    log, workflow = tmp_path / "job.log", tmp_path / "workflow.log"
    killed = "StepId=15.0 exceeded memory limit (9 > 8), being killed"
    slurm_log.write_text(f"slurmstepd-n0: error: {killed}\nsrun: error\n")
    workflow.write_text(ended(15, "FAILED", log, slurm_log))
    message = failure_message([str(log)], 2.0, [workflow])
    assert f"error: Slurm job 15: FAILED, {killed}; see {slurm_log}" in message


def test_a_job_whose_log_is_on_another_machine(tmp_path: Path) -> None:
    log, workflow = tmp_path / "job.log", tmp_path / "workflow.log"
    workflow.write_text(ended(16, "CANCELLED", log, tmp_path / "slurm/16.log"))
    message = failure_message([str(log)], 2.0, [workflow])
    assert "error: Slurm job 16: CANCELLED\n" in message  # the job may never have run

    workflow.write_text(ended(16, "FAILED", log, tmp_path / "slurm/16.log"))
    message = failure_message([str(log)], 2.0, [workflow])
    expected = "FAILED, and its log is not here; do all machines share this folder?"
    assert f"error: Slurm job 16: {expected}" in message
