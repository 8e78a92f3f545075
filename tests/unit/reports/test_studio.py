"""Data of the studio: runs, files, trajectories, logs and comparisons."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mcore_mas.reports.studio import Studio, escape_texts
from rollout.records.files import write_tasks, write_trajectories
from rollout.records.trajectory import Task
from tests.support.played import trajectory, turn
from tests.support.run_files import (
    CONFIG_DAMAGE,
    METRICS_DAMAGE,
    SCORES_DAMAGE,
    TRAINER_DAMAGE,
    damage_cases,
    write_small_run,
)

HOSTILE = "<img src=x onerror=alert(1)>\x1b]0;owned\x07"
STEP_0 = "train/trajectories/step_000000.parquet"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Write two runs, the first with a step of trajectories; return their folder."""
    write_small_run(tmp_path / "a", {"t": 0.5})
    write_small_run(tmp_path / "b", {"t": 1.0}, seed=2)
    played = [
        trajectory(
            turn(0, reward=float(number)),
            turn(
                1,
                "verifier",
                reward=number + 1.0,
                text="a b",
                completion_ids=(0, 1),
                logprobs=(-0.5, -3.0),
            ),
            sample=number,
            task_id=f"t{number}",
        )
        for number in range(3)
    ]
    write_trajectories(tmp_path / "a" / STEP_0, played)
    return tmp_path


def test_runs_and_files_are_those_of_the_folder(results: Path) -> None:
    studio = Studio(results)
    runs = [(run["run"], run["steps"], run["total_steps"], run["reward"]) for run in studio.runs()]
    assert runs == [("a", 2, 4, 0.75), ("b", 2, 4, 0.75)]
    part = results / "a" / "evaluation" / "trained" / "part_000000.parquet"
    write_trajectories(part, [trajectory(turn(0))])
    assert studio.files("a") == [STEP_0, "evaluation/trained/part_000000.parquet"]


@pytest.mark.parametrize(
    "damage", **damage_cases(CONFIG_DAMAGE, TRAINER_DAMAGE, METRICS_DAMAGE, SCORES_DAMAGE)
)
def test_a_damaged_run_is_listed_with_its_problem(
    results: Path, damage: Callable[[Path], None]
) -> None:
    damage(write_small_run(results / "broken", {"t": 0.5}))
    problems = {run["run"]: len(run["problems"]) for run in Studio(results).runs()}
    assert problems == {"a": 0, "b": 0, "broken": 1}


def test_rows_without_a_step_are_not_shown(results: Path) -> None:
    (results / "a" / "train" / "metrics.jsonl").write_text('{"a": 1}\n{"step": 0}\n')
    assert Studio(results).metrics("a")["rows"] == [{"step": 0}]


