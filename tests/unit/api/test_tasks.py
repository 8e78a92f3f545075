"""Tasks, pairs, rows and files become splits of tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.api.references import ArgumentError
from mcore_mas.api.tasks import split_tasks
from rollout.records.trajectory import Task
from tests.support.api import TASKS


def sizes(tasks: dict[str, list[Task]]) -> dict[str, int]:
    """Return the number of tasks of each split."""
    return {split: len(part) for split, part in tasks.items()}


def test_tasks_pairs_and_rows() -> None:
    rows = [
        {"question": "a?", "answer": 1, "id": 7},
        {"problem": "b?", "solution": ["2", "two"]},
        ("c?", "3"),
        Task(id="mine", prompt="d?", answers=("4",), env="search", source="s", split=""),
    ]
    train = split_tasks([*rows, *TASKS])["train"]
    assert [(task.id, task.prompt, task.answers, task.env) for task in train[:4]] == [
        ("7", "a?", ("1",), ""),
        ("train-1", "b?", ("2", "two"), ""),
        ("train-2", "c?", ("3",), ""),
        ("mine", "d?", ("4",), "search"),
    ]


def row(task_id: str, prompt: str) -> dict[str, str]:
    """Return a row of a data set with an id."""
    return {"id": task_id, "prompt": prompt, "answer": "1"}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        # The second is in the test split, which is taken from the end of train.
        (
            [row("x", "first"), *TASKS, row("x", "second")],
            "tasks.train: 2 tasks have the id 'x'; give each its own",
        ),
        (
            {"train": TASKS, "test": [row("x", "first"), row("x", "second")]},
            "tasks.test: 2 tasks have the id 'x'; give each its own",
        ),
        (
            [row("../x", "first"), *TASKS],
            "tasks.train: id '../x'; expected a name that does not begin with `/` or `~`, without "
            "the parts `.` and `..`, backslashes and control characters",
        ),
    ],
)
def test_an_id_is_given_once_and_is_a_name(tasks: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as error:
        split_tasks(tasks)
    assert str(error.value) == message


def test_two_given_splits_may_have_the_same_ids() -> None:
    tasks = split_tasks(
        {split: [row("x", split), row("y", split)] for split in ("train", "validation", "test")}
    )
    assert [[task.id for task in part] for part in tasks.values()] == [["x", "y"]] * 3


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


def test_a_missing_file_is_named_with_its_nearest_neighbour(tmp_path: Path) -> None:
    (tmp_path / "train.csv").touch()
    (tmp_path / "train.py").touch()  # no data file
    with pytest.raises(ArgumentError) as error:
        split_tasks(str(tmp_path / "trian.csv"))
    assert str(error.value) == (
        f"{tmp_path}/trian.csv: not here; name another one; nearest: {tmp_path}/train.csv"
    )
