"""Snakemake's shell commands have the path of its Python in quotes, once."""

import logging
import os
import sys
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
import snakemake_executor_plugin_slurm_jobstep as jobstep
from snakemake import benchmark
from snakemake.executors import local
from snakemake.logging import ColorizingTextHandler, DefaultFormatter, logger
from snakemake.script import PythonScript
from snakemake_interface_logger_plugins.common import LogEvent

from mcore_mas.runtime.snakemake_patches import (
    describe_request,
    hide_job_errors,
    measure_jobs_less_often,
    quote_interpreter,
)

PATH = "/home/me/it's two wörds/.venv/bin/python"
QUOTED = """'/home/me/it'"'"'s two wörds/.venv/bin/python'"""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield commands that scripts execute, under a Python with an awkward path."""
    executed: list[str] = []

    def execute(script: Any, command: str, **options: Any) -> None:
        executed.append(options.get("py_exec", command))

    monkeypatch.setattr(sys, "executable", PATH)
    monkeypatch.setattr(PythonScript, "_execute_cmd", execute)
    for module in (local, jobstep):
        executor: Any = module.Executor
        original = executor.get_python_executable
        monkeypatch.setattr(executor, "get_python_executable", original)
    yield executed


def test_the_path_is_quoted_in_scripts_and_jobs(commands: list[str]) -> None:
    quote_interpreter()
    quote_interpreter()  # a second Snakefile in the same process
    script: Any = PythonScript.__new__(PythonScript)
    script._execute_cmd("{py_exec} {fname:q}", py_exec=PATH, fname="x.py")
    script._execute_cmd("{py_exec} {fname:q}", py_exec="python", fname="x.py")
    script._execute_cmd("python --version", read=True)
    assert commands == [QUOTED, "python", "python --version"]
    for module in (local, jobstep):
        executor: Any = module.Executor
        assert executor.get_python_executable(None) == QUOTED


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        (
            {"mem_mb": 2000, "runtime": 30},
            "1 machine with 1 CPU and 2.0 GB of memory, for 30 min",
        ),
        (
            {"mem_mb": 47_000, "runtime": 1440, "gres": "gpu:1", "cpus_per_task": 12, "nodes": 1},
            "1 machine with 1 GPU, 12 CPUs and 47.0 GB of memory, for 24 h",
        ),
        (
            {"mem_mb": 900_000, "runtime": 600, "gres": "gpu:8", "cpus_per_task": 20, "nodes": 2},
            "2 machines, each with 8 GPUs, 20 CPUs and 900.0 GB of memory, for 10 h",
        ),
        ({}, "1 machine with 1 CPU and any amount of memory, without a time limit"),
    ],
)
def test_a_request_in_words(resources: dict[str, Any], text: str) -> None:
    assert describe_request(resources) == text


@pytest.mark.parametrize("shows_logs", [False, True])
def test_blocks_about_failed_jobs_are_shown_only_with_their_logs(
    monkeypatch: pytest.MonkeyPatch, shows_logs: bool
) -> None:
    terminal = StringIO()
    handler = ColorizingTextHandler(nocolor=True, stream=terminal)
    handler.setFormatter(DefaultFormatter(quiet=set(), show_failed_logs=shows_logs))
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    hide_job_errors()
    error = {"event": LogEvent.ERROR, "exception": "WorkflowError"}
    logger.error("WorkflowError:\nAt least one job did not complete successfully.", extra=error)
    logger.error("RuleException:\nCalledProcessError in file a.smk, line 3:\n...", extra=error)
    logger.error("Exiting because a job execution failed. Look above for error messages")
    assert (terminal.getvalue() != "") is shows_logs
    logger.error("WorkflowError:\nNo such target.", extra=error)
    assert "No such target." in terminal.getvalue()


def test_a_job_is_measured_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "BENCHMARK_INTERVAL_SHORT", 0.5)  # undone after the test
    measure_jobs_less_often()
    timer: Any = benchmark.BenchmarkTimer(os.getpid(), benchmark.BenchmarkRecord())
    timer.start()
    assert timer._timer.interval == 5
    timer.cancel()
