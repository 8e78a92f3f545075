"""A run is its recipe: the same seed and layout give the same bits again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mcore_mas.rollout.base.failpoints import FAILPOINTS
from tests.faults.forked import fingerprint, run_folder, trained


def test_the_same_recipe_is_the_same_run(tmp_path: Path) -> None:
    found = [fingerprint(trained_again(tmp_path)) for _ in range(2)]
    assert len([name for name in found[0] if name.endswith(".safetensors")]) >= 4
    assert found[0] == found[1], [name for name in found[0] if found[0][name] != found[1].get(name)]


@pytest.mark.slow
def test_ahead_of_training_neither_time_nor_a_kill_changes_a_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for orders in ("", "token=sleep:0.1", "token=kill@103"):
        monkeypatch.setenv(FAILPOINTS, orders)
        found.append(fingerprint(trained_again(tmp_path, "trainer.staleness=1", "agents.solver.max_tokens=40")))
        assert found[-1] == found[0], [name for name in found[0] if found[0][name] != found[-1].get(name)]
    assert len([name for name in found[0] if name.endswith(".safetensors")]) >= 4


def trained_again(base: Path, *settings: str) -> Path:
    """The run's folder after another training of it, started again if it was killed, in place of the one before."""
    shutil.rmtree(base / "results", ignore_errors=True)
    (base / "results").mkdir()
    folder = run_folder(base / "results", *settings)
    done = trained(folder / "config.yaml")
    if "kill" in os.environ.get(FAILPOINTS, ""):  # a reply is under way, and its first tokens are on record
        assert done.returncode == -9
        assert any('"key":"part ' in path.read_text() for path in (folder / "train" / "journal").iterdir())
        os.environ[FAILPOINTS] = ""
        done = trained(folder / "config.yaml")
    assert done.returncode == 0, done.stderr
    return folder
