"""Tasks without an answer are refused if the environment compares it with replies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from mcore_mas.pipeline.check import suite_problems
from mcore_mas.pipeline.prepare import prepare_tasks
from mcore_mas.pipeline.suite import load_suite
from rollout.records.files import RecordError, read_tasks
from rollout.tasks.files import read_task_file

QUESTIONS = """
from rollout.records.trajectory import Task
from rollout.tasks.generators import Generator


class Talk:
    def __init__(self, task): ...
    def reset(self, task): ...
    async def step(self, action): ...


def tasks(seed, sizes):
    fields = {"prompt": "?", "answers": (), "env": "math", "source": "own"}
    return [Task(id=f"{s}{n}", split=s, **fields) for s, size in sizes.items() for n in range(size)]


QUESTIONS = Generator(tasks=tasks)
"""


def test_tasks_without_an_answer_are_reported_if_the_environment_compares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_questions.py").write_text(QUESTIONS)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_questions", raising=False)
    data = "+data={generator: 'own_questions:QUESTIONS', train: 40, validation: 1, test: 1}"
    models = [f"policies.{name}.model={tmp_path}" for name in ("solver", "verifier")]

    def answer_lines(env: str) -> list[str]:
        overrides = ["cold_start=null", *models, "~data", data, f"env.name='{env}'"]
        lines = suite_problems(load_suite("demo_math", overrides))
        return [line for line in lines if "no answer" in line]

    assert answer_lines("math") == [
        "run 'demo_math': tasks: 42 of 42 have no answer, and env 'math' compares replies with it; "
        "the first is '?'; give each an answer (data.columns names its column), or use an env of your own"
    ]
    assert answer_lines("own_questions:Talk") == []


def test_rows_without_answers_are_for_environments_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a file are read as those of `mm.Run(tasks=...)`."""
    (tmp_path / "own_talk.py").write_text(QUESTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "Tell story {n}"}}\n' for n in range(16)))
    files = {split: [str(rows)] for split in ("train", "validation", "test")}
    data = ["data={generator: null, options: {}, format: plain}"]
    data += [f"data.{split}={value}" for split, value in files.items()]

    def config_file(*overrides: str) -> Path:
        suite = load_suite("demo_math", ["cold_start=null", *data, *overrides])
        run = {**suite.runs["demo_math"], "results": str(tmp_path)}
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(run))
        return file

    prepare_tasks(config_file("env.name='own_talk:Talk'"), tmp_path / "tasks")
    tasks = read_tasks(tmp_path / "tasks" / "train.parquet")
    assert [(task.prompt, task.answers) for task in tasks[:1]] == [("Tell story 0", ())]
    with pytest.raises(RecordError, match=r"^tasks: 16 of 16 have no answer, and env 'math' comp"):
        prepare_tasks(config_file(), tmp_path / "tasks")
    # A column of answers that is named must be there.
    with pytest.raises(RecordError, match=r"rows.jsonl: line 1 of format plain has no answer"):
        list(read_task_file(rows, format="plain", split="train", columns={"answer": "gold"}))
