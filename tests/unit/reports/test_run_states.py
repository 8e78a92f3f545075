"""States of runs, from files that can be read by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcore_mas.cli.main import app
from mcore_mas.reports.run_states import RunState, read_run_states
from rollout.base.ownership import FolderError
from tests.support.run_files import write_small_run


def test_runs_of_a_folder_have_their_steps_and_scores(tmp_path: Path) -> None:
    write_small_run(tmp_path / "a", {"t": 0.0, "u": 0.5, "only": 1.0})
    write_small_run(tmp_path / "b", {"t": 0.5, "u": 0.5}, trainer={"steps": 2})
    (tmp_path / "b" / "train" / "done.json").touch()
    first, second = read_run_states(tmp_path)
    assert first == RunState(
        run="a",
        steps=2,
        total_steps=4,
        done=False,
        reward=0.75,
        accuracy=0.25,
        scores={"trained": 0.5},
    )
    assert (second.run, second.total_steps, second.done) == ("b", 2, True)
    assert read_run_states(tmp_path / "a") == [first]
    with pytest.raises(FolderError, match="none: no such folder"):
        read_run_states(tmp_path / "none")


def test_the_command_lists_runs(tmp_path: Path) -> None:
    write_small_run(tmp_path / "a", {"t": 0.5})
    output = CliRunner().invoke(app, ["ls", str(tmp_path)], env={"COLUMNS": "80"}).stdout
    cells = [cell.strip() for cell in output.splitlines()[2].split("│")]
    assert cells == ["a", "2/4", "0.750", "0.250", "", "0.500"]
    empty = tmp_path / "a" / "train"
    output = CliRunner().invoke(app, ["ls", str(empty)], env={"COLUMNS": "80"}).stdout
    assert output == f"no runs in {empty}\n"
