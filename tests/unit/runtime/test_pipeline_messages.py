"""Closing message of a pipeline: the results it made, or each cause of a failure with the logs of its jobs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcore_mas.runtime.pipeline_messages import failure_message, success_message


def test_success_names_the_report_and_the_studio(tmp_path: Path) -> None:
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
    first = tmp_path / "first.log"
    second = tmp_path / "second.log"
    silent = tmp_path / "silent.log"
    for log in (first, second):
        log.write_text("Traceback ...\nerror: a.parquet: no such file\n")
    silent.write_text("".join(f"step {number}\n" for number in range(40)))
    earlier = tmp_path / "earlier.log"  # the log of an earlier pipeline
    earlier.write_text("error: long ago\n")
    os.utime(earlier, (1.0, 1.0))
    missing = tmp_path / "missing.log"  # the log of a job that has not begun

    logs = [str(log) for log in (first, silent, second, earlier, missing)]
    message = failure_message(logs, 2.0, [], lines=3)
    assert message.count("error: ") == 2
    assert f"error: a.parquet: no such file\n  logs: {first}, {second}" in message
    last_lines = "the end of its log:\n  | step 37\n  | step 38\n  | step 39\n"
    assert f"{last_lines}  logs: {silent}" in message
    next_step = "When the cause is mended, the same command continues from what is saved."
    assert message.splitlines()[-1] == next_step
    assert "Traceback" not in message


def test_failure_without_a_job_log_names_snakemakes_log(tmp_path: Path) -> None:
    message = failure_message([str(tmp_path / "missing.log")], 2.0, ["a.log"])
    assert message == "\nerror: no job wrote a log; see a.log"


def test_jobs_that_stopped_with_the_pipeline_are_no_errors(tmp_path: Path) -> None:
    names = ("one", "two", "finished", "broken")
    one, two, finished, broken = (tmp_path / f"{name}.log" for name in names)
    snakemake = tmp_path / "snakemake.log"
    saved = "stopped by SIGINT after step 3; the same command continues from its checkpoint"
    one.write_text(f"error: {saved}\n")
    two.write_text(f"error: {saved}\n")
    finished.write_text("step 8\n")
    broken.write_text("error: a.parquet: no such file\n")
    snakemake.write_text(
        "[Sat Nov 28]\nTerminating processes on user request, this might take some time.\n"
    )
    pipeline = "the pipeline was stopped; the same command continues from what is saved"
    logs = [str(log) for log in (one, two, finished)]
    message = failure_message(logs, 0.0, [str(snakemake)])
    assert message == f"\n{saved}\n  logs: {one}, {two}\n\n{pipeline}\n  logs: {finished}"

    message = failure_message([*logs, str(broken)], 0.0, [str(snakemake)])
    assert [line for line in message.splitlines() if "error" in line] == [
        "error: a.parquet: no such file"
    ]
    # With --quiet, Snakemake's log is empty.
    assert failure_message(logs, 0.0, []).count("error") == 0

    # The signal of a job alone ends the pipeline, which nobody asked for.
    one.write_text("error: stopped by SIGTERM after step 3\n")
    assert "error: stopped by SIGTERM after step 3" in failure_message([str(one)], 0.0, [])


def test_terminal_commands_in_a_log_are_escaped(tmp_path: Path) -> None:
    log = tmp_path / "killed.log"
    log.write_text("output of a program: \x1b]52;c;aGk=\x07", newline="")
    message = failure_message([str(log)], 0.0, [])
    assert r"  | output of a program: \x1b]52;c;aGk=\x07" in message.splitlines()
    assert not set(message) & set("\x1b\x07\r\x9b\u202e")


def failed_job_entry(number: int, state: str, log: Path, slurm_log: Path) -> str:
    """Return the entry in Snakemake 9.27's log for a job that Slurm ended in a failed state."""
    return (
        f"[Sun Nov 22 15:54:43 2026]\nError in rule train:\n    message: SLURM-job '{number}' failed, "
        f"SLURM status is: '{state}'. Detailed failure reason unavailable.\n"
        f"    log: {log}, {slurm_log} (check)\n"
    )


