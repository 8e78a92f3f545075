"""Command `leaks`: its table, its examples and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mcore_mas.config.compose import resolve
from rollout.records.files import write_tasks
from rollout.records.trajectory import Task
from tests.unit.cli.conftest import CallCommand


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widen the terminal, so that no cell of a table is wrapped."""
    monkeypatch.setenv("COLUMNS", "200")


def task_file(path: Path, prompts: dict[str, str]) -> str:
    """Write a file of tasks with these prompts by id, and return its path."""
    tasks = [
        Task(id=id, prompt=prompt, answers=("1",), env="math", source="s", split="train")
        for id, prompt in prompts.items()
    ]
    write_tasks(path, tasks)
    return str(path)


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of a table, without its head."""
    return [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in text.splitlines()
        if line.startswith("│")
    ]


def test_files_with_the_same_text_leak(tmp_path: Path, call_command: CallCommand) -> None:
    train = task_file(tmp_path / "train.parquet", {"a": "One?", "b": "Two?"})
    test = task_file(tmp_path / "test.parquet", {"c": "two", "d": "Four?", "e": "Five?"})
    result = call_command("leaks", train, test)
    assert result.status == 1
    assert table_rows(result.stdout) == [
        ["train.parquet → test.parquet", "the same id", "0", "3", "0.0"],
        ["train.parquet → test.parquet", "the same text", "1", "3", "33.3"],
        ["train.parquet → test.parquet", "similar text", "0", "3", "0.0"],
    ]
    assert "b → c: two" in result.stdout
    assert call_command("leaks", train, test, "--report-only").status == 0


def test_files_with_other_texts_do_not_leak(tmp_path: Path, call_command: CallCommand) -> None:
    train = task_file(tmp_path / "train.parquet", {"a": "One?", "b": "Two?"})
    test = task_file(tmp_path / "test.parquet", {"c": "three"})
    assert call_command("leaks", train, test).status == 0


def test_similar_texts_are_listed(tmp_path: Path, call_command: CallCommand) -> None:
    train = task_file(tmp_path / "train.parquet", {"a": "one two three four"})
    prompts = {"b": "one two three five", "c": "two three four", "d": "four two three"}
    test = task_file(tmp_path / "test.parquet", prompts)
    options = ["--words", "2", "--threshold", "0.5", "--examples", "1"]
    result = call_command("leaks", train, test, *options)
    assert result.status == 0
    row = ["train.parquet → test.parquet", "similar text", "2", "3", "66.7"]
    assert row in table_rows(result.stdout)
    assert "a → b, 0.50: one two three five" in result.stdout
    assert "and 1 more" in result.stdout


def test_files_of_a_published_format(tmp_path: Path, call_command: CallCommand) -> None:
    files = []
    for folder, problem in (("old", "One?"), ("new", "One ?")):
        file = tmp_path / folder / "x.jsonl"
        file.parent.mkdir()
        file.write_text(json.dumps({"problem": problem, "answer": 1}))
        files.append(str(file))
    assert call_command("leaks", *files, "--format", "math").status == 1


def test_the_splits_of_a_run_without_leaks(tmp_path: Path, call_command: CallCommand) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(resolve(["experiment=demo_math", "data.train=40"])))
    result = call_command("leaks", "--config", str(config))
    assert result.status == 0
    assert "train → validation" in result.stdout


def test_a_run_is_named_as_in_other_commands(
    tmp_path: Path, call_command: CallCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "results/duo/config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(yaml.safe_dump(resolve(["experiment=demo_math", "data.train=40"])))
    (tmp_path / "duo").mkdir()  # a project's package, which `mcore-mas new` names like the run
    for run in ("duo", "results/duo", "results/duo/config.yaml"):
        result = call_command("leaks", run)
        assert result.status == 0
        assert "train → validation" in result.stdout


def test_the_splits_of_a_run_with_leaks(tmp_path: Path, call_command: CallCommand) -> None:
    tasks = task_file(tmp_path / "x.parquet", {"a": "One?"})
    overrides = ["experiment=demo_math", "cold_start=null", "data.generator=null"]
    overrides += [f"data.{split}={tasks}" for split in ("train", "validation", "test")]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(resolve(overrides)))
    assert call_command("leaks", "--config", str(config)).status == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "name a run, data files to compare, or --config"),
        ("x.parquet --config c.yaml", "name a run, data files to compare, or --config"),
        ("x.parquet x.parquet", "no such file"),
        ("x.parquet --format mathh", "unknown data format 'mathh'"),
    ],
)
def test_an_error_is_one_line(arguments: str, message: str, call_command: CallCommand) -> None:
    result = call_command("leaks", *arguments.split())
    assert result.status == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_splits_of_a_game_share_its_deals(tmp_path: Path, call_command: CallCommand) -> None:
    files = []
    for split in ("train", "test"):
        deal = Task(
            id=f"{split}/KQ", prompt="K Q", answers=(), env="kuhn_poker", source="s", split=split
        )
        file = tmp_path / f"{split}.parquet"
        write_tasks(file, [deal])
        files.append(str(file))
    result = call_command("leaks", *files)
    assert result.status == 0
    assert "not compared: kuhn_poker, whose deals are in every split" in result.stdout
