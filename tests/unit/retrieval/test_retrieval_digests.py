"""Digests of files are cached until a file changes."""

import hashlib
import os
from pathlib import Path

import pytest

from retrieval import digests
from retrieval.digests import cached_sha256

ABC_SHA256 = (
    "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180's example
)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which the names of files are added when their digest is computed."""
    names: list[str] = []
    file_digest = hashlib.file_digest

    def record(file, digest):
        names.append(Path(file.name).name)
        return file_digest(file, digest)

    monkeypatch.setattr(digests.hashlib, "file_digest", record)
    return names


def test_a_file_is_hashed_once_until_it_changes(tmp_path: Path, hashed: list[str]) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"abc")
    assert [cached_sha256(file) for _ in range(3)] == [ABC_SHA256] * 3
    assert hashed == ["x"]
    assert cached_sha256(file, reread=True) == ABC_SHA256
    assert hashed == ["x", "x"]

    # Another content of the same size and modification time has another change time.
    status = file.stat()
    file.write_bytes(b"abd")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cached_sha256(file) == hashlib.sha256(b"abd").hexdigest()


def test_a_damaged_cache_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / ".x.sha256").write_text("[]")
    assert cached_sha256(tmp_path / "x") == ABC_SHA256


def test_several_files_have_one_digest(tmp_path: Path, hashed: list[str]) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    first.write_bytes(b"a")
    second.write_bytes(b"bc")
    assert [cached_sha256(first, second) for _ in range(3)] == [ABC_SHA256] * 3
    assert hashed == ["first", "second"]
    second.write_bytes(b"bd")
    assert cached_sha256(first, second) == hashlib.sha256(b"abd").hexdigest()


def test_the_cache_of_a_read_only_folder_is_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "model").write_bytes(b"abc")
    write_json_file = digests.write_json_file

    def refuse_in_shared(path: Path, value: object) -> None:
        if path.parent == shared:
            raise PermissionError(path)
        write_json_file(path, value)

    monkeypatch.setattr(digests, "write_json_file", refuse_in_shared)
    assert [cached_sha256(shared / "model") for _ in range(3)] == [ABC_SHA256] * 3
    assert hashed == ["model"]
    assert [path.name for path in shared.iterdir()] == ["model"]
