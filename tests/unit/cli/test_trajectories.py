"""Commands find the trajectories of a run by its name, its folder or a file."""

from pathlib import Path

import pytest

from rollout.records.files import write_trajectories
from tests.support.finished import finished
from tests.support.played import trajectory, turn
from tests.unit.cli.conftest import CallCommand

STEPS = "results/demo_math/train/trajectories"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a run with the trajectories of two steps into the current folder."""
    finished(tmp_path / "results", "demo_math", 0)
    for step, task in enumerate(("oldest", "newest")):
        file = tmp_path / STEPS / f"step_{step:06}.parquet"
        write_trajectories(file, [trajectory(turn(0), task_id=task)])
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("demo_math", "newest"),
        ("results/demo_math", "newest"),
        (f"{STEPS}/step_000001.parquet", "newest"),
        (f"{STEPS}/step_000000.parquet", "oldest"),
    ],
)
def test_a_run_stands_for_the_trajectories_of_its_newest_step(
    name: str, task: str, call_command: CallCommand
) -> None:
    result = call_command("show", name)
    assert result.status == 0
    assert f"task {task}" in result.stdout


@pytest.mark.parametrize("name", ["my_team", "other", "results/other"])
def test_a_run_that_was_not_trained_has_no_trajectories(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call_command: CallCommand
) -> None:
    (tmp_path / "my_team").mkdir()  # a folder of code, beside which there are no results yet
    (tmp_path / "results" / "other" / "tasks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    result = call_command("show", name)
    assert result.status == 1
    message = f"error: {name}: no trajectories here; a run that was not trained has none"
    assert message in result.stderr
