"""Pipes, devices and huge configs instead of the files that users name are refused in one line, without waiting."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError
from mcore_mas.pipeline.bundle import BundleError, verify_bundle
from mcore_mas.planning.gpus import Cluster, PlanError
from mcore_mas.runtime.checkpoint_manifest import ManifestError, read_checkpoint_manifest
from retrieval.corpus import RetrievalError
from retrieval.manifest import read_manifest
from retrieval.probe import read_golden
from rollout.base.errors import ModelError
from rollout.models.architecture import read_architecture
from rollout.models.tensor_files import open_tensors
from rollout.records.files import RecordError
from rollout.records.trajectory_lists import trajectory_at
from rollout.tasks.rows import read_rows

KINDS: dict[str, Callable[[Path], None]] = {
    "a named pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}

# File name, expected error, and a function that reads the file in a folder
READERS: dict[str, tuple[str, type[Exception], Callable[[Path], object]]] = {
    "rows of JSON": ("a.json", RecordError, lambda folder: list(read_rows(folder / "a.json"))),
    "lines of JSON": ("a.jsonl", RecordError, lambda folder: list(read_rows(folder / "a.jsonl"))),
    "a CSV file": ("a.csv", RecordError, lambda folder: list(read_rows(folder / "a.csv"))),
    "a parquet file": ("a.parquet", RecordError, lambda f: list(read_rows(f / "a.parquet"))),
    "trajectories": ("t.parquet", RecordError, lambda f: trajectory_at(f / "t.parquet", 0)),
    "config.json": ("config.json", ModelError, read_architecture),
    "tensors": ("m.safetensors", ModelError, lambda f: open_tensors(f / "m.safetensors", "np")),
    "a manifest": ("manifest.json", ManifestError, read_checkpoint_manifest),
    "a bundle": ("b.zip", BundleError, lambda folder: verify_bundle(folder / "b.zip")),
    "an index": ("index.json", RetrievalError, read_manifest),
    "golden queries": ("golden.jsonl", RetrievalError, lambda f: read_golden(f / "golden.jsonl")),
    "a cluster": ("cluster.yaml", PlanError, lambda folder: Cluster.read(folder / "cluster.yaml")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_an_odd_file_is_refused(reader: str, kind: str, tmp_path: Path) -> None:
    name, error, read = READERS[reader]
    KINDS[kind](tmp_path / name)
    with pytest.raises(error) as refusal:
        read(tmp_path)
    assert name in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["experiment/odd.yaml", "team/odd.yaml"])
def test_an_odd_config_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir()
    KINDS[kind](tmp_path / name)
    with pytest.raises(ConfigError, match=f"{kind}, where a regular file is expected"):
        resolve(["experiment=demo_math"], tmp_path)


@pytest.mark.parametrize("name", ["experiment/big.yaml", "team/big.yaml"])
def test_a_config_of_a_hundred_thousand_keys_is_refused_before_it_is_composed(
    name: str, tmp_path: Path
) -> None:
    """All configs of the user are checked, also those that the experiment does not use."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "team").mkdir()
    (tmp_path / "experiment/big.yaml").write_text("trainer: {steps: 3}")
    keys = "".join(f"  k{number}: 1\n" for number in range(100_000))
    (tmp_path / name).write_text(f"trainer:\n{keys}")
    with pytest.raises(ConfigError, match=rf"{name}: \d+ bytes; expected a config of at most"):
        resolve(["experiment=[demo_math,big]"], tmp_path)