def test_new_rows_are_read_from_where_the_last_answer_ended(results: Path) -> None:
    studio = Studio(results)
    first = studio.metrics("a", 0)
    assert [row["step"] for row in first["rows"]] == [-1, 0, 1]
    with (results / "a" / "train" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n{"step": 3, "rew')  # the last line is still being written
    assert studio.metrics("a", first["end"])["rows"] == [{"step": 2}]


def test_a_file_that_became_shorter_is_read_from_its_start(results: Path) -> None:
    studio = Studio(results)
    metrics = results / "a" / "train" / "metrics.jsonl"
    whole = studio.metrics("a")
    first_row = metrics.read_text().splitlines(keepends=True)[0]
    metrics.write_text(first_row)  # as a training does that resumes from a checkpoint
    answer = studio.metrics("a", whole["end"])
    assert (answer["start"], answer["end"]) == (0, len(first_row))
    assert [row["step"] for row in answer["rows"]] == [-1]
    assert studio.metrics("a", answer["end"]) == {
        "rows": [],
        "charts": {},
        "start": len(first_row),
        "end": len(first_row),
    }


def test_metrics_come_with_the_charts_that_they_are_drawn_in(results: Path) -> None:
    charts = Studio(results).metrics("a")["charts"]
    assert charts["validation/accuracy"] == {
        "chart": "validation/accuracy",
        "member": "",
        "title": "Validation accuracy",
        "unit": "share",
    }
    assert charts.keys() == {"validation/accuracy", "reward/mean"}


def test_the_config_is_shown_as_it_is_in_the_file(results: Path) -> None:
    config = write_small_run(
        results / "c", {"t": 1.0}, agents={"solver": {}, "verifier": {}}, note=HOSTILE
    )
    studio = Studio(results)
    assert studio.agents("a") == []
    assert studio.agents("c") == ["solver", "verifier"]
    assert studio.config("c") == (config / "config.yaml").read_text()
    (config / "config.yaml").write_text("run: c\nnote: \x1b[2J\n")
    assert studio.config("c") == "run: c\nnote: \\x1b[2J\n"


def test_a_list_has_the_question_and_the_right_answer(results: Path) -> None:
    studio = Studio(results)
    row = studio.trajectories("a", STEP_0)["rows"][1]
    assert (row["question"], row["right_answers"]) == ("", [])
    tasks = [
        Task(
            id=f"t{number}",
            prompt=f"{number}?" + "x" * 500 * number,
            answers=("1", "2", "3", "4"),
            env="math",
            source="s",
            split="train",
        )
        for number in range(2)
    ]
    (results / "a" / "tasks").mkdir()
    write_tasks(results / "a" / "tasks" / "train.parquet", tasks)
    rows = studio.trajectories("a", STEP_0)["rows"]
    assert [row["question"] for row in rows] == ["0?", "1?" + "x" * 298 + "…", ""]
    assert rows[1]["right_answers"] == ["1", "2", "3"]
    page = studio.trajectory("a", STEP_0, 1)
    assert "1?" + "x" * 500 in page
    assert "1 <span>or</span> 2 <span>or</span> 3 <span>or</span> 4" in page


def test_questions_are_read_through_links_inside_the_results(results: Path) -> None:
    task = Task(id="t0", prompt="0?", answers=("1",), env="math", source="s", split="train")
    outside = results.with_name(f"{results.name}_outside")
    for folder in (results / "b" / "tasks", outside, results / "a" / "tasks"):
        folder.mkdir()
    write_tasks(results / "b" / "tasks" / "train.parquet", [task])
    write_tasks(outside / "train.parquet", [replace(task, prompt="secret")])
    link = results / "a" / "tasks" / "train.parquet"

    link.symlink_to("../../b/tasks/train.parquet")
    row = Studio(results).trajectories("a", STEP_0)["rows"][0]
    assert (row["question"], row["right_answers"]) == ("0?", ["1"])

    link.unlink()
    link.symlink_to(outside / "train.parquet")
    row = Studio(results).trajectories("a", STEP_0)["rows"][0]
    assert (row["question"], row["right_answers"]) == ("", [])


def test_tasks_outside_of_the_runs_folder_are_not_shown(results: Path, tmp_path: Path) -> None:
    task = Task(id="t1", prompt="secret", answers=("1",), env="math", source="s", split="train")
    write_tasks(tmp_path / "elsewhere.parquet", [task])
    (results / "a" / "tasks").mkdir()
    (results / "a" / "tasks" / "train.parquet").symlink_to(tmp_path / "elsewhere.parquet")
    assert Studio(results).trajectories("a", STEP_0)["rows"][1]["question"] == ""
    assert "secret" not in Studio(results).trajectory("a", STEP_0, 1)


def test_the_end_of_the_log_has_no_control_characters(results: Path) -> None:
    assert Studio(results).log("a") == ""
    (results / "a" / "logs").mkdir()
    (results / "a" / "logs" / "train.log").write_text("x" * 30_000 + HOSTILE)
    end = HOSTILE.replace("\x1b", "\\x1b").replace("\x07", "\\x07")
    assert Studio(results).log("a") == "x" * (20_000 - len(HOSTILE)) + end


def test_two_runs_are_compared(results: Path) -> None:
    comparison = Studio(results).compare("a", "b")
    assert comparison["settings"] == {"seed": (1, 2)}
    (scores,) = comparison["scores"]
    assert (scores["first"], scores["second"]) == (0.5, 1.0)


def test_the_timeline_of_a_file_is_empty_without_times(results: Path) -> None:
    studio = Studio(results)
    assert studio.timeline("a", STEP_0) == {}
    timed = [trajectory(turn(0, started_s=100.0, took_s=3.0))]
    write_trajectories(results / "a" / STEP_0, timed)
    assert studio.timeline("a", STEP_0)["seconds"] == 3.0


def test_tokens_are_shaded_if_the_policy_has_a_tokenizer(results: Path) -> None:
    studio = Studio(results)
    assert "a b</pre>" in studio.trajectory("a", STEP_0, 1)
    tokenizer = results / "a" / "train" / "models" / "p" / "tokenizer.json"
    tokenizer.parent.mkdir(parents=True)
    Tokenizer(WordLevel({"a": 0, "<b>": 1, "?": 2}, unk_token="?")).save(str(tokenizer))
    page = studio.trajectory("a", STEP_0, 1)
    # The shade is 12 % for each nat.
    assert '<span style="--surprise:6%" title="p 0.607">a</span>' in page
    assert '<span style="--surprise:36%" title="p 0.050"> &lt;b&gt;</span></pre>' in page


def test_a_tokenizer_that_was_made_again_is_loaded_again(results: Path) -> None:
    studio = Studio(results)
    file = results / "a" / "train" / "models" / "p" / "tokenizer.json"
    file.parent.mkdir(parents=True)
    for modified_s, word in enumerate(("old", "new"), start=1_000_000_000):
        Tokenizer(WordLevel({word: 0, "b": 1, "?": 2}, unk_token="?")).save(str(file))
        os.utime(file, (modified_s, modified_s))
        page = studio.trajectory("a", STEP_0, 1)
        assert f'title="p 0.607">{word}</span>' in page


@pytest.mark.parametrize("run", ["../a", "..", ".", "", "c", "a/", "x" * 5000, "a\0", "\udcff"])
def test_a_run_is_a_folder_of_the_results(results: Path, run: str) -> None:
    with pytest.raises(HTTPException, match="no run"):
        Studio(results).metrics(run)


@pytest.mark.parametrize("file", ["../../etc/passwd", "config.yaml", "train/metrics.jsonl"])
def test_a_file_is_one_of_the_runs_trajectories(results: Path, file: str) -> None:
    with pytest.raises(HTTPException, match="has no file of trajectories"):
        Studio(results).trajectories("a", file)


def test_files_outside_of_the_runs_folder_are_not_shown(results: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("train.log", "metrics.jsonl", "config.yaml"):
        (elsewhere / name).write_text('{"step": 0, "secret": 1}\n')
    (results / "a" / STEP_0).rename(elsewhere / "step_000000.parquet")
    studio = Studio(results)
    (results / "a" / "logs").symlink_to(elsewhere)
    for file in ("train/metrics.jsonl", STEP_0):
        (results / "a" / file).unlink(missing_ok=True)
        (results / "a" / file).symlink_to(elsewhere / Path(file).name)
    assert "secret" not in studio.log("a")
    assert "is a link to a file outside of the run's folder" in studio.log("a")
    assert studio.metrics("a")["rows"] == []
    assert studio.files("a") == []
    (results / "b" / "config.yaml").unlink()
    (results / "b" / "config.yaml").symlink_to(elsewhere / "config.yaml")
    with pytest.raises(HTTPException, match="no run 'b'"):
        studio.compare("a", "b")


def test_a_run_may_lie_on_another_disk(results: Path, tmp_path: Path) -> None:
    (results / "a" / "logs").mkdir()
    (results / "a" / "logs" / "train.log").write_text("a line\n")
    (tmp_path / "disk").mkdir()
    (results / "a").rename(tmp_path / "disk" / "a")
    (results / "a").symlink_to(tmp_path / "disk" / "a")
    studio = Studio(results)
    assert studio.log("a") == "a line\n"
    assert studio.files("a") == [STEP_0]


def test_texts_of_an_answer_have_no_control_characters() -> None:
    answer = {"error": "\x1b[2J\u202e", "rows": [{"answer": f"{HOSTILE}\u2066"}], "n": (1, None)}
    assert escape_texts(answer) == {
        "error": r"\x1b[2J\u202e",
        "rows": [{"answer": r"<img src=x onerror=alert(1)>\x1b]0;owned\x07\u2066"}],
        "n": [1, None],
    }
    assert escape_texts({"\x1b": 1}) == {r"\x1b": 1}


def test_credit_is_computed_again_when_a_file_changes(results: Path) -> None:
    studio = Studio(results)
    before = studio.trajectory("a", STEP_0, 0)
    changed = replace(trajectory(turn(0, text="changed")), task_id="t0")
    write_trajectories(results / "a" / STEP_0, [changed])
    assert "changed" in studio.trajectory("a", STEP_0, 0) and "changed" not in before
