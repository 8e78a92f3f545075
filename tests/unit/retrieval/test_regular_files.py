"""Pipes, devices, sockets and folders are refused before they are read, and so are files that are too large."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from retrieval.regular_files import (
    check_regular,
    open_regular,
    read_regular_bytes,
    read_regular_text,
)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_suffix(".pipe"))
    path.symlink_to(path.with_suffix(".pipe"))


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.open(path.parent, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")  # a path of at most 107 characters
        os.close(folder)


def make_folder(path: Path) -> None:
    path.mkdir()


ODD_FILES: dict[str, Callable[[Path], None]] = {
    "a named pipe": make_pipe,
    "a device": link_to_zeros,
    "a socket": make_socket,
    "a folder": make_folder,
}


@pytest.mark.parametrize("kind", ODD_FILES)
def test_an_odd_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    ODD_FILES[kind](path)
    for read in (check_regular, open_regular, read_regular_bytes, read_regular_text):
        with pytest.raises(OSError, match=f"{kind}, where a regular file is expected: '{path}'"):
            read(path)


def test_a_link_to_a_pipe_is_refused(tmp_path: Path) -> None:
    link_to_pipe(tmp_path / "a.json")
    with pytest.raises(OSError, match="a named pipe"):
        read_regular_bytes(tmp_path / "a.json")


def test_a_file_and_a_link_to_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("größer", encoding="utf-8")
    (tmp_path / "b.txt").symlink_to("a.txt")
    assert read_regular_text(tmp_path / "b.txt") == "größer"
    assert check_regular(tmp_path / "b.txt") == 8
    assert read_regular_bytes(tmp_path / "a.txt", 8).decode() == "größer"
    with pytest.raises(ValueError, match="more than 7 bytes"):
        read_regular_bytes(tmp_path / "a.txt", 7)
    with pytest.raises(FileNotFoundError):
        check_regular(tmp_path / "c.txt")


def test_a_file_without_a_size_is_bounded() -> None:
    """Files of the kernel have a size of 0."""
    with pytest.raises(ValueError, match="more than 3 bytes"):
        read_regular_bytes(Path("/proc/self/status"), 3)