def refused_job_entry(reason: str, log: Path) -> str:
    """Return the entry in Snakemake 9.27's log for a job that Slurm did not accept."""
    return (
        f"[Sun Nov 22 15:54:44 2026]\nError in rule train:\n    message: {reason}\n"
        f"    log: {log} (check)\n"
    )


@pytest.fixture
def slurm_log(tmp_path: Path) -> Path:
    """Return the path of an empty log that Slurm wrote for job 15."""
    path = tmp_path / "slurm/15.log"
    path.parent.mkdir()
    path.touch()
    return path


def test_slurms_state_is_the_cause_if_the_job_logged_no_error(
    tmp_path: Path, slurm_log: Path
) -> None:
    explained = tmp_path / "explained.log"
    silent = tmp_path / "silent.log"
    explained.write_text("error: a.parquet: no such file\n")
    silent.write_text("step 1\n")
    workflow = tmp_path / "workflow.log"
    workflow.write_text(
        failed_job_entry(15, "TIMEOUT", silent, slurm_log)
        + failed_job_entry(15, "FAILED", explained, slurm_log)
    )
    message = failure_message([str(explained), str(silent)], 2.0, [workflow])
    assert f"error: a.parquet: no such file\n  logs: {explained}" in message
    assert f"error: Slurm job 15: TIMEOUT; see {slurm_log}\n  logs: {silent}" in message


def test_stages_grouped_in_one_job_report_one_cause(tmp_path: Path, slurm_log: Path) -> None:
    explained = tmp_path / "explained.log"
    silent = tmp_path / "silent.log"
    explained.write_text("error: a.parquet: no such file\n")
    silent.write_text("step 1\n")
    workflow = tmp_path / "workflow.log"
    workflow.write_text(
        failed_job_entry(15, "FAILED", silent, slurm_log)
        + failed_job_entry(15, "FAILED", explained, slurm_log)
    )
    message = failure_message([str(silent), str(explained)], 2.0, [workflow])
    assert message.count("error: ") == 1


SBATCH = (
    "SLURM sbatch failed. The error message was 'sbatch: error: Requested node configuration\n"
    "is not available'."
)
# Snakemake joins the last two lines without a space.
ACCOUNT = (
    "Job submission failed with exception: The given account x appears to be invalid. "
    "Available accounts:\nlabFor further error details see the cluster/cloud log"
)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (SBATCH, "sbatch: error: Requested node configuration is not available"),
        (ACCOUNT, "The given account x appears to be invalid. Available accounts: lab"),
        ("SLURM sbatch failed. The error message was ''.", "sbatch gave no reason"),
    ],
)
def test_a_refused_job_reports_sbatchs_reason(tmp_path: Path, reason: str, expected: str) -> None:
    log = tmp_path / "refused.log"
    workflow = tmp_path / "workflow.log"
    workflow.write_text(refused_job_entry(reason, log))
    message = failure_message([str(log)], 2.0, [workflow])
    assert f"error: Slurm does not take the job: {expected}\n" in message


def test_an_out_of_memory_kill_is_reported(tmp_path: Path, slurm_log: Path) -> None:
    log = tmp_path / "job.log"
    workflow = tmp_path / "workflow.log"
    reason = "StepId=15.0 exceeded memory limit (9 > 8), being killed"
    slurm_log.write_text(f"slurmstepd-n0: error: {reason}\nsrun: error\n")
    workflow.write_text(failed_job_entry(15, "FAILED", log, slurm_log))
    message = failure_message([str(log)], 2.0, [workflow])
    assert f"error: Slurm job 15: FAILED, {reason}; see {slurm_log}" in message


def test_a_missing_slurm_log_is_reported_unless_the_job_was_cancelled(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    workflow = tmp_path / "workflow.log"
    workflow.write_text(failed_job_entry(16, "CANCELLED", log, tmp_path / "slurm/16.log"))
    message = failure_message([str(log)], 2.0, [workflow])
    assert "error: Slurm job 16: CANCELLED\n" in message  # the job may never have run

    workflow.write_text(failed_job_entry(16, "FAILED", log, tmp_path / "slurm/16.log"))
    message = failure_message([str(log)], 2.0, [workflow])
    expected = "FAILED, and its log is not here; do all machines share this folder?"
    assert f"error: Slurm job 16: {expected}" in message
