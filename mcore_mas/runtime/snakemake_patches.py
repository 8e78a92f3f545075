"""Patches of Snakemake (9.27.1) and its executors for Slurm (2.8.0, jobstep 0.6.1).

`quote_interpreter` lets jobs start whatever the path of the Python is, and `report_silent_failures`
lets Snakemake report every failed job.
"""

import shlex
import sys
from typing import Any

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


def report_silent_failures() -> None:
    """Let Snakemake report every failed job; does nothing if the executor for Slurm is not loaded.

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
