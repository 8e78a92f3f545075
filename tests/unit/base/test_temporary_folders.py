"""Numbered temporary folders have the lowest free numbers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from rollout.base.temporary_folders import numbered_folder


def test_a_free_number_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with numbered_folder("x") as outer:
        with numbered_folder("x") as inner:
            assert [outer.name, inner.name] == ["x-0", "x-1"]
            (inner / "file").write_text("text")
        with numbered_folder("x") as again:
            assert again == inner
            assert list(again.iterdir()) == []
            assert again.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_removed_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError), numbered_folder("x"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
