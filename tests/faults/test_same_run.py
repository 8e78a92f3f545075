"""A run is its recipe: the same seed and layout give the same bits again."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.faults.forked import fingerprint, run_folder, trained


def test_the_same_recipe_is_the_same_run(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        (tmp_path / "results").mkdir()
        done = trained(run_folder(tmp_path / "results") / "config.yaml")
        assert done.returncode == 0, done.stderr
        found.append(fingerprint(tmp_path / "results" / "demo_math"))
        shutil.rmtree(tmp_path / "results")
    assert len([name for name in found[0] if name.endswith(".safetensors")]) >= 4
    assert found[0] == found[1], [name for name in found[0] if found[0][name] != found[1].get(name)]
