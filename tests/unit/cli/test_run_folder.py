"""A run is named by its folder, or by its name in results/."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_mas.cli.arguments import results_folder, run_folder
from rollout.base.ownership import FolderError
from rollout.records.files import write_trajectories
from tests.support.played import trajectory, turn
from tests.support.run_files import write_small_run


def test_a_folder_without_a_run_does_not_hide_the_run_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_small_run(tmp_path / "results" / "one", {"t": 1.0})
    (tmp_path / "one").mkdir()  # as `mcore-mas new` makes a package of this name
    assert run_folder(Path("one")) == run_folder(Path("results/one")) == Path("results/one")
    assert results_folder(Path("one")) == Path("results/one")
    assert results_folder(Path("results")) == Path("results")
    with pytest.raises(FolderError, match=r"^onee: no run here; .*; nearest: one$"):
        run_folder(Path("onee"))
    write_small_run(tmp_path / "one", {"t": 1.0})
    assert run_folder(Path("one")) == results_folder(Path("one")) == Path("one")


def call_without_privileges(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call `mcore-mas` in a folder, as a user whom permissions of files bind."""
    command = [sys.executable, "-m", "mcore_mas", *arguments]
    if os.geteuid() == 0:  # root can read all files as long as it has these capabilities
        without = "-dac_override,-dac_read_search"
        command = ["setpriv", "--bounding-set", without, "--inh-caps", without, *command]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_runs_that_only_another_user_can_read_are_named(tmp_path: Path) -> None:
    for run in ("mine", "theirs"):
        write_small_run(tmp_path / "results" / run, {"t": 1.0})
    (tmp_path / "results" / "theirs").chmod(0)

    message = (
        f"results/theirs: not readable here; it belongs to {getpass.getuser()}, who can open it "
        "(chmod -R a+rX)"
    )
    listed = call_without_privileges(tmp_path, "ls")
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.startswith(f"{message}\n")
    assert "mine" in listed.stdout
    for command in ("chat", "show", "explain"):
        refused = call_without_privileges(tmp_path, command, "theirs")
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"error: {message}"), refused.stderr


@pytest.mark.parametrize("page", ["locked/x.html", "locked/new/x.html"])
def test_a_folder_that_may_not_be_written_is_named_as_the_user_did(
    page: str, tmp_path: Path
) -> None:
    file = tmp_path / "one.parquet"
    write_trajectories(file, [trajectory(turn(0))])
    (tmp_path / "locked").mkdir(mode=0o555)
    result = call_without_privileges(tmp_path, "show", "one.parquet", "--html", page)
    assert result.returncode == 1
    assert result.stderr.startswith(
        f"error: {page}: cannot be written, because you may not write to {tmp_path}/locked; name "
        "another path, or change its permissions"
    )
