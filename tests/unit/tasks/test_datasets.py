"""Data sets of a hub's cache or a folder: which files are of a split, and rows whose columns have other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import snapshot_download

import mcore_mas as mm
from mcore_mas.api.tasks import split_tasks
from mcore_mas.config.compose import resolve
from rollout.config.data import DataConfig
from rollout.config.tasks import make_tasks
from rollout.records.files import RecordError
from rollout.tasks.files import read_task_file
from rollout.tasks.hub_datasets import dataset_files, located_dataset
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


def rows(path: Path, *found: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(found)), path)
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with the data set me/sums: two files of train, two of test, and another subset."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "datasets--me--sums"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    folder = repository / "snapshots" / "abc123"
    for part, n in (("train-00000-of-00002", 0), ("train-00001-of-00002", 2), ("a", 4), ("b", 6)):
        rows(
            folder / "main" / f"{part}.parquet",
            *({"Query": f"{m}+1?", "gold": m + 1} for m in (n, n + 1)),
        )
    rows(folder / "socratic" / "x.parquet", {"Query": "why?", "gold": "so"})
    (folder / "README.md").write_text(CARD)
    return folder


def names(files: list[Path]) -> list[str]:
    return [file.stem for file in files]


def test_what_the_hubs_own_client_downloaded_is_read_with_the_hub_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache has links to blobs, locks, a list of the tree; what was not downloaded is told, and nobody is asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    shard = rows(
        tmp_path / "a.parquet", {"Query": "1+1?", "gold": 2}, {"Query": "2+2?", "gold": 4}
    ).read_bytes()
    hub = FakeHub(
        repositories={
            "datasets/me/sums": {"main/train-0.parquet": shard, "README.md": CARD.encode()}
        }
    )
    with running(hub):
        snapshot_download(
            "me/sums", repo_type="dataset", endpoint=hub.url, cache_dir=tmp_path / "cache"
        )
    asked = len(hub.asked)
    (folder,) = (tmp_path / "cache" / "datasets--me--sums" / "snapshots").iterdir()
    assert (folder / "main" / "train-0.parquet").is_symlink()
    tasks = mm.load_tasks(
        "me/sums", subset="main", split="train", columns={"prompt": "Query", "answer": "gold"}
    )
    assert [(task.prompt, task.answers) for task in tasks] == [("1+1?", ("2",)), ("2+2?", ("4",))]
    with pytest.raises(ValueError, match="hf download --repo-type dataset me/other"):
        mm.load_tasks("me/other", split="train")
    assert len(hub.asked) == asked


def test_a_card_names_the_files_of_a_subset_and_split(hub: Path) -> None:
    assert located_dataset("me/sums") == str(hub)
    assert names(dataset_files(hub, "main", "train")) == [
        "train-00000-of-00002",
        "train-00001-of-00002",
    ]
    assert names(dataset_files(hub, "main", "test")) == ["a", "b"]
    assert names(dataset_files(hub, "socratic", "train")) == ["x"]
    with pytest.raises(RecordError, match="subset None; expected one of main, socratic"):
        dataset_files(hub, None, "train")
    with pytest.raises(RecordError, match="no files of split validation; there are train, test"):
        dataset_files(hub, "main", "validation")


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("configs: [", "its head cannot be read"),
        ("configs: 3", "its head cannot be read"),
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
def test_a_card_that_cannot_be_used_is_one_line(tmp_path: Path, head: str, words: str) -> None:
    (tmp_path / "secret.jsonl").write_text('{"prompt": "p"}\n')
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(f"---\n{head}\n---\n")
    with pytest.raises(RecordError, match=words) as refused:
        dataset_files(folder, None, "train")
    assert "\n" not in str(refused.value)


def test_what_cannot_be_an_id_is_a_path() -> None:
    assert [located_dataset(path) for path in ("../none", "a--b/c", "data/x.parquet", "x")] == [
        "../none", "a--b/c", "data/x.parquet", "x",
    ]  # fmt: skip


def test_without_a_card_files_are_of_the_split_that_they_are_called_by(tmp_path: Path) -> None:
    for name in ("data/train-00000-of-00001", "data/dev", "contest/test_set", "trainer"):
        rows(tmp_path / f"{name}.parquet", {"prompt": "p"})
    assert [names(dataset_files(tmp_path, None, split)) for split in ("train", "validation", "test")] == [
        ["train-00000-of-00001"], ["dev"], ["test_set"],
    ]  # fmt: skip
    assert names(dataset_files(tmp_path, "data", "train")) == ["train-00000-of-00001"]
    with pytest.raises(
        RecordError, match=r"no files of split extra; there are contest/test_set\.parquet, data/dev"
    ):
        dataset_files(tmp_path, None, "extra")


def test_a_config_takes_a_data_set_by_its_id_with_other_columns(hub: Path, tmp_path: Path) -> None:
    columns = {"prompt": "query", "answer": "gold"}
    own = {"path": "me/sums", "subset": "main", "columns": columns}
    data = {"format": "plain", "train": {**own, "skip": 1, "limit": 2}, "test": [own]}
    data["validation"] = {**own, "split": "train", "limit": 1}
    experiment = tmp_path / "configs" / "experiment" / "mine.yaml"
    experiment.parent.mkdir(parents=True)
    head = "defaults: [{override /team: solver_verifier}]\nrun: mine\npolicy_defaults: {model: m, lr: 1.0}\n"
    head += "trainer: {steps: 1, tasks_per_step: 1, group_size: 2}\nevaluation: {samples: 1}\n"
    experiment.write_text(f"{head}data: {json.dumps(data)}\n")
    values = resolve(["experiment=mine"], experiment.parents[1])
    assert (
        values["data"]["train"][0]["path"] == values["data"]["test"][0]["path"] == str(hub)
    )  # with its revision
    tasks = make_tasks(DataConfig.model_validate(values["data"]), 1)
    found = {split: [(task.prompt, task.answers) for task in own] for split, own in tasks.items()}
    assert found["train"] == [("1+1?", ("2",)), ("2+1?", ("3",))]  # over both files
    assert found["validation"] == [("0+1?", ("1",))]
    assert [prompt for prompt, _ in found["test"]] == ["4+1?", "5+1?", "6+1?", "7+1?"]


def test_the_api_loads_one_and_says_how_to_get_one(hub: Path) -> None:
    tasks = mm.load_tasks(
        "me/sums", subset="main", columns={"prompt": "Query", "answer": "gold"}, limit=3
    )
    assert [(task.prompt, task.answers) for task in tasks] == [
        ("0+1?", ("1",)),
        ("1+1?", ("2",)),
        ("2+1?", ("3",)),
    ]
    with pytest.raises(
        ValueError, match=r"^me/none: not here; .*`hf download --repo-type dataset me/none`"
    ) as refused:
        mm.load_tasks("me/none")
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"^columns.promt: unknown key; nearest: prompt"):
        mm.load_tasks("me/sums", columns={"promt": "query"})
    with pytest.raises(
        RecordError, match=r"row 0 of format plain has no question: expected one of nothere"
    ):
        mm.load_tasks("me/sums", subset="main", columns={"prompt": "nothere"})


def test_programs_have_no_columns_to_name(tmp_path: Path) -> None:
    path = rows(tmp_path / "x.parquet", {"a": 1})
    with pytest.raises(
        RecordError, match=r"rows of format apps are programs with tests; leave columns out"
    ):
        list(read_task_file(path, format="apps", split="test", columns={"prompt": "a"}))


def test_rows_are_read_as_those_of_a_file(tmp_path: Path) -> None:
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1?"}]
    found = [
        {"Query": asked, "gold": "so \\boxed{2}"},
        {"Query": asked, "gold": "2"},
        {"Query": "2+2?", "gold": 4},
    ]
    columns = {"prompt": "Query", "answer": "gold"}
    tasks = mm.load_tasks(iter(found), columns=columns, format="math")
    assert [(task.prompt, task.answers) for task in tasks] == [
        ("1+1?", ("2",)),
        ("2+2?", ("4",)),
    ]  # each once
    assert mm.load_tasks(rows(tmp_path / "a.parquet", found[2]), columns=columns) == mm.load_tasks(
        found[2:], columns=columns
    )
    with pytest.raises(
        RecordError,
        match=r"^rows: row 0 of format plain has no question: .*; its columns: Query, gold$",
    ):
        mm.load_tasks(found)
    with pytest.raises(
        RecordError,
        match=r"^rows: row 1 of format plain has a question that is neither text nor a conv",
    ):
        mm.load_tasks([{"prompt": "p", "answer": 1}, {"prompt": asked * 2, "answer": 1}])


def test_objects_of_the_library_datasets_are_tasks(tmp_path: Path) -> None:
    """With a Python that has it: of a file, of a folder that it saved, streamed, and by split."""
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "a.jsonl"
    file.write_text(
        "".join(json.dumps({"Query": f"{n}+1?", "gold": n + 1}) + "\n" for n in range(20))
    )
    columns = {"prompt": "Query", "answer": "gold"}
    expected = mm.load_tasks(file, columns=columns)
    loaded = datasets.load_dataset("json", data_files=str(file), split="train")
    loaded.save_to_disk(tmp_path / "saved")
    streamed = datasets.load_dataset("json", data_files=str(file), split="train", streaming=True)
    for given in (loaded, datasets.load_from_disk(tmp_path / "saved"), streamed):
        assert mm.load_tasks(given, columns=columns) == expected and len(expected) == 20
    by_split = loaded.rename_columns({"Query": "prompt", "gold": "answer"}).train_test_split(
        test_size=4, seed=1
    )
    assert isinstance(by_split, datasets.DatasetDict)
    found = split_tasks(by_split)
    assert {split: len(tasks) for split, tasks in found.items()} == {
        "train": 15,
        "validation": 1,
        "test": 4,
    }
    assert [task.prompt for task in found["test"]] == by_split["test"]["prompt"][:]
