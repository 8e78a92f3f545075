"""A run is used from any directory, and after its folder was moved or copied."""

import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.config.run_paths import relocate_paths

VALUES = {
    "run": "mine",
    "results": "results",
    "policies": {"solver": {"model": "results/mine/bootstrap/model"}},
    "policy_defaults": {"model": "models/tiny"},
    "data": {"train": [{"path": "data/absent.csv"}], "generator": "arithmetic/hard"},
    "tracking": {"uri": "sqlite:///results/mlflow.db"},
    "trainer": {"steps": 3},
    "agents": {"solver": {"user": "Write <answer>...</answer>. " * 200}},
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with a run and a model; the working directory is another one."""
    project = tmp_path / "project"
    (project / "results" / "mine" / "tasks").mkdir(parents=True)
    (project / "models" / "tiny").mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return project


def values_at(folder: Path) -> dict[str, Any]:
    return relocate_paths(VALUES, folder / "config.yaml")


def test_in_the_directory_of_the_project_nothing_changes(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    assert values_at(Path("results/mine")) == VALUES


def test_elsewhere_the_paths_of_the_project_are_absolute(project: Path) -> None:
    Path("models/tiny").mkdir(parents=True)  # the working directory has a model of this name too
    values = values_at(project / "results" / "mine")
    assert values["results"] == str(project / "results")
    assert values["run"] == "mine"
    assert values["policies"]["solver"]["model"] == f"{project}/results/mine/bootstrap/model"
    assert values["policy_defaults"]["model"] == f"{project}/models/tiny"
    assert values["tracking"]["uri"] == f"sqlite:///{project}/results/mlflow.db"
    # A text that names no file of the project stays, and so does every number.
    assert values["data"] == VALUES["data"]
    assert values["trainer"] == VALUES["trainer"]
    assert values["agents"] == VALUES["agents"]  # a prompt, longer than a path may be
    assert str(project) in sys.path  # where the modules of the user's team are


def test_a_moved_run_has_the_paths_of_its_new_folder(project: Path, tmp_path: Path) -> None:
    moved = tmp_path / "archive" / "renamed"
    moved.parent.mkdir()
    (project / "results" / "mine").rename(moved)
    values = values_at(moved)
    assert (values["results"], values["run"]) == (str(moved.parent), "renamed")
    assert values["policies"]["solver"]["model"] == f"{moved}/bootstrap/model"
    # A model outside of the run's folder did not move with it.
    assert values["policy_defaults"]["model"] == "models/tiny"


def test_a_database_in_the_folder_of_a_moved_run_moves_with_it(
    project: Path, tmp_path: Path
) -> None:
    moved = (project / "results" / "mine").rename(tmp_path / "renamed")
    written = {**VALUES, "tracking": {"uri": "sqlite:///results/mine/mlflow.db"}}
    values = relocate_paths(written, moved / "config.yaml")
    assert values["tracking"]["uri"] == f"sqlite:///{moved}/mlflow.db"


def test_a_config_without_a_run_beside_it_is_unchanged(tmp_path: Path) -> None:
    assert values_at(tmp_path) == VALUES
