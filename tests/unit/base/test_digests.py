"""Digests of files and of folders."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from rollout.base.digests import check_tree, sha256, tree_sha256, write_chunks
from rollout.base.ownership import FolderError


def test_several_files_have_the_digest_of_their_concatenation(tmp_path: Path) -> None:
    (tmp_path / "first").write_bytes(b"a")
    (tmp_path / "second").write_bytes(b"bc")
    expected = hashlib.sha256(b"abc").hexdigest()
    assert sha256(tmp_path / "first", tmp_path / "second") == expected


def test_written_chunks_have_the_digest_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    numbers = np.array([1, 2], dtype="<i4")
    digest = write_chunks(path, [b"a", memoryview(b"bc"), memoryview(numbers)])
    assert path.read_bytes() == b"abc" + b"\1\0\0\0\2\0\0\0"
    assert digest == {"bytes": 3 + 2 * 4, "sha256": sha256(path)}


def test_a_changed_or_missing_file_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    (tmp_path / "folder" / "a").write_text("a")
    (tmp_path / "folder" / "sub" / "b").write_text("b")
    folder = tmp_path / "folder"
    digests = tree_sha256(folder)
    assert list(digests) == ["a", "sub/b"]

    (folder / "further").write_text("c")
    check_tree(folder, digests)
    (folder / "a").write_text("A")
    with pytest.raises(FolderError, match="folder/a: not there, or not as it was written"):
        check_tree(folder, digests)
    (folder / "a").unlink()
    with pytest.raises(FolderError, match="folder/a: not there"):
        check_tree(folder, digests)
