"""Cache of composed configs: each run of a suite is composed once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from mcore_mas.pipeline import suite as suites
from mcore_mas.pipeline.suite import Suite

ROOT = Path(__file__).resolve().parents[2]
RUNS = {
    "one": ["experiment=drmas_t1_4b_shared_drmas"],
    "two": ["experiment=drmas_t1_4b_shared_drmas", "seed=2"],
}


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of runs that were composed so far."""
    names: list[str] = []
    resolve = suites.resolve

    def record(overrides: Sequence[str], *rest: Any, **keywords: Any) -> dict[str, Any]:
        (name,) = [word for word in overrides if word.startswith("run=")]
        names.append(name.removeprefix("run="))
        return resolve(overrides, *rest, **keywords)

    monkeypatch.setattr(suites, "resolve", record)
    return names


def load(folder: Path, **runs: list[str]) -> Suite:
    """Load a suite of these runs, with its cache in `folder`."""
    return Suite.load({"suite": "s", "experiments": runs}, folder, cache=folder / "cache")


def test_a_suite_that_is_loaded_again_composes_nothing(tmp_path: Path, composed: list[str]) -> None:
    first = load(tmp_path, **RUNS)
    assert composed == ["one", "two"]
    again = load(tmp_path, **RUNS)
    assert composed == ["one", "two"]
    assert again == first


def test_only_changed_runs_are_composed(tmp_path: Path, composed: list[str]) -> None:
    load(tmp_path, **RUNS)
    edited = load(tmp_path, one=[*RUNS["one"], "trainer.steps=3"], two=RUNS["two"])
    assert composed == ["one", "two", "one"]
    assert edited.runs["one"]["trainer"]["steps"] == 3
    (tmp_path / "cache/s.json").write_text("{")  # as after a crash of the machine
    assert load(tmp_path, two=RUNS["two"]).runs["two"] == edited.runs["two"]
    assert composed == ["one", "two", "one", "two"]


def test_a_change_of_the_users_files_is_noticed(tmp_path: Path, composed: list[str]) -> None:
    experiment = tmp_path / "configs/experiment/mine.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text("defaults: [demo_math, {override /advantage: grpo}]\n")
    code = tmp_path / "counted_rewards.py"
    code.write_text("def plain(group): return group\n")
    runs = {"mine": ["experiment=mine", "reward.name=counted_rewards:plain", "reward.options={}"]}
    load(tmp_path, **runs)
    load(tmp_path, **runs)
    assert composed == ["mine"]
    os.utime(code, (1, 1))
    load(tmp_path, **runs)
    assert composed == ["mine"] * 2
    experiment.write_text("defaults: [demo_math, {override /advantage: rloo}]\n")
    assert load(tmp_path, **runs).runs["mine"]["advantage"]["name"] == "rloo"
    assert composed == ["mine"] * 3


def test_a_download_from_the_hub_is_noticed(
    tmp_path: Path, composed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    overrides = [*RUNS["one"], "policies.shared.model=me/tiny"]
    before = load(tmp_path, one=overrides)
    assert before.runs["one"]["policies"]["shared"]["model"] == "me/tiny"

    model = tmp_path / "hub" / "models--me--tiny"
    for commit in ("a" * 40, "b" * 40):
        snapshot = model / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text(commit)
        after = load(tmp_path, one=overrides)
        assert after.runs["one"]["policies"]["shared"]["model"] == str(snapshot)
    load(tmp_path, one=overrides)
    assert composed == ["one", "one", "one"]


def test_runs_that_read_the_environment_are_composed_again(
    tmp_path: Path, composed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {"one": [*RUNS["one"], "tracking.uri=${oc.env:URI_OF_TEST}"]}
    for uri in ("here", "there"):
        monkeypatch.setenv("URI_OF_TEST", uri)
        assert load(tmp_path, **runs).runs["one"]["tracking"]["uri"] == uri
    assert composed == ["one"] * 2


@pytest.mark.slow
def test_planning_all_tables_composes_each_run_once_without_torch(tmp_path: Path) -> None:
    """A dry run of all tables takes seconds (see benchmarks/dry_run.py), and needs no heavy import."""
    program = """
import sys
from pathlib import Path
from mcore_mas.pipeline import suite as suites
from mcore_mas.pipeline.paper_suite import paper_suite
from mcore_mas.pipeline.suite import Suite
from mcore_mas.reports.paper_tables import table_names
composed = []
resolve = suites.resolve
def record(*arguments, **keywords):
    composed.append(arguments)
    return resolve(*arguments, **keywords)
suites.resolve = record
suite = Suite.load(paper_suite(table_names(), {"gpus": "8xH100", "results": "here"}), cache=Path("cache"))
assert len(suite.runs) == len(composed), (len(suite.runs), len(composed))
assert all(config["cluster"]["gpus"] == "8xH100" for config in suite.runs.values())
print(len(composed), sorted({"torch", "megatron", "transformers", "ray", "pandas"} & set(sys.modules)))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "92 []\n"), result.stderr
