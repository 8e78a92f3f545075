"""States of runs, from files that can be read by hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcore_mas.cli.main import app
from mcore_mas.reports.run_states import RunState, read_run_states
from mcore_mas.runtime.joblog import logged_cause
from mcore_mas.runtime.stop_signal import Stopped
from rollout.base.ownership import FolderError, owned
from tests.support.run_files import (
    CONFIG_DAMAGE,
    METRICS_DAMAGE,
    SCORES_DAMAGE,
    TRAINER_DAMAGE,
    damage_cases,
    write_small_run,
)


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
        failure="",
        reward=0.75,
        accuracy=0.25,
        scores={"trained": 0.5},
        problems=(),
    )
    assert (second.run, second.total_steps, second.done) == ("b", 2, True)
    assert read_run_states(tmp_path / "a") == [first]
    with pytest.raises(FolderError, match="none: no such folder"):
        read_run_states(tmp_path / "none")


def test_the_command_lists_runs(tmp_path: Path) -> None:
    write_small_run(tmp_path / "a", {"t": 0.5})
    output = CliRunner().invoke(app, ["ls", str(tmp_path)], env={"COLUMNS": "80"}).stdout
    cells = [cell.strip() for cell in output.splitlines()[2].split("│")]
    assert cells == ["a", "2/4", "0.750", "25.0 %", "", "50.0 %"]
    empty = tmp_path / "a" / "train"
    output = CliRunner().invoke(app, ["ls", str(empty)], env={"COLUMNS": "80"}).stdout
    assert output == f"no runs in {empty}\n"


def test_a_run_whose_newest_start_failed_has_the_cause(tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "a", {"t": 0.5})
    log = run / "logs" / "train.log"
    with pytest.raises(FolderError), logged_cause(run):
        raise FolderError("another process trains this run")
    assert not log.exists()
    with pytest.raises(ValueError, match="first"), logged_cause(run):
        raise ValueError("first\n  second")
    cause = f"train: ValueError: first second ({log})"
    assert [state.failure for state in read_run_states(tmp_path)] == [cause]
    result = CliRunner().invoke(app, ["ls", str(tmp_path)], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "2/4 failed" in result.stdout
    assert result.stdout.splitlines()[-1] == f"a: failed: {cause}"

    # Another start, also one that was stopped, is no failure.
    with pytest.raises(Stopped), logged_cause(run):
        assert read_run_states(tmp_path)[0].failure == ""
        raise Stopped("stopped by SIGTERM after step 2; the same command continues")
    assert read_run_states(tmp_path)[0].failure == ""

    # The pipeline trains after the tasks are prepared again, and a finished run has not failed.
    preparation = run / "logs" / "prepare_tasks.log"
    preparation.write_text("error: no tasks\n")
    os.utime(log, (100, 100))
    os.utime(preparation, (200, 200))
    assert read_run_states(tmp_path)[0].failure.startswith("prepare_tasks: no tasks (")
    os.utime(log, (300, 300))  # the training goes on without them
    assert read_run_states(tmp_path)[0].failure == ""
    os.utime(preparation, (400, 400))
    (run / "train" / "done.json").touch()
    assert read_run_states(tmp_path)[0].failure == ""


def test_the_log_of_a_training_is_not_changed_by_a_start_that_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "train.log"
    log.parent.mkdir()
    log.write_text("step 1\n")
    (tmp_path / "train").mkdir()
    with owned(tmp_path / "train"), pytest.raises(FolderError), logged_cause(tmp_path):
        raise FolderError("in use by another process")
    assert log.read_text() == "step 1\n"
    with logged_cause(tmp_path):
        assert log.read_text() == "step 1\n----- started again -----\n"


def test_the_last_change_of_a_run_is_that_of_its_metrics_or_trajectories(tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "a", {"t": 0.5})
    os.utime(run / "config.yaml", (300, 300))
    os.utime(run / "train" / "metrics.jsonl", (100, 100))
    assert read_run_states(run)[0].changed_s == 100
    (run / "train" / "trajectories").mkdir()
    os.utime(run / "train" / "trajectories", (200, 200))
    assert read_run_states(run)[0].changed_s == 200
    (run / "train" / "trajectories").rmdir()
    (run / "train" / "metrics.jsonl").unlink()
    assert read_run_states(run)[0].changed_s == 300


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return the folder of two whole runs, and of one between them that a test damages."""
    for name in ("a", "broken", "c"):
        write_small_run(tmp_path / name, {"t": 0.5})
    return tmp_path


