"""The pipeline in a folder whose path, like that of its .venv, has blanks, a quotation mark and an accent."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

SUITE = {
    "suite": "mini",
    "results": "results/mini",
    "experiments": {
        "first": ["experiment=demo_math"],
        "second": ["experiment=demo_math", "trainer.steps=3"],
    },
    "overrides": ["data.train=20", "data.validation=4", "data.test=4"],
}
TARGETS = (
    "results/mini/first/tasks/train.parquet",  # a script
    "results/mini/second/tasks/train.parquet",  # a shell command
)


@pytest.mark.slow
def test_rules_run_in_a_folder_with_an_awkward_path(tmp_path: Path) -> None:
    folder = tmp_path / "it's two wörds"
    folder.mkdir()
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "mini.yaml").write_text(yaml.safe_dump(SUITE))
    command = [".venv/bin/python", "-m", "mcore_mas", "run", "mini.yaml", *TARGETS]
    completed = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=500
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    for target in TARGETS:
        assert (folder / target).is_file()
