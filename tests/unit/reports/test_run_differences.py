"""Differences between two runs, with intervals that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcore_mas.cli.main import app
from mcore_mas.reports.run_differences import config_differences, score_differences
from rollout.base.ownership import FolderError
from tests.support.run_files import (
    CONFIG_DAMAGE,
    SCORES_DAMAGE,
    damage_cases,
    write_small_run,
)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        write_small_run(tmp_path / "a", {"t": 0.0, "u": 0.5, "only": 1.0}),
        write_small_run(tmp_path / "b", {"t": 0.5, "u": 0.5}, seed=2, trainer={"steps": 2}),
    ]


def compare(runs: list[Path], columns: int = 100) -> str:
    arguments = ["compare", *map(str, runs)]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)}).stdout


def test_settings_differ_by_dotted_key(runs: list[Path]) -> None:
    assert config_differences(*runs) == {
        "seed": (1, 2),
        "trainer.steps": (4, 2),
        "trainer.group_size": (8, None),
    }
    with pytest.raises(FolderError, match=r"config.yaml: no such file; expected a run's folder"):
        config_differences(runs[0], runs[0] / "none")


def test_paths_in_the_folder_of_a_run_are_no_difference(tmp_path: Path) -> None:
    first, second = (
        write_small_run(
            tmp_path / name,
            {"t": 0.0},
            results=str(tmp_path),
            run=name,
            data={"train": [f"{tmp_path}/{name}/given/train.parquet"]},
        )
        for name in ("a", "b")
    )
    assert config_differences(first, second) == {}


def test_a_section_that_a_run_lacks_is_one_difference(tmp_path: Path) -> None:
    agents = {"writer": {"role": "writer"}}
    searcher = {"searcher": {"role": "searcher", "max_tokens": 8}}
    first = write_small_run(tmp_path / "a", {"t": 0.0}, agents=agents)
    second = write_small_run(tmp_path / "b", {"t": 0.0}, agents=agents | searcher)
    assert config_differences(first, second) == {"agents.searcher": (None, "2 settings")}


def test_scores_differ_on_the_tasks_that_both_runs_have(runs: list[Path]) -> None:
    (row,) = score_differences(*runs)
    assert (row.state, row.metric, row.tasks) == ("trained", "avg@2", 2)
    assert (row.first, row.second) == (0.25, 0.5)
    # The differences are 0.5 and 0: a mean of 0.25 and a standard error of 0.25, with 12.7062 of
    # Student's t for one degree of freedom, which leaves the range of a difference of scores.
    assert (row.low, row.high) == (-1.0, 1.0)


def test_the_command_prints_both(runs: list[Path]) -> None:
    output = compare(runs)
    assert "trainer.steps      │ 4 │ 2" in output
    assert "+25.0" in output


def test_names_of_runs_and_empty_sections_are_no_differences(tmp_path: Path) -> None:
    runs = [
        write_small_run(
            tmp_path / name,
            {"t": 0.0},
            tracking={"tags": {"experiment": name}},
            reward={"options": options},
        )
        for name, options in (("a", {"price": 0.1}), ("b", {}))
    ]
    assert config_differences(*runs) == {"reward.options.price": (0.1, None)}
    assert "reward.options.price │ 0.1 │ not set" in compare(runs)
    # In a narrow terminal a key is folded and not cut: keys of one section differ at their end.
    lines = compare(runs, columns=30).rpartition("┃")[2].splitlines()[2:]
    key = "".join(line.partition("│")[0].strip() for line in lines)
    assert key.startswith("reward.options.price")


def test_runs_may_have_no_difference_and_no_scores(tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "a", {"t": 1.0})
    (run / "evaluation" / "trained.json").unlink()
    assert compare([run, run]) == "no evaluation that both have\nno setting differs\n"


@pytest.mark.parametrize("damage", **damage_cases(CONFIG_DAMAGE))
def test_a_damaged_config_is_one_line(runs: list[Path], damage: Callable[[Path], None]) -> None:
    damage(runs[1])
    with pytest.raises(FolderError) as caught:
        config_differences(*runs)
    assert str(caught.value).startswith(f"{runs[1] / 'config.yaml'}: ")
    assert str(caught.value).endswith("make it again")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", **damage_cases(SCORES_DAMAGE))
def test_a_damaged_evaluation_is_one_line(runs: list[Path], damage: Callable[[Path], None]) -> None:
    damage(runs[1])
    if not (runs[1] / "evaluation" / "trained.json").is_file():
        assert score_differences(*runs) == []  # a pipe or a folder is no evaluation
        return
    with pytest.raises(FolderError) as caught:
        score_differences(*runs)
    assert str(caught.value).startswith(f"{runs[1] / 'evaluation' / 'trained.json'}: damaged (")
    assert str(caught.value).endswith("remove it and have it made again")
    assert "\n" not in str(caught.value)
