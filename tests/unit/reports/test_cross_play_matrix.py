"""Cross-play matrix from files of evaluations, and its heat map."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcore_mas.cli.main import app
from mcore_mas.reports.cross_play import read_cross_play
from rollout.base.ownership import FolderError


def evaluation(folder: Path, name: str, players: dict[str, str], *values: float) -> Path:
    """Write an evaluation of run `a`; `values` are avg@2 of its data sources, the last of all of them."""
    rows = []
    for value in values:
        rows.append(
            {"metric": "avg@2", "value": value, "ci_low": value - 0.1, "ci_high": value + 0.1}
        )
        rows.append({"metric": "pass@2", "value": 1.0, "ci_low": 1.0, "ci_high": 1.0})
    file = folder / "a" / "evaluation" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    # 99 games, so that the drawn game that ratings add makes their score that of 100 games.
    score = values[-1] * 100 - 0.5
    wins = int(score)
    tasks = [{"scores": [1.0] * wins + [score - wins] + [0.0] * (98 - wins) + [None]}]
    file.write_text(json.dumps({"run": "a", "players": players, "rows": rows, "tasks": tasks}))
    return file


def print_matrix(*arguments: str) -> list[list[str]]:
    """Run the command; return the cells of each line of its table."""
    result = CliRunner().invoke(app, ["cross-play", *arguments], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    lines = result.output.replace("┃", "│").splitlines()
    return [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    evaluation(tmp_path, "trained", {"first": "a", "second": "a"}, 0.5)
    evaluation(tmp_path, "base", {"first": "a@base", "second": "a@base"}, 0.1, 0.9, 0.45)
    evaluation(tmp_path, "mixed", {"first": "a", "second": "a@base"}, 0.75)
    evaluation(tmp_path, "other_team", {"solver": "a"}, 0.2)
    failed = evaluation(tmp_path, "failed", {"first": "a@base", "second": "a"}, 0.2)
    failed.write_text(json.dumps({**json.loads(failed.read_text()), "rows": []}))
    older = evaluation(tmp_path, "older", {}, 0.3)
    older.write_text(json.dumps({"run": "a", "rows": []}))  # without players
    return tmp_path


def test_the_matrix_has_a_cell_for_every_pair_that_was_evaluated(
    results: Path,
) -> None:
    assert print_matrix("first", "second", "--results", str(results)) == [
        ["first \\ second", "a", "a@base"],
        ["a", "50.0 [40.0, 60.0]", "75.0 [65.0, 85.0]"],
        ["a@base", "", "45.0 [35.0, 55.0]"],
    ]


def test_the_heat_map_names_models_and_scores(results: Path, tmp_path: Path) -> None:
    picture = tmp_path / "cross.svg"
    arguments = ("first", "second", "--results", str(results), "--picture", str(picture))
    print_matrix(*arguments)
    svg = picture.read_text()
    assert svg.startswith("<?xml")
    for label in ("a@base", "75.0", "45.0", "50.0"):
        assert f">{label}<" in svg or f"<!-- {label} -->" in svg


def test_two_evaluations_of_a_pair_are_refused(results: Path) -> None:
    evaluation(results, "again", {"first": "a", "second": "a@base"}, 0.5)
    with pytest.raises(FolderError, match=r"mixed\.json: first is a and second is a@base as in"):
        read_cross_play(results, "first", "second")


def test_a_folder_without_such_evaluations_is_refused(results: Path) -> None:
    with pytest.raises(FolderError, match="no evaluation of a team with agents first and third"):
        read_cross_play(results, "first", "third")


def test_ratings_of_models_that_play_a_game(tmp_path: Path) -> None:
    evaluation(tmp_path, "mixed", {"first": "a", "second": "a@base"}, 0.75)
    evaluation(tmp_path, "turned", {"first": "a@base", "second": "a"}, 0.25)
    result = CliRunner().invoke(
        app, ["cross-play", "first", "second", "--results", str(tmp_path), "--ratings"]
    )
    assert result.exit_code == 0, result.output
    # Odds of 3 to 1 whoever moves first: 400 · log10 3 = 191 points.
    assert result.output.splitlines()[-3:] == [
        "a: +95 ± 28",
        "a@base: -95 ± 28",
        "first move: +0 ± 56",
    ]
