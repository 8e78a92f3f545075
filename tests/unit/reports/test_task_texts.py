"""Questions and right answers of tasks, looked up by id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_mas.reports.task_texts import TaskText, find_task_texts, read_task_texts
from rollout.records.files import write_tasks
from rollout.records.trajectory import Task


def task(number: int, prompt: str = "?") -> Task:
    return Task(
        id=f"t{number}", prompt=prompt, answers=(str(number),), env="math", source="s", split="test"
    )


def test_texts_are_found_in_any_file(tmp_path: Path) -> None:
    first, second = tmp_path / "test.parquet", tmp_path / "train.parquet"
    write_tasks(first, [task(number) for number in range(10_000)])
    write_tasks(second, [task(9_999, "another"), task(20_000, "last")])
    texts = read_task_texts([first, second], ["t9999", "t20000", "t30000"])
    assert texts == {
        "t9999": TaskText(question="?", answers=("9999",)),  # the first file decides
        "t20000": TaskText(question="last", answers=("20000",)),
    }


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    write_tasks(file, [task(1, "old")])
    assert read_task_texts([file], ["t1"])["t1"].question == "old"
    write_tasks(file, [task(1, "new")])
    os.utime(file, ns=(1, 1))
    assert read_task_texts([file], ["t1"])["t1"].question == "new"


def test_files_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    damaged, good = tmp_path / "a.parquet", tmp_path / "b.parquet"
    damaged.write_bytes(b"PAR1" + b"x" * 100)
    pipe = tmp_path / "pipe.parquet"
    os.mkfifo(pipe)
    write_tasks(good, [task(1)])
    paths = [damaged, pipe, tmp_path / "missing.parquet", good]
    assert read_task_texts(paths, ["t1"]) == {"t1": TaskText(question="?", answers=("1",))}


@pytest.mark.parametrize(
    "columns",
    [
        {"id": ["t1"], "prompt": ["?"]},
        {"prompt": ["?"], "answers": [["1"]]},
        {"id": ["t1"], "prompt": ["?"], "answers": [1]},
    ],
)
def test_files_with_other_columns_are_passed_over(
    tmp_path: Path, columns: dict[str, list[Any]]
) -> None:
    other, good = tmp_path / "a.parquet", tmp_path / "b.parquet"
    pq.write_table(pa.table(columns), other)
    write_tasks(good, [task(1)])
    assert read_task_texts([other, good], ["t1"]) == {"t1": TaskText(question="?", answers=("1",))}


def test_a_file_of_trajectories_finds_the_tasks_of_its_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "tasks").mkdir(parents=True)
    write_tasks(run / "tasks" / "test.parquet", [task(1, "What?")])
    file = run / "evaluation" / "trained" / "part_000000.parquet"
    text = TaskText(question="What?", answers=("1",))
    assert find_task_texts(file, ["t1", "t2"]) == {"t1": text}
    assert find_task_texts(tmp_path / "alone.parquet", ["t1"]) == {}
