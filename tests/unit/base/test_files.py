"""Files and folders are written completely or not at all."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollout.base.files import (
    atomic_folder,
    atomic_path,
    check_output_path,
    ensure_writable,
    file_lock,
    write_text,
)
from rollout.base.ownership import FolderError


def test_a_write_leaves_nothing_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_text(path, "text")
    assert list(path.parent.iterdir()) == [path]
    assert path.read_text() == "text"


def test_a_failed_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        temporary.write_text("new")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_next_write_removes_the_draft_of_a_killed_process(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process()
    process.start()
    process.join()
    path = tmp_path / "file"
    with atomic_path(path) as temporary:
        temporary.write_text("text")
        abandoned = temporary.with_name(temporary.name.replace(str(os.getpid()), str(process.pid)))
    abandoned.write_text("partial")
    write_text(path, "text")
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with atomic_folder(folder) as partial:
        (partial / "first").touch()
    with pytest.raises(RuntimeError), atomic_folder(folder) as partial:
        raise RuntimeError
    assert [path.name for path in folder.iterdir()] == ["first"]
    with atomic_folder(folder) as partial:
        (partial / "second").touch()
    assert [path.name for path in folder.iterdir()] == ["second"]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match=r"file/results: cannot write here \(Not a directory\)"):
        ensure_writable(tmp_path / "file" / "results")


@pytest.mark.parametrize("path", ["new", "new/folder/file", "file", "folder"])
def test_a_path_below_a_writable_folder_can_be_written(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    check_output_path(tmp_path / path)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file", tmp_path / "folder"]


@pytest.mark.parametrize("path", ["file/x", "file/x/y"])
def test_a_path_below_a_file_cannot_be_written(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    message = f"^{path}: cannot be written, because {tmp_path}/file is no folder; name another"
    with pytest.raises(FolderError, match=message):
        check_output_path(Path(path))


def test_a_new_folder_is_for_this_user_alone_and_an_existing_one_is_unchanged(
    tmp_path: Path,
) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    modes = [ensure_writable(tmp_path / name).stat().st_mode & 0o777 for name in ("new", "shared")]
    assert modes == [0o700, 0o755]


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "file"
    entered = threading.Event()

    def enter() -> None:
        with file_lock(path):
            entered.set()

    thread = threading.Thread(target=enter)
    with file_lock(path):
        thread.start()
        assert not entered.wait(0.2)
    thread.join(60)
    assert entered.is_set()


WRITE_WITHOUT_SPACE = """
import resource, sys
from pathlib import Path
from rollout.base.files import write_text
from rollout.base.ownership import owned
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
folder = Path(sys.argv[1])
for work in (lambda: owned(folder).__enter__(), lambda: write_text(folder / "file", "text")):
    try:
        work()
    except Exception as error:
        print(error)
"""


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WRITE_WITHOUT_SPACE, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.splitlines() == [
        f"{tmp_path}/lock.json: cannot be written (File too large); make room, and run it again",
        f"[Errno 27] File too large: '{tmp_path}/file'",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock.json"]