def check_others_are_shown(results: Path) -> RunState:
    """Check that the whole runs are read and listed, and that `ls` says what is wrong."""
    first, broken, last = read_run_states(results)
    for state in (first, last):
        assert (state.steps, state.total_steps, state.scores) == (2, 4, {"trained": 0.5})
        assert state.problems == ()
    (problem,) = broken.problems
    assert str(results / "broken") in problem and "\n" not in problem
    assert any(remedy in problem for remedy in ("make it again", "made again", "train the run"))

    result = CliRunner().invoke(app, ["ls", str(results)], env={"COLUMNS": "80"})
    assert result.exit_code == 1
    names = [line.partition("│")[0].strip() for line in result.stdout.splitlines()]
    assert names[2:5] == ["a", "broken", "c"]
    assert result.stdout.splitlines()[-1].startswith(f"broken: {results / 'broken'}")
    return broken


Damage = Callable[[Path], None]


@pytest.mark.parametrize("damage", **damage_cases(CONFIG_DAMAGE, TRAINER_DAMAGE))
def test_a_damaged_config_hides_only_the_number_of_steps(results: Path, damage: Damage) -> None:
    damage(results / "broken")
    state = check_others_are_shown(results)
    assert (state.steps, state.total_steps, state.reward) == (2, None, 0.75)
    assert state.scores == {"trained": 0.5}


def test_a_config_that_cannot_be_read_is_not_called_damaged_yaml(results: Path) -> None:
    config = results / "broken" / "config.yaml"
    config.unlink()
    config.symlink_to(
        "/proc/self/mem"
    )  # a regular file whose first byte cannot be read, even by root
    state = check_others_are_shown(results)
    expected = (
        f"{config}: cannot be read (Input/output error); check its permissions, or make it again"
    )
    assert state.problems == (expected,)


@pytest.mark.parametrize("damage", **damage_cases(METRICS_DAMAGE))
def test_damaged_metrics_hide_only_the_progress(results: Path, damage: Damage) -> None:
    damage(results / "broken")
    state = check_others_are_shown(results)
    assert (state.steps, state.total_steps, state.reward) == (0, 4, None)
    assert state.scores == {"trained": 0.5}


@pytest.mark.parametrize("damage", **damage_cases(SCORES_DAMAGE))
def test_a_damaged_evaluation_hides_only_its_scores(results: Path, damage: Damage) -> None:
    damage(results / "broken")
    state = check_others_are_shown(results)
    assert (state.steps, state.total_steps, state.reward, state.scores) == (2, 4, 0.75, {})


def test_metrics_that_are_no_numbers_are_left_out(results: Path) -> None:
    rows = (
        '{"step": 0, "reward/mean": 0.5}\n{"step": 1, "reward/mean": "x", "validation/accuracy": '
    )
    (results / "a" / "train" / "metrics.jsonl").write_text(f"{rows}1{'0' * 400}}}\n")
    state = read_run_states(results)[0]
    assert (state.steps, state.reward, state.accuracy, state.problems) == (2, 0.5, None, ())


def test_a_run_that_has_not_trained_has_no_problem(results: Path) -> None:
    metrics = results / "a" / "train" / "metrics.jsonl"
    for content in ("", '{"step": 0, "rew'):  # the first row is still being written
        metrics.write_text(content)
        assert read_run_states(results)[0].problems == ()
    metrics.unlink()
    assert read_run_states(results)[0].problems == ()
