"""The command `leaks`: its table, its examples and its exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from mcore_mas.cli.main import main
from mcore_mas.config.compose import resolve
from rollout.records.files import write_tasks
from rollout.records.trajectory import Task


def write(path: Path, *pairs: tuple[str, str]) -> str:
    tasks = [
        Task(id=id, prompt=prompt, answers=("1",), env="math", source="s", split="train")
        for id, prompt in pairs
    ]
    write_tasks(path, tasks)
    return str(path)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["mcore-mas", "leaks", *arguments])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def rows(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in text.splitlines()
        if line[:1] == "│"
    ]


def test_files_that_share_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    train = write(tmp_path / "train.parquet", ("a", "One?"), ("b", "Two?"))
    test = write(tmp_path / "test.parquet", ("c", "two"), ("d", "Four?"), ("e", "Five?"))
    assert run(monkeypatch, train, test) == 1
    said = capsys.readouterr().out
    assert rows(said) == [
        ["train.parquet → test.parquet", "the same id", "0", "3", "0.0"],
        ["train.parquet → test.parquet", "the same text", "1", "3", "33.3"],
        ["train.parquet → test.parquet", "similar text", "0", "3", "0.0"],
    ]
    assert "b → c: two" in said
    assert run(monkeypatch, train, test, "--report-only") == 0
    assert run(monkeypatch, train, write(tmp_path / "other.parquet", ("c", "three"))) == 0


def test_similar_texts_are_for_the_reader_to_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    train = write(tmp_path / "train.parquet", ("a", "one two three four"))
    test = write(
        tmp_path / "test.parquet",
        ("b", "one two three five"),
        ("c", "two three four"),
        ("d", "four two three"),
    )
    assert (
        run(monkeypatch, train, test, "--words", "2", "--threshold", "0.5", "--examples", "1") == 0
    )
    said = capsys.readouterr().out
    assert ["train.parquet → test.parquet", "similar text", "2", "3", "66.7"] in rows(said)
    assert "a → b, 0.50: one two three five" in said
    assert "and 1 more" in said


def test_files_of_a_published_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, problem in (("old", "One?"), ("new", "One ?")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.jsonl").write_text(json.dumps({"problem": problem, "answer": 1}))
    files = [str(tmp_path / folder / "x.jsonl") for folder in ("old", "new")]
    assert run(monkeypatch, *files, "--format", "math") == 1


def test_the_splits_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "clean.yaml").write_text(
        yaml.safe_dump(resolve(["experiment=demo_math", "data.train=40"]))
    )
    assert run(monkeypatch, "--config", str(tmp_path / "clean.yaml")) == 0
    assert "train → validation" in capsys.readouterr().out
    path = write(tmp_path / "x.parquet", ("a", "One?"))
    values = resolve(
        [
            "experiment=demo_math",
            "cold_start=null",
            "data.generator=null",
            *(f"data.{split}={path}" for split in ("train", "validation", "test")),
        ]
    )
    (tmp_path / "leaky.yaml").write_text(yaml.safe_dump(values))
    assert run(monkeypatch, "--config", str(tmp_path / "leaky.yaml")) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name data files to compare, or --config"),
        (["x.parquet", "--config", "c.yaml"], "name data files to compare, or --config"),
        (["x.parquet", "x.parquet"], "no such file"),
        (["x.parquet", "--format", "mathh"], "unknown data format 'mathh'"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert run(monkeypatch, *arguments) == 1
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
