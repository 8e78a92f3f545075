"""Where runs stand, and how two differ: numbers that can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mcore_mas.cli.arguments import run_folder
from mcore_mas.cli.main import app
from mcore_mas.reports.runs import config_differences, run_states, score_differences
from rollout.base.ownership import FolderError

CONFIG = {
    "run": "a",
    "seed": 1,
    "trainer": {"steps": 4, "group_size": 8},
    "policies": {"p": {"lr": 0.1}},
}


def make_run(folder: Path, scores: dict[str, float], **changed: object) -> Path:
    (folder / "train").mkdir(parents=True)
    (folder / "evaluation").mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "run": folder.name, **changed}))
    rows = [
        {"step": -1, "validation/accuracy": 0.25},
        *({"step": n, "reward/mean": 0.5 + n / 4} for n in range(2)),
    ]
    (folder / "train" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tasks = [{"task_id": name, "metrics": {"avg@2": score}} for name, score in scores.items()]
    mean = sum(scores.values()) / len(scores)
    told = {"tasks": tasks, "rows": [{"dataset": "s", "metric": "avg@2", "value": mean}]}
    (folder / "evaluation" / "trained.json").write_text(json.dumps(told))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    first = make_run(tmp_path / "a", {"t": 0.0, "u": 0.5, "only": 1.0})
    return [first, make_run(tmp_path / "b", {"t": 0.5, "u": 0.5}, seed=2, trainer={"steps": 2})]


def test_a_list_says_where_runs_stand(runs: list[Path]) -> None:
    a, b = run_states(runs[0].parent)
    assert (a.run, a.steps, a.of, a.done, a.reward, a.accuracy) == ("a", 2, 4, False, 0.75, 0.25)
    assert (a.scores, b.scores) == ({"trained": 0.5}, {"trained": 0.5})
    said = CliRunner().invoke(app, ["ls", str(runs[0].parent)], env={"COLUMNS": "80"}).stdout
    row = [cell.strip() for cell in said.splitlines()[2].split("│")]
    assert row == ["a", "2/4", "0.750", "0.250", "", "0.500"]
    assert run_states(runs[0]) == [a]  # by its own folder
    empty = runs[0] / "train"
    assert (
        CliRunner().invoke(app, ["ls", str(empty)], env={"COLUMNS": "80"}).stdout
        == f"no runs in {empty}\n"
    )
    with pytest.raises(FolderError, match="none: no such folder"):
        run_states(runs[0] / "none")


def test_two_runs_differ_in_settings_and_in_paired_scores(runs: list[Path]) -> None:
    assert config_differences(*runs) == {
        "seed": (1, 2),
        "trainer.steps": (4, 2),
        "trainer.group_size": (8, None),
    }
    (row,) = score_differences(
        *runs
    )  # of t and u, which both have: 0.0 and 0.5 against 0.5 and 0.5
    assert (row.state, row.metric, row.first, row.second, row.tasks) == (
        "trained",
        "avg@2",
        0.25,
        0.5,
        2,
    )
    # differences 0.5 and 0: mean 0.25, standard error 0.25, Student's t of one degree of freedom 12.7062
    assert (row.low, row.high) == pytest.approx((0.25 - 12.7062 * 0.25, 0.25 + 12.7062 * 0.25))
    said = CliRunner().invoke(app, ["compare", *map(str, runs)], env={"COLUMNS": "100"}).stdout
    assert "trainer.steps      │ 4 │ 2" in said and "+25.0" in said
    with pytest.raises(FolderError, match=r"config.yaml: no such file; expected a run's folder"):
        config_differences(runs[0], runs[0] / "none")


def test_names_of_runs_and_empty_sections_are_no_differences(tmp_path: Path) -> None:
    sections = ({"reward": {"options": {"price": 0.1}}}, {"reward": {"options": {}}})
    runs = [
        make_run(tmp_path / name, {"t": 0.0}, tracking={"tags": {"experiment": name}}, **own)
        for name, own in zip("ab", sections, strict=True)
    ]
    assert config_differences(*runs) == {"reward.options.price": (0.1, None)}
    said = CliRunner().invoke(app, ["compare", *map(str, runs)], env={"COLUMNS": "100"}).stdout
    assert "reward.options.price │ 0.1 │ not set" in said
    narrow = (
        CliRunner()
        .invoke(app, ["compare", *map(str, runs)], env={"COLUMNS": "30"})
        .stdout.split("┃")
    )
    setting = "".join(line.partition("│")[0].strip() for line in narrow[2].splitlines()[2:])
    assert setting.startswith(
        "reward.options.price"
    )  # whole: keys of one section differ at their end


def test_a_run_is_named_by_its_folder_or_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "results" / "one", {"t": 1.0})
    (tmp_path / "one").mkdir()  # a package of the same name, as `mcore-mas new` writes one
    assert [run_folder(named) for named in (Path("one"), Path("results/one"))] == [
        Path("results/one")
    ] * 2
    with pytest.raises(FolderError, match=r"^onee: no run here; .*; nearest: one$"):
        run_folder(Path("onee"))
    make_run(tmp_path / "one", {"t": 1.0})
    assert run_folder(Path("one")) == Path("one")
    (tmp_path / "one" / "evaluation" / "trained.json").unlink()
    said = CliRunner().invoke(app, ["compare", "one", "one"]).stdout
    assert said == "no setting differs\nno evaluation that both have\n"
