"""A run is named by its folder, or by its name in results/."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_mas.cli.arguments import run_folder
from rollout.base.ownership import FolderError
from tests.support.run_files import write_small_run


def test_a_folder_without_a_run_does_not_hide_the_run_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_small_run(tmp_path / "results" / "one", {"t": 1.0})
    (tmp_path / "one").mkdir()  # as `mcore-mas new` makes a package of this name
    assert run_folder(Path("one")) == run_folder(Path("results/one")) == Path("results/one")
    with pytest.raises(FolderError, match=r"^onee: no run here; .*; nearest: one$"):
        run_folder(Path("onee"))
    write_small_run(tmp_path / "one", {"t": 1.0})
    assert run_folder(Path("one")) == Path("one")
