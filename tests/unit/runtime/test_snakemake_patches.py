"""Snakemake's shell commands have the path of its Python in quotes, once."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import snakemake_executor_plugin_slurm_jobstep as jobstep
from snakemake.executors import local
from snakemake.script import PythonScript

from mcore_mas.runtime.snakemake_patches import quote_interpreter

PATH = "/home/me/it's two wörds/.venv/bin/python"
QUOTED = """'/home/me/it'"'"'s two wörds/.venv/bin/python'"""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Commands that scripts execute, under a Python with an awkward path."""
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
