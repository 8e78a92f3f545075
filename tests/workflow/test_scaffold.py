"""A project that `mcore-mas new` writes passes its own test, composes, and plans."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_mas.pipeline.base_model import ScaffoldError, new_project

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_project("poets", tmp_path_factory.mktemp("home"))


def said(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_its_own_test_passes_and_its_suite_plans(project: Path) -> None:
    assert not [file for file in project.rglob("*") if "my_team" in file.name]
    tested = said(project, "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert tested.returncode == 0 and "3 passed" in tested.stdout, tested.stdout
    checked = said(project, "mcore_mas", "check", "poets.yaml")
    assert (checked.returncode, checked.stdout) == (0, "ok: poets\n")
    planned = said(project, "mcore_mas", "run", "poets.yaml", "trainer.steps=2", "--dry-run", "--quiet", "rules")
    assert planned.returncode == 0, planned.stderr
    assert not (project / "results").exists()


@pytest.mark.slow
def test_the_clusters_page_moves_it_to_gpus_with_three_lines(tmp_path: Path) -> None:
    (lines,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "to_slurm.md").read_text(), flags=re.DOTALL)
    project = new_project("my_team", tmp_path)
    file = project / "configs" / "experiment" / "my_team.yaml"
    kept = [
        line for line in file.read_text().splitlines() if line.partition(":")[0] not in ("policy_defaults", "engine")
    ]
    file.write_text("\n".join([*kept, lines]))
    checked = said(project, "mcore_mas", "check", "my_team.yaml")
    assert checked.returncode == 1 and checked.stdout.startswith(
        "no: run 'my_team': policies.shared: /shared/models/Qwen"
    )
    planned = said(project, "mcore_mas", "plan", "my_team.yaml", "--gpus", "4xH100")
    assert planned.returncode == 0 and planned.stdout.startswith("my_team on 4xH100: shared, "), planned.stderr


def test_a_name_that_is_no_package_or_is_taken_is_refused(project: Path) -> None:
    for name in ("my-team", "class", "mcore_mas", "../x", ""):
        with pytest.raises(ScaffoldError, match="cannot be a Python package"):
            new_project(name, project.parent)
    with pytest.raises(ScaffoldError, match="something is there already"):
        new_project("poets", project.parent)
