"""Paths that jobs' shell commands cannot have are refused in one line; awkward ones that they can are not."""

import subprocess
import sys
from pathlib import Path

import pytest

from mcore_mas.pipeline.suite_file import check_command
from mcore_mas.runtime import project_path
from mcore_mas.runtime.project_path import path_problem


@pytest.mark.parametrize("name", ["two words", "it's", "größer", "a&b;c", "100%", "#1 (new)", "*?"])
def test_a_folder_that_can_be_quoted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert path_problem() == ""


@pytest.mark.parametrize("name", ['a"b', "$HOME", "a`b", "a\\b", "{run}", "a\nb"])
def test_a_folder_that_cannot_be_quoted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert path_problem().startswith(f"the path of the current folder, {str(folder)!r}, has the")
    with pytest.raises(SystemExit, match="error: the path of the current folder"):
        check_command(["all"])


def test_a_python_that_cannot_be_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/home/me/$lab/.venv/bin/python")
    assert path_problem().startswith("the path of this Python, '/home/me/$lab/")


def test_the_check_runs_as_a_script_before_there_is_an_environment(tmp_path: Path) -> None:
    folder = tmp_path / "a$b"
    folder.mkdir()
    command = [sys.executable, "-I", project_path.__file__]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: the path of the current folder, ")
