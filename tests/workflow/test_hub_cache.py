"""A model and a data set by their ids: downloaded with the hub's client into HF_HOME, and used without the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from mcore_mas.pipeline.base_model import make_tiny_model
from rollout.records.files import read_tasks
from tests.support.hub import FakeHub, running

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs")]

DATA = {"path": "me/sums", "columns": {"prompt": "Query", "answer": "gold"}}
SETTINGS = {
    "data": {
        "format": "plain",
        "train": DATA,
        "validation": {**DATA, "split": "test"},
        "test": DATA,
    },
    "policy_defaults": {"model": "me/qwen_tiny", "lr": 1e-3},
    "engine": {"max_length": 512},
    "trainer": {"steps": 1, "tasks_per_step": 2, "group_size": 2},
    "evaluation": {"samples": 1},
}


def test_downloaded_models_and_data_sets_are_used_by_id_without_a_request(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "qwen_tiny")
    for split, first in (("train", 0), ("test", 5)):
        rows = [{"Query": f"{n}+1?", "gold": n + 1} for n in range(first, first + 5)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}-00000-of-00001.parquet")
    data = {f"data/{file.name}": file.read_bytes() for file in tmp_path.glob("*.parquet")}
    model = {file.name: file.read_bytes() for file in (tmp_path / "qwen_tiny").iterdir()}
    hub = FakeHub(repositories={"datasets/me/sums": data, "me/qwen_tiny": model})
    other_variables = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_")
    }
    env = {
        **other_variables,
        "HF_HOME": str(tmp_path / "hf"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "*",
    }

    def python(*arguments: str) -> str:
        """Run Python with the hub's URL; return its output."""
        completed = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=env | {"HF_ENDPOINT": hub.url},
            capture_output=True,
            text=True,
            check=False,
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr[-3000:]
        return completed.stdout

    with running(hub):
        download = ("-m", "huggingface_hub.cli.hf", "download")
        python(*download, "me/qwen_tiny")
        python(*download, "me/sums", "--repo-type", "dataset")
    # From here on the hub does not run.
    request_count = len(hub.requests)
    (snapshot,) = (tmp_path / "hf/hub/models--me--qwen_tiny/snapshots").iterdir()
    assert (snapshot / "model.safetensors").is_symlink()
    head = "defaults: [{override /team: solver_verifier}]\nrun: own\n"
    experiment = tmp_path / "configs/experiment/own.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text(head + yaml.safe_dump(SETTINGS))
    (tmp_path / "own.yaml").write_text(
        json.dumps({"suite": "own", "experiments": {"own": ["experiment=own"]}})
    )
    assert python("-m", "mcore_mas", "check", "own.yaml") == "ok: own\n"
    target = "results/own/tasks/test.parquet"
    python("-m", "mcore_mas", "run", "own.yaml", target, "--quiet", "all")
    tasks = read_tasks(tmp_path / target)
    assert [(task.prompt, task.answers) for task in tasks] == [
        (f"{n}+1?", (str(n + 1),)) for n in range(5, 10)
    ]
    config = yaml.safe_load((tmp_path / "results/own/config.yaml").read_text())
    assert {policy["model"] for policy in config["policies"].values()} == {str(snapshot)}
    code = (
        "from pathlib import Path; "
        "from rollout.models.chat_template import Renderer; "
        "from mcore_mas.config.hub import downloaded_model; "
        "print(len(Renderer(Path(downloaded_model('me/qwen_tiny'))).stop))"
    )
    assert int(python("-c", code)) > 0
    assert len(hub.requests) == request_count
