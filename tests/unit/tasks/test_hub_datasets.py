"""Data sets in the hub's cache or in a folder: files of a split, and columns of other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub import snapshot_download

import mcore_mas as mm
from mcore_mas.api.tasks import split_tasks
from mcore_mas.config.compose import resolve
from rollout.config.data import DataConfig
from rollout.config.tasks import make_tasks
from rollout.records.files import RecordError
from rollout.records.trajectory import Task
from rollout.tasks.files import read_task_file
from rollout.tasks.hub_datasets import dataset_files, locate_dataset
from tests.support.hub import FakeHub, running

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: [main/a.parquet, main/b.parquet]}
- config_name: socratic
  data_files: socratic/*.parquet
---
# Questions
"""


COLUMNS = {"prompt": "Query", "answer": "gold"}

Row = dict[str, Any]


def write_rows(path: Path, *rows: Row) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def sum_row(number: int) -> Row:
    return {"Query": f"{number}+1?", "gold": number + 1}


@pytest.fixture
def hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the data set me/sums in the hub's cache: two files per split, and a subset."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "datasets--me--sums"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    folder = repository / "snapshots" / "abc123"
    files = ("train-00000-of-00002", "train-00001-of-00002", "a", "b")
    for index, name in enumerate(files):
        rows = [sum_row(2 * index), sum_row(2 * index + 1)]
        write_rows(folder / "main" / f"{name}.parquet", *rows)
    write_rows(folder / "socratic" / "x.parquet", {"Query": "why?", "gold": "so"})
    (folder / "README.md").write_text(CARD)
    return folder


def stems(files: list[Path]) -> list[str]:
    return [file.stem for file in files]


def questions(tasks: list[Task]) -> list[tuple[str, tuple[str, ...]]]:
    """Return prompt and answers of each task."""
    return [(task.prompt, task.answers) for task in tasks]


def test_a_data_set_that_the_hubs_client_downloaded_is_read_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's cache has links to blobs, locks and a list of the tree."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    file = write_rows(tmp_path / "a.parquet", sum_row(1), sum_row(3))
    files = {"main/train-0.parquet": file.read_bytes(), "README.md": CARD.encode()}
    hub = FakeHub(repositories={"datasets/me/sums": files})
    with running(hub):
        snapshot_download("me/sums", repo_type="dataset", endpoint=hub.url, cache_dir=cache)
    requests = len(hub.requests)
    [folder] = (cache / "datasets--me--sums" / "snapshots").iterdir()
    assert (folder / "main" / "train-0.parquet").is_symlink()

    tasks = mm.load_tasks("me/sums", subset="main", split="train", columns=COLUMNS)
    assert questions(tasks) == [("1+1?", ("2",)), ("3+1?", ("4",))]
    with pytest.raises(ValueError, match="hf download --repo-type dataset me/other"):
        mm.load_tasks("me/other", split="train")
    assert len(hub.requests) == requests


def test_a_card_names_the_files_of_a_subset_and_split(hub_folder: Path) -> None:
    assert locate_dataset("me/sums") == str(hub_folder)
    assert stems(dataset_files(hub_folder, "main", "train")) == [
        "train-00000-of-00002",
        "train-00001-of-00002",
    ]
    assert stems(dataset_files(hub_folder, "main", "test")) == ["a", "b"]
    assert stems(dataset_files(hub_folder, "socratic", "train")) == ["x"]
    with pytest.raises(
        RecordError, match="has several subsets; set subset to one of main, socratic"
    ):
        dataset_files(hub_folder, None, "train")
    with pytest.raises(RecordError, match="no files of split validation; there are train, test"):
        dataset_files(hub_folder, "main", "validation")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("configs: [", "its YAML metadata cannot be read"),
        ("configs: 3", "its YAML metadata cannot be read"),
        (
            "configs: [{data_files: {train: ../../secret.jsonl}}]",
            "no files of split train; there are train",
        ),
        (
            "configs: [{data_files: [{split: test, path: /etc/*}]}]",
            "no files of split train; there are test",
        ),
    ],
)
def test_an_unusable_card_is_reported_in_one_line(tmp_path: Path, head: str, message: str) -> None:
    (tmp_path / "secret.jsonl").write_text('{"prompt": "p"}\n')
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(f"---\n{head}\n---\n")
    with pytest.raises(RecordError, match=message) as refused:
        dataset_files(folder, None, "train")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("path", ["../none", "a--b/c", "data/x.parquet", "x"])
def test_a_path_that_cannot_be_an_id_is_returned(path: str) -> None:
    assert locate_dataset(path) == path


def test_without_a_card_the_names_of_files_tell_their_split(tmp_path: Path) -> None:
    for name in ("data/train-00000-of-00001", "data/dev", "contest/test_set", "trainer"):
        write_rows(tmp_path / f"{name}.parquet", {"prompt": "p"})
    assert stems(dataset_files(tmp_path, None, "train")) == ["train-00000-of-00001"]
    assert stems(dataset_files(tmp_path, None, "validation")) == ["dev"]
    assert stems(dataset_files(tmp_path, None, "test")) == ["test_set"]
    assert stems(dataset_files(tmp_path, "data", "train")) == ["train-00000-of-00001"]
    message = r"no files of split extra; there are contest/test_set\.parquet, data/dev"
    with pytest.raises(RecordError, match=message):
        dataset_files(tmp_path, None, "extra")


