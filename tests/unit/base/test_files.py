"""One owner per folder; files complete or absent."""

import json
import multiprocessing
from pathlib import Path

import psutil
import pytest

from rollout.base.files import FolderError, owned, writable, write_text


def test_a_living_owner_keeps_its_folder(tmp_path: Path) -> None:
    with owned(tmp_path):
        with pytest.raises(FolderError, match=f"in use by process {psutil.Process().pid} on "), owned(tmp_path):
            pass
        assert (tmp_path / "lock.json").exists()
    assert not (tmp_path / "lock.json").exists()


def test_a_dead_owners_lock_is_taken_over(tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
    with owned(tmp_path):
        lock = json.loads((tmp_path / "lock.json").read_text())
    for owner in (lock | {"pid": child.pid}, lock | {"started": lock["started"] - 100}):  # gone; its pid in new hands
        (tmp_path / "lock.json").write_text(json.dumps(owner))
        with owned(tmp_path):
            pass


def test_an_owner_on_another_host_is_not_provably_dead(tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": 0.0}))
    with pytest.raises(FolderError, match="in use by process 1 on elsewhere"), owned(tmp_path):
        pass


def test_a_torn_lock_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text('{"host": "els')
    with owned(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match=r"file/results: cannot write here \(Not a directory\)"):
        writable(tmp_path / "file" / "results")


def test_a_write_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "file", "text")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["file"]
    assert (tmp_path / "new" / "file").read_text() == "text"
