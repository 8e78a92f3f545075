"""Weights and conversations of a run cannot be read by other users of the machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_mas.megatron.state.weight_import import write_folder
from mcore_mas.tracking.mlflow_store import MlflowStore
from rollout.base.files import atomic_folder, ensure_writable
from tests.support.tiny import make_model


def readable_by_others(folder: Path) -> Iterator[str]:
    """Yield the names of the files below a folder that other users can reach and have any permission for."""
    for path in folder.iterdir():
        mode = path.lstat().st_mode
        if path.is_dir() and mode & 0o055:
            yield from readable_by_others(path)
        elif not path.is_dir() and mode & 0o077:
            yield path.name


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    """Create files and folders that others can read by default."""
    earlier_mask = os.umask(0o022)
    yield
    os.umask(earlier_mask)


def test_weights_are_private(tmp_path: Path) -> None:
    model = make_model(0)
    tensors = {"x": next(model.parameters()).detach()}
    base_model = tmp_path / "base_model"
    model.save_pretrained(base_model)
    assert "config.json" in readable_by_others(tmp_path)

    base_model.chmod(0o755)
    ensure_writable(tmp_path / "run")
    write_folder(base_model, tmp_path / "run" / "models" / "solver", tensors)
    write_folder(base_model, tmp_path / "exported", tensors)
    with atomic_folder(tmp_path / "weights" / "run" / "solver" / "v000001") as partial:
        (partial / "model.safetensors").write_bytes(b"weights")

    base_model.chmod(0o700)  # its own files do not count
    assert list(readable_by_others(tmp_path)) == []


@pytest.mark.slow
def test_an_mlflow_store_is_private(tmp_path: Path) -> None:
    store = MlflowStore(f"sqlite:///{tmp_path}/results/mlflow.db", "duo", tmp_path)
    run = store.find_or_create_run("key", name="name", tags={})
    store.client.log_text(run.info.run_id, "text of a model", "reply.txt")
    assert (tmp_path / "results" / "mlflow.db").stat().st_size > 0
    assert len(list(tmp_path.rglob("reply.txt"))) == 1
    assert set(readable_by_others(tmp_path)) <= {".mlflow.db.lock"}  # the lock is an empty file
