"""Patches that make Snakemake (9.27.1) and its Slurm executor (2.8.0) report all failed jobs."""

import sys
from typing import Any


def report_silent_failures() -> None:
    """Let Snakemake report every failed job; does nothing if the executor for Slurm is not loaded.

    Snakemake leaves out why a group of jobs failed. The executor waits for ever for a group that it cannot submit, and
    for a job of which sacct says `CANCELLED by 1000`.
    """
    executor: Any = sys.modules.get("snakemake_executor_plugin_slurm")
    query_job_status: Any = getattr(executor, "query_job_status", None)
    if query_job_status is None:
        return

    async def query_first_word(command: str, logger: Any) -> Any:
        states, seconds = await query_job_status(command, logger)
        if states:
            states = {job: state.partition(" ")[0] for job, state in states.items()}
        return states, seconds

    def log_error(group: Any, msg: str | None = None, **options: Any) -> None:
        for job in group.jobs:
            job.log_error(msg, **options)

    executor.query_job_status = query_first_word
    group_job: Any = sys.modules["snakemake.jobs"].GroupJob
    group_job.log_error = log_error
    group_job.rule = property(lambda group: next(iter(group.jobs)).rule)