def test_a_config_names_a_data_set_by_its_id(hub_folder: Path, tmp_path: Path) -> None:
    columns = {"prompt": "query", "answer": "gold"}
    data_set = {"path": "me/sums", "subset": "main", "columns": columns}
    values = {
        "defaults": [{"override /team": "solver_verifier"}],
        "run": "mine",
        "policy_defaults": {"model": "m", "lr": 1.0},
        "trainer": {"steps": 1, "tasks_per_step": 1, "group_size": 2},
        "evaluation": {"samples": 1},
        "data": {
            "format": "plain",
            "train": {**data_set, "skip": 1, "limit": 2},
            "validation": {**data_set, "split": "train", "limit": 1},
            "test": [data_set],
        },
    }
    experiment = tmp_path / "configs" / "experiment" / "mine.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text(yaml.safe_dump(values, sort_keys=False))
    data = resolve(["experiment=mine"], experiment.parents[1])["data"]
    # the path has the revision, so that the data cannot change under the run
    assert data["train"][0]["path"] == data["test"][0]["path"] == str(hub_folder)

    tasks = make_tasks(DataConfig.model_validate(data), 1)
    assert questions(tasks["train"]) == [("1+1?", ("2",)), ("2+1?", ("3",))]  # of both files
    assert questions(tasks["validation"]) == [("0+1?", ("1",))]
    assert [task.prompt for task in tasks["test"]] == ["4+1?", "5+1?", "6+1?", "7+1?"]


class TestLoadTasks:
    def test_a_data_set_is_loaded_by_its_id(self, hub_folder: Path) -> None:
        tasks = mm.load_tasks("me/sums", subset="main", columns=COLUMNS, limit=3)
        assert questions(tasks) == [("0+1?", ("1",)), ("1+1?", ("2",)), ("2+1?", ("3",))]

    def test_a_missing_data_set_is_reported_with_the_command_that_downloads_it(
        self, hub_folder: Path
    ) -> None:
        message = r"^me/none: not here; .*`hf download --repo-type dataset me/none`"
        with pytest.raises(ValueError, match=message) as refused:
            mm.load_tasks("me/none")
        assert "\n" not in str(refused.value)

    def test_wrong_columns_are_named(self, hub_folder: Path) -> None:
        with pytest.raises(ValueError, match=r"^columns.promt: unknown key; nearest: prompt"):
            mm.load_tasks("me/sums", columns={"promt": "query"})
        message = r"(line|row) 1 of format plain has no question: expected column nothere"
        with pytest.raises(RecordError, match=message):
            mm.load_tasks("me/sums", subset="main", columns={"prompt": "nothere"})

    def test_programs_have_no_columns_to_name(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "x.parquet", {"a": 1})
        message = "format apps reads fixed columns; leave columns out"
        with pytest.raises(RecordError, match=message):
            list(read_task_file(path, format="apps", split="test", columns={"prompt": "a"}))

    def test_rows_in_memory_are_read_like_those_of_a_file(self, tmp_path: Path) -> None:
        chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1?"}]
        rows: list[Row] = [
            {"Query": chat, "gold": "so \\boxed{2}"},
            {"Query": chat, "gold": "2"},  # the same task again
            {"Query": "2+2?", "gold": 4},
        ]
        tasks = mm.load_tasks(iter(rows), columns=COLUMNS, format="math")
        assert questions(tasks) == [("1+1?", ("2",)), ("2+2?", ("4",))]
        file = write_rows(tmp_path / "a.parquet", rows[2])
        assert mm.load_tasks(file, columns=COLUMNS) == mm.load_tasks(rows[2:], columns=COLUMNS)

        message = r"^rows\[0\] of format plain has no question: .*; its columns: Query, gold$"
        with pytest.raises(RecordError, match=message):
            mm.load_tasks(rows)
        message = r"^rows\[1\] of format plain has a question that is neither text nor a conv"
        with pytest.raises(RecordError, match=message):
            mm.load_tasks([{"prompt": "p", "answer": 1}, {"prompt": chat * 2, "answer": 1}])

    def test_objects_of_the_library_datasets_are_read(self, tmp_path: Path) -> None:
        """They may be loaded from a file, from a saved folder, streamed, or have splits."""
        datasets = pytest.importorskip("datasets")
        file = tmp_path / "a.jsonl"
        file.write_text("".join(json.dumps(sum_row(n)) + "\n" for n in range(20)))
        expected = mm.load_tasks(file, columns=COLUMNS)
        assert len(expected) == 20
        loaded = datasets.load_dataset("json", data_files=str(file), split="train")
        loaded.save_to_disk(tmp_path / "saved")
        saved = datasets.load_from_disk(tmp_path / "saved")
        streamed = datasets.load_dataset(
            "json", data_files=str(file), split="train", streaming=True
        )
        for data_set in (loaded, saved, streamed):
            assert mm.load_tasks(data_set, columns=COLUMNS) == expected

        renamed = loaded.rename_columns({"Query": "prompt", "gold": "answer"})
        by_split = renamed.train_test_split(test_size=4, seed=1)
        assert isinstance(by_split, datasets.DatasetDict)
        splits = split_tasks(by_split)
        sizes = {split: len(tasks) for split, tasks in splits.items()}
        assert sizes == {"train": 15, "validation": 1, "test": 4}
        assert [task.prompt for task in splits["test"]] == by_split["test"]["prompt"][:]
