"""The check reports tasks without an answer if the environment compares it with replies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mcore_mas.pipeline.check import suite_problems
from mcore_mas.pipeline.suite import load_suite

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
        "the first is '?'; give each an answer, or use an env of your own"
    ]
    assert answer_lines("own_questions:Talk") == []
