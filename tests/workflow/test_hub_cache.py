"""A model and a data set by their ids: downloaded by the hub's own client into HF_HOME, then used with the hub gone."""

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


def test_ids_of_what_hf_downloaded_are_a_model_and_tasks_and_nobody_is_asked(
    tmp_path: Path,
) -> None:
    make_tiny_model(tmp_path / "qwen_tiny")
    for split, first in (("train", 0), ("test", 5)):
        rows = [{"Query": f"{n}+1?", "gold": n + 1} for n in range(first, first + 5)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}-00000-of-00001.parquet")
    data = {f"data/{file.name}": file.read_bytes() for file in tmp_path.glob("*.parquet")}
    model = {file.name: file.read_bytes() for file in (tmp_path / "qwen_tiny").iterdir()}
    hub = FakeHub(repositories={"datasets/me/sums": data, "me/qwen_tiny": model})
    given = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env = {
        **given,
        "HF_HOME": str(tmp_path / "hf"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "*",
    }

    def said(*words: str, **more: str) -> str:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=env | more, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        return done.stdout

    with running(hub):
        for words in (("me/qwen_tiny",), ("me/sums", "--repo-type", "dataset")):
            said("huggingface_hub.cli.hf", "download", *words, HF_ENDPOINT=hub.url)
    asked = len(hub.asked)
    (snapshot,) = (tmp_path / "hf/hub/models--me--qwen_tiny/snapshots").iterdir()
    assert (snapshot / "model.safetensors").is_symlink()
    head = "defaults: [{override /team: solver_verifier}]\nrun: own\n"
    experiment = tmp_path / "configs/experiment/own.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text(head + yaml.safe_dump(SETTINGS))
    (tmp_path / "own.yaml").write_text(
        json.dumps({"suite": "own", "experiments": {"own": ["experiment=own"]}})
    )
    gone = {"HF_ENDPOINT": hub.url}  # where nobody answers any more
    assert said("mcore_mas", "check", "own.yaml", **gone) == "ok: own\n"
    said("mcore_mas", "run", "own.yaml", "results/own/tasks/test.parquet", "--quiet", "all", **gone)
    tasks = read_tasks(tmp_path / "results/own/tasks/test.parquet")
    assert [(task.prompt, task.answers) for task in tasks] == [
        (f"{n}+1?", (str(n + 1),)) for n in range(5, 10)
    ]
    config = yaml.safe_load((tmp_path / "results/own/config.yaml").read_text())
    assert {policy["model"] for policy in config["policies"].values()} == {str(snapshot)}
    code = (
        "from rollout.models.chat_template import Renderer; import sys; from pathlib import Path; "
    )
    code += "from mcore_mas.config.hub import downloaded_model; "
    code += "print(len(Renderer(Path(downloaded_model('me/qwen_tiny'))).stop))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env | gone, capture_output=True, text=True
    )
    assert int(done.stdout) > 0, done.stderr
    assert len(hub.asked) == asked
