"""What a run leaves on a machine that others work on, too: they can read none of its weights and conversations."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_mas.megatron.state.weight_import import write_folder
from mcore_mas.tracking.mlflow_store import MlflowStore
from rollout.base.files import atomic_folder, ensure_writable
from tests.support.tiny import make_model


def open_to_others(folder: Path) -> Iterator[str]:
    """Files below `folder` that others can read, as far as they can go."""
    for path in folder.iterdir():
        mode = path.lstat().st_mode
        if path.is_dir() and mode & 0o055:
            yield from open_to_others(path)
        elif not path.is_dir() and mode & 0o077:
            yield path.name


@pytest.fixture(autouse=True)
def _usual() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_weights(tmp_path: Path) -> None:
    model = make_model(0)
    like = tmp_path / "like"
    model.save_pretrained(like)
    assert "config.json" in open_to_others(tmp_path)
    like.chmod(0o755)
    ensure_writable(tmp_path / "run")
    write_folder(
        like, tmp_path / "run" / "models" / "solver", {"x": next(model.parameters()).detach()}
    )
    write_folder(like, tmp_path / "exported", {"x": next(model.parameters()).detach()})
    with atomic_folder(tmp_path / "weights" / "run" / "solver" / "v000001") as partial:
        (partial / "model.safetensors").write_bytes(b"weights")
    like.chmod(0o700)
    assert [*open_to_others(tmp_path)] == []


@pytest.mark.slow
def test_a_store(tmp_path: Path) -> None:
    store = MlflowStore(f"sqlite:///{tmp_path}/results/mlflow.db", "duo", tmp_path)
    run = store.find_or_create_run("key", name="name", tags={})
    store.client.log_text(run.info.run_id, "what a model said", "said.txt")
    assert (tmp_path / "results" / "mlflow.db").stat().st_size > 0
    assert len([*tmp_path.rglob("said.txt")]) == 1
    assert {*open_to_others(tmp_path)} <= {".mlflow.db.lock"}  # nothing is in it
