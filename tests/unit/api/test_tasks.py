"""Tasks, pairs, rows and files become splits of tasks."""

from __future__ import annotations

import json
from pathlib import Path

from mcore_mas.api.tasks import split_tasks
from rollout.records.trajectory import Task
from tests.support.api import TASKS


def sizes(tasks: dict[str, list[Task]]) -> dict[str, int]:
    """Return the number of tasks of each split."""
    return {split: len(part) for split, part in tasks.items()}


def test_tasks_pairs_and_rows() -> None:
    rows = [
        {"question": "a?", "answer": 1},
        {"problem": "b?", "solution": ["2", "two"]},
        ("c?", "3"),
        Task(id="mine", prompt="d?", answers=("4",), env="search", source="s", split=""),
    ]
    train = split_tasks([*rows, *TASKS])["train"]
    assert [(task.id, task.prompt, task.answers, task.env) for task in train[:4]] == [
        ("train-0", "a?", ("1",), ""),
        ("train-1", "b?", ("2", "two"), ""),
        ("train-2", "c?", ("3",), ""),
        ("mine", "d?", ("4",), "search"),
    ]


def test_a_tenth_is_held_out_for_validation_and_test() -> None:
    tasks = split_tasks(TASKS)
    assert sizes(tasks) == {"train": 16, "validation": 2, "test": 2}
    assert tasks["test"][-1].prompt == "19+1"


def test_a_split_that_is_given_is_not_held_out() -> None:
    tasks = split_tasks({"train": TASKS, "test": TASKS[:2]})
    assert sizes(tasks) == {"train": 18, "validation": 2, "test": 2}
    assert tasks["validation"][-1].prompt == "19+1"
    tasks = split_tasks({"train": TASKS, "validation": TASKS[:1], "test": TASKS[:2]})
    assert sizes(tasks) == {"train": 20, "validation": 1, "test": 2}


def test_files(tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in TASKS]
    train.write_text("\n".join(lines))
    test = tmp_path / "test.jsonl"
    test.write_text(json.dumps({"prompt": "1+1", "answer": 2}))

    assert sizes(split_tasks(str(train))) == {"train": 16, "validation": 2, "test": 2}
    tasks = split_tasks({"train": train, "test": str(test)})
    assert [task.prompt for task in tasks["validation"]] == ["18+1", "19+1"]
    assert [task.prompt for task in tasks["test"]] == ["1+1"]  # a test may repeat tasks of train
