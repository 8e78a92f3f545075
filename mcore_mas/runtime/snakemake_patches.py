"""Patches of Snakemake (9.27.1) and its executors for Slurm (2.8.0, jobstep 0.6.1).

`quote_interpreter` lets jobs start whatever the path of the Python is, `show_requests` lets dry runs
show what each job asks for, `report_silent_failures` lets Snakemake report every failed job,
`hide_job_errors` leaves the last word on failed jobs to the pipeline's last lines, and
`measure_jobs_less_often` leaves more processor time to short jobs.
"""

import logging
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

# Parts of Snakemake's messages that only say that some job has failed.
_SOME_JOB_FAILED = (
    "CalledProcessError in file",
    "Exiting because a job execution failed",
    "At least one job did not complete successfully",
)

_EXECUTOR_MODULES = (
    "snakemake.executors.local",
    "snakemake_executor_plugin_slurm",
    "snakemake_executor_plugin_slurm_jobstep",
)


def quote_interpreter() -> None:
    """Let Snakemake quote the path of its Python in the shell commands of jobs.

    Snakemake and its executors put the path into these commands as it is. Without this patch no job
    starts in a project whose path has a blank or a quotation mark.
    """
    from snakemake.script import PythonScript

    execute_command: Any = PythonScript._execute_cmd

    def execute_quoted(script: Any, command: str, **options: Any) -> Any:
        if "py_exec" in options:
            options["py_exec"] = _quote_own_python(options["py_exec"])
        return execute_command(script, command, **options)

    PythonScript._execute_cmd = execute_quoted

    for module in _EXECUTOR_MODULES:
        executor: Any = getattr(sys.modules.get(module), "Executor", None)
        if executor is not None:
            executor.get_python_executable = _with_quotes(executor.get_python_executable)


def _with_quotes(get_python_executable: Any) -> Any:
    return lambda executor: _quote_own_python(get_python_executable(executor))


def _quote_own_python(path: str) -> str:
    """Quote the path of this Python; a path that is quoted already stays as it is."""
    return shlex.quote(path) if path == sys.executable else path


def show_requests() -> None:
    """Let Snakemake show below the message of a job what the job asks for.

    Otherwise Snakemake shows the resources of rules without a message only. Jobs that always run in
    the main process ask for nothing.
    """
    from snakemake.jobs import Job

    message: Any = Job.message.fget

    def message_with_request(job: Any) -> str | None:
        text: str | None = message(job)
        is_local = job.rule.name in job.dag.workflow._localrules
        if text is None or is_local or "\nAsks for " in text:
            return text
        request = describe_request(job.resources)
        cpus = job.resources.get("cpus_per_task", 1)
        machine_cpus = len(os.sched_getaffinity(0))
        if job.dag.workflow.local_exec and cpus > machine_cpus:
            request += f" (under Slurm; here its processes share {machine_cpus} CPUs)"
        return f"{text}\nAsks for {request}"

    job_class: Any = Job
    job_class.message = property(message_with_request)


def describe_request(resources: Mapping[str, Any]) -> str:
    """Describe resources of a job, for example "2 machines, each with 8 GPUs, 20 CPUs and ...".

    Args:
        resources: resources of a job by name, as Snakemake has resolved them. Without `nodes`, the
            job is on one machine; without `gres`, it gets no GPU.
    """
    machines = resources.get("nodes", 1)
    parts = []
    gpus = str(resources.get("gres", "")).removeprefix("gpu:")
    if gpus:
        parts.append(f"{gpus} GPUs" if gpus != "1" else "1 GPU")
    cpus = resources.get("cpus_per_task", 1)
    parts.append(f"{cpus} CPUs" if cpus != 1 else "1 CPU")
    memory_mb = resources.get("mem_mb")
    memory = f"{memory_mb / 1000:.1f} GB" if isinstance(memory_mb, int) else "any amount"
    machine = "1 machine with" if machines == 1 else f"{machines} machines, each with"
    runtime = resources.get("runtime")
    time_limit = f"for {_duration(runtime)}" if isinstance(runtime, int) else "without a time limit"
    return f"{machine} {', '.join(parts)} and {memory} of memory, {time_limit}"


def _duration(minutes: int) -> str:
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:g} h"


def hide_job_errors() -> None:
    """Keep Snakemake's blocks about failed jobs out of the terminal.

    The blocks only name a process that exited with status 1. The last lines of the pipeline name the
    causes (see `pipeline_messages`), which they read in Snakemake's log file, where the blocks stay.
    With `--verbose` they are shown, and with `--show-failed-logs`, which prints logs in them.
    """
    from snakemake.logging import ColorizingTextHandler, logger

    if logger.level <= logging.DEBUG:
        return
    for handler in logger.handlers:
        shows_logs = getattr(handler.formatter, "show_failed_logs", False)
        if isinstance(handler, ColorizingTextHandler) and not shows_logs:
            handler.addFilter(_describes_no_failed_job)


def _describes_no_failed_job(record: logging.LogRecord) -> bool:
    """Return True unless a record of Snakemake's logger only says that a job has failed."""
    event = getattr(record, "event", None)
    if event in ("job_error", "group_error"):
        return False
    text = record.getMessage()
    return not any(part in text for part in _SOME_JOB_FAILED)


def report_silent_failures() -> None:
    """Let Snakemake report every failed job; do nothing if the executor for Slurm is not loaded.

    Snakemake leaves out why a group of jobs failed. The executor waits for ever for a group that it
    cannot submit, and for a job of which sacct says `CANCELLED by 1000`.
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


def measure_jobs_less_often() -> None:
    """Let Snakemake measure a job's processes every five seconds at first, instead of twice a second.

    For the memory in the files of the rules' `benchmark`, the kernel walks through all pages of the
    job's processes, Ray's among them, which takes 10 to 30 ms for each process with torch.
    """
    from snakemake import benchmark

    benchmark.BENCHMARK_INTERVAL_SHORT = 5.0
