"""Splits from data files: parts of files, faults in their configuration, and generators of tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from mcore_mas.config.compose import resolve
from mcore_mas.pipeline.prepare import prepare_tasks
from rollout.base.errors import OptionsError
from rollout.config.data import DataConfig
from rollout.config.tasks import make_tasks, prepared_tasks
from rollout.records.files import RecordError, read_tasks, write_tasks
from rollout.records.trajectory import Task
from rollout.tasks.generators import Generator


def write_problems(path: Path, count: int) -> Path:
    """Write a file of so many math problems; return it."""
    rows = [{"problem": f"{path.stem} {number}?", "answer": number} for number in range(count)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def prompts(tasks: list[Task]) -> list[str]:
    return [task.prompt for task in tasks]


def config(**splits: Any) -> DataConfig:
    return DataConfig.model_validate({"format": "math", **splits})


def test_a_validation_split_of_three_files(tmp_path: Path) -> None:
    """The first 50 of MATH-500, AIME 2024 and AIME 2025 are 110 tasks of three sources."""
    train = write_problems(tmp_path / "train.jsonl", 5)
    test = write_problems(tmp_path / "test.jsonl", 1)
    files = [
        {"path": write_problems(tmp_path / "m.jsonl", 60), "format": "math_500", "limit": 50},
        {"path": write_problems(tmp_path / "a.jsonl", 30), "format": "aime_2024"},
        {
            "path": write_problems(tmp_path / "b.jsonl", 30),
            "format": "aime_2025",
            "source": "aime25",
        },
    ]
    tasks = make_tasks(config(train=str(train), validation=files, test=[str(test)]), seed=1)
    validation = tasks["validation"]
    assert len(validation) == 110
    assert [validation[index].source for index in (49, 50, 79, 80)] == [
        "math_500",
        "aime_2024",
        "aime_2024",
        "aime25",
    ]
    assert validation[49].prompt == "m 49?"
    assert {task.split for task in validation} == {"validation"}
    assert prompts(tasks["train"]) == [f"train {i}?" for i in range(5)]


def test_splits_cut_from_one_file(tmp_path: Path) -> None:
    path = str(write_problems(tmp_path / "x.jsonl", 9))
    data = config(
        train={"path": path, "skip": 4},
        validation={"path": path, "limit": 2},
        test={"path": path, "skip": 2, "limit": 2},
    )
    tasks = make_tasks(data, seed=1)
    assert prompts(tasks["validation"]) == ["x 0?", "x 1?"]
    assert prompts(tasks["test"]) == ["x 2?", "x 3?"]
    assert prompts(tasks["train"]) == [f"x {i}?" for i in range(4, 9)]
    assert data.paths == (Path(path),)


def test_a_file_is_limited_for_every_source(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    rows = [
        {"question": f"{i}?", "golden_answers": ["a"], "data_source": source}
        for i, source in enumerate("nnhnhph")
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    file = {"path": path, "format": "search", "limit_per_source": 2}
    tasks = make_tasks(config(train=file, validation=file, test={**file, "limit": 3}), seed=1)
    assert [(task.source, task.prompt) for task in tasks["train"]] == [
        ("n", "0?"),
        ("n", "1?"),
        ("h", "2?"),
        ("h", "4?"),
        ("p", "5?"),
    ]
    assert prompts(tasks["test"]) == ["0?", "1?", "2?"]


def test_repeated_rows_are_refused_or_dropped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"problem": "{i % 3}?", "answer": 1}}\n' for i in range(300)))
    with pytest.raises(RecordError, match=r"line 4: task math/.* set data.duplicates: drop"):
        make_tasks(config(train=path, validation=path, test=path), seed=1)
    file = {"path": path, "limit": 2}
    tasks = make_tasks(config(train=path, validation=file, test=file, duplicates="drop"), seed=1)
    assert prompts(tasks["train"]) == ["0?", "1?", "2?"]
    assert prompts(tasks["test"]) == ["0?", "1?"]


def test_a_file_without_tasks_after_skipping_is_refused(tmp_path: Path) -> None:
    path = write_problems(tmp_path / "x.jsonl", 3)
    with pytest.raises(
        RecordError, match=r"x.jsonl: no task for data.test after skipping 3; see skip and limit"
    ):
        make_tasks(config(train=path, validation=path, test={"path": path, "skip": 3}), seed=1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"format": "mathh"},
            "unknown data format 'mathh'; nearest: math; known: 2wikimultihopqa, aime",
        ),
        ({"train": {"path": "x.json", "format": "dappo"}}, "unknown data format 'dappo'"),
        ({"train": {"path": "x.json", "limit": 0}}, "Input should be greater than or equal to 1"),
        (
            {"train": ["x.json", {"path": "x.json", "skip": "5"}]},
            "Input should be a valid integer",
        ),
        (
            {"train": {"file": "x.json"}},
            "a data file has no option 'file'; its options: path, subset, split, columns, format",
        ),
        ({"train": {"limit": 5}}, "a data file needs option 'path'"),
        ({"train": []}, "no file is named"),
        (
            {"train": {"path": "x.parquet", "format": "tasks", "source": "s"}},
            "x.parquet: files of the format 'tasks' name",
        ),
        ({"train": 5}, "data.train is 5; expected a data file, as no generator is named"),
    ],
)
def test_a_mistake_is_described(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**{"train": "x.json", "validation": "x.json", "test": "x.json", **data})
    assert words in caught.value.errors()[0]["msg"]


def generate(seed: int, sizes: dict[str, int], *, fault: str = "") -> Any:
    """Return tasks, with a fault; a fault with the name of a split leaves its tasks out."""
    if fault == "raises":
        raise RuntimeError("boom\nand more")
    tasks = []
    for split, size in sizes.items():
        for number in range(size):
            task = Task(
                id=f"{split}{number}",
                prompt="?",
                answers=(),
                env="math",
                source="own",
                split=split,
            )
            tasks.append(task)
    faults = {
        "none": None,
        "number": [*tasks, 3],
        "split": [replace(tasks[0], split="dev")],
        "twice": tasks[:1] * 2,
    }
    return faults.get(fault, [task for task in tasks if task.split != fault])


GENERATOR = Generator(tasks=generate)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "raises",
            "fails with seed 1 and sizes {'train': 2, 'validation': 1, 'test': 0}: RuntimeError: boom",
        ),
        (
            "none",
            "fails with seed 1 and sizes {'train': 2, 'validation': 1, 'test': 0}: TypeError: 'NoneType' object",
        ),
        ("number", "makes '3'; expected tasks with a split of train, validation, test"),
        ("split", "makes \"Task(id='train0', prompt='?', answers=()"),
        ("twice", "makes 2 train tasks with the id 'train0'; give each an id of its own"),
        ("validation", "makes no validation task; expected 1"),
    ],
)
def test_faults_of_a_users_generator_are_described(fault: str, words: str) -> None:
    sizes = {"train": 2, "validation": 1, "test": 0}
    settings = {"generator": f"{__name__}:GENERATOR", **sizes}
    tasks = make_tasks(DataConfig(**settings), 1)
    assert {split: len(tasks_of_split) for split, tasks_of_split in tasks.items()} == sizes

    with pytest.raises(ValueError, match=r"^data\.generator") as error:
        make_tasks(DataConfig(**settings, options={"fault": fault}), 1)
    message = str(error.value)
    assert message.startswith(f"data.generator '{__name__}:GENERATOR' {words}")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"tasks": lambda seed: []},
            r"tasks of a Generator must take \(seed, sizes, \*, ...\), not \(seed\)",
        ),
        (
            {"tasks": None},
            r"tasks of a Generator must take \(seed, sizes, \*, ...\); it is of type NoneType",
        ),
        (
            {"tasks": generate, "demonstrations": lambda n: []},
            r"demonstrations of a Generator must take \(seed, n, \*, ",
        ),
    ],
)
def test_a_generator_with_wrong_parameters_is_refused(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionsError, match=words):
        Generator(**parts)


def test_a_generator_may_yield_its_tasks() -> None:
    def yield_tasks(seed: int, sizes: dict[str, int]) -> Any:
        yield from generate(seed, sizes)

    assert len(list(Generator(tasks=yield_tasks).tasks(1, {"train": 2}))) == 2


def test_a_run_has_the_tasks_of_the_files_in_its_config(tmp_path: Path) -> None:
    """Rows of data files are converted; files of tasks are used as they are."""
    task = Task(id="t/1", prompt="?", answers=("1",), env="math", source="t", split="test")
    write_tasks(tmp_path / "tasks.parquet", [task])
    train = write_problems(tmp_path / "train.jsonl", 4)
    values = resolve(
        [
            "experiment=demo_math",
            "cold_start=null",
            "data.generator=null",
            f"data.train=[{{path: {train}, format: math, limit: 2}}]",
            f"data.validation={tmp_path / 'tasks.parquet'}",
            f"data.test={tmp_path / 'tasks.parquet'}",
        ]
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    prepare_tasks(tmp_path / "config.yaml", tmp_path / "tasks")
    assert prompts(read_tasks(tmp_path / "tasks" / "train.parquet")) == ["train 0?", "train 1?"]
    assert read_tasks(tmp_path / "tasks" / "test.parquet") == [task]


def test_a_task_twice_or_of_an_unknown_environment_is_refused_at_the_start(tmp_path: Path) -> None:
    task = Task(id="t/1", prompt="?", answers=("1",), env="math", source="t", split="test")
    write_tasks(tmp_path / "test.parquet", [task])
    assert prepared_tasks(tmp_path, "test") == [task]
    for tasks, fault in (
        ([task, task], "task 't/1' is there twice; make the file again"),
        ([replace(task, env="maths")], "unknown env 'maths'; nearest: math; known: "),
    ):
        write_tasks(tmp_path / "test.parquet", tasks)
        with pytest.raises(RecordError) as error:
            prepared_tasks(tmp_path, "test")
        assert str(error.value).startswith(f"{tmp_path / 'test.parquet'}: {fault}")
