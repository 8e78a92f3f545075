"""Papers' tables as targets, from dry runs of the real workflow."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_mas.pipeline.base_model import make_tiny_model
from mcore_mas.pipeline.bundle import verify_bundle
from mcore_mas.pipeline.paper_suite import paper_suite, requested_tables, requests_inputs
from mcore_mas.pipeline.suite import Suite
from mcore_mas.pipeline.suite_file import SuiteError, check_command
from rollout.tasks.tiny_files import write_tiny_file
from tests.support.hub import COMMIT, FakeHub, running
from tests.support.run_folder import metrics_of

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).resolve().parents[2]


def snakemake(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Snakemake with the project's workflow in a folder."""
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(ROOT / "workflow" / "Snakefile"),
        *arguments,
    ]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


def test_a_table_at_the_tiny_scale_makes_its_data_and_models_and_shares_untrained_teams(
    tmp_path: Path,
) -> None:
    completed = snakemake(tmp_path, "table_unitymas_4", "-n", "--config", "scale=tiny")
    assert completed.returncode == 0, completed.stderr
    jobs = dict(re.findall(r"^(\w+) +(\d+)$", completed.stdout + completed.stderr, re.MULTILINE))
    assert jobs == {
        "make_tiny_file": "2",
        "make_tiny_model": "2",
        "prepare_tasks": "1",
        "share_tasks": "1",
        "train": "2",
        "evaluate": "4",
        "make_paper_table": "1",
        "table_unitymas_4": "1",
        "total": "14",
    }
    assert list(tmp_path.glob("results*")) == []


def test_missing_inputs_are_listed(tmp_path: Path) -> None:
    completed = snakemake(tmp_path, "table_marti_ttrl", "-n")
    lines = [
        line
        for line in completed.stderr.splitlines()
        if not line.startswith("Using workflow specific profile")
    ]
    assert completed.returncode != 0
    assert lines == [
        "error: 2 of 2 inputs are not on this machine:",
        "  data/math/aime_2024.parquet: HuggingFaceH4/aime_2024 of the hub, 30 rows (for marti_single_ttrl and 1 more)",
        "  models/DeepScaleR-1.5B-Preview: agentica-org/DeepScaleR-1.5B-Preview of the hub, 7.1 GB, licence mit "
        "(for marti_single_ttrl and 1 more)",
        "  run 'marti_single_ttrl' and 1 more: engine.python: .venv-sglang/bin/python: no such interpreter; "
        f"`make setup-sglang` makes it ({ROOT}/docs/engines.md)",
        f"`snakemake acquire_marti_ttrl` fetches them (7.1 GB where known; {ROOT}/docs/tables.md), or try "
        "--config scale=tiny, which makes its own",
    ]


def test_a_target_after_configfile_and_a_missing_suite_are_reported_in_one_line(
    tmp_path: Path,
) -> None:
    completed = snakemake(tmp_path, "-n", "--configfile", "nowhere.yaml")
    assert completed.returncode == 1
    assert (
        completed.stderr.splitlines()[-1] == "error: --configfile nowhere.yaml: no such suite file"
    )
    tiny = str(ROOT / "workflow/suites/tiny.yaml")
    completed = snakemake(tmp_path, "-n", "--configfile", tiny, "tabel_drmas_1", "--quiet")
    assert completed.returncode == 1
    assert completed.stderr.splitlines()[-1] == (
        f"error: --configfile took tabel_drmas_1 for a suite; name targets before it: "
        f"snakemake tabel_drmas_1 --configfile {tiny}"
    )


def test_a_target_after_config_is_reported() -> None:
    message = r"^error: --config took table_drmas_1 for a setting; name targets before it"
    with pytest.raises(SystemExit, match=message):
        check_command(["-n", "--config", "scale=tiny", "table_drmas_1"])
    check_command(["table_drmas_1", "--config", "scale=tiny", "-n", "table_drmas_2"])


def test_a_table_that_searches_needs_its_index_and_encoder(tmp_path: Path) -> None:
    completed = snakemake(tmp_path, "table_unitymas_3", "-n")
    index = "data/wiki-18/index.json: made of data/wiki-18/e5_Flat.index, 70.1 GB"
    assert f"  {index} (for unitymas_" in completed.stderr
    encoder = "models/e5-base-v2: intfloat/e5-base-v2 of the hub, 0.4 GB, licence mit"
    assert f"  {encoder} (for unitymas_" in completed.stderr
    completed = snakemake(tmp_path, "acquire_unitymas_3", "-n", "--quiet", "rules")
    assert completed.returncode == 0, completed.stderr


def test_a_missing_folder_of_tasks_is_listed(tmp_path: Path) -> None:
    completed = snakemake(tmp_path, "table_mappa_2", "-n")
    assert "error: 2 of 2 inputs are not on this machine:" in completed.stderr
    source = "data_modeling of github.com/LiqiangJing/DSBench, with data.zip unpacked in it"
    assert f"  data/dsbench/data_modeling: {source} (for mappa_dsbench)" in completed.stderr
    advice = "fetches them, except those to be put in place by hand (8.1 GB"
    assert f"`snakemake acquire_mappa_2` {advice}" in completed.stderr


@pytest.mark.slow
def test_acquire_makes_a_table_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.tasks.tiny_files.ROWS_PER_FILE", 30)  # as many as AIME 2024 has
    model = tmp_path / "made" / "DeepScaleR"
    make_tiny_model(model)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 131072  # as published
    (model / "config.json").write_text(json.dumps(config))
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    folder = tmp_path / "work"
    # The user already has the tasks; they are checked, and not replaced.
    write_tiny_file(folder / "data" / "math" / "aime_2024.parquet", "aime_2024")
    with (
        running(FakeHub({"agentica-org/DeepScaleR-1.5B-Preview": files})) as hub,
        monkeypatch.context() as patch,
    ):
        patch.setenv("HF_ENDPOINT", hub.url)
        completed = snakemake(folder, "acquire_marti_ttrl", "-n")
        assert completed.returncode == 0, completed.stderr
        assert hub.requests == []
        completed = snakemake(folder, "acquire_marti_ttrl", "--cores", "1")
        assert completed.returncode == 0, completed.stderr
    page = (folder / "data" / "acquired" / "table_marti_ttrl.md").read_text()
    assert "| data/math/aime_2024.parquet | was there |  | " in page
    source = "agentica-org/DeepScaleR-1.5B-Preview of the hub, 7.1 GB, licence mit"
    assert f"| {source} | {COMMIT[:12]} | " in page
    assert "marti_single_ttrl and 1 more: 30 of 30 test tasks are in train, by id" in page

    # With SGLang's interpreter, all inputs of the table exist.
    interpreter = folder / ".venv-sglang" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.symlink_to(sys.executable)
    completed = snakemake(folder, "table_marti_ttrl", "-n")
    assert completed.returncode == 0, completed.stderr


def test_targets_and_settings_are_checked() -> None:
    assert requested_tables(["table_drmas_1", "-n", "table_drmas_1"], None) == ["drmas_1"]
    assert len(requested_tables(["tables"], None)) == 17
    assert requested_tables(["--target-jobs", "train:run=x"], "drmas_1+drmas_2") == [
        "drmas_1",
        "drmas_2",
    ]
    assert requested_tables(["acquire_drmas_1"], None) == ["drmas_1"]
    assert requested_tables(["acquire"], None) == requested_tables(["tables"], None)
    assert requested_tables(["acquire"], None, names_suite=True) == []
    assert requests_inputs(["acquire_drmas_1"])
    assert not requests_inputs(["table_drmas_1"])
    with pytest.raises(SuiteError, match=r"no table 'drmas_9'; tables: .*drmas_1"):
        requested_tables(["table_drmas_9"], None)
    with pytest.raises(SuiteError, match=r"leave --configfile and --config experiments=\.\.\. out"):
        paper_suite(["drmas_1"], {"suite": "x", "experiments": {}})
    with pytest.raises(SuiteError, match="seeds=0; expected the number of seeds"):
        paper_suite(["drmas_1"], {"seeds": 0})


def test_the_runs_of_a_table_are_placed_on_the_requested_gpus(tmp_path: Path) -> None:
    suite = paper_suite(["drmas_f5"], {"gpus": "8xH100", "results": str(tmp_path)})
    first_run, *_ = Suite.load(suite).runs.values()
    assert first_run["cluster"]["pool"] == "shared"
    assert first_run["engine"]["sleep"] is True
    assert paper_suite(["drmas_f5"], {"gpus": "8xH100", "scale": "tiny"})["overrides"] == []


def test_seeds_are_runs_and_policies_are_swapped_within_a_seed() -> None:
    suite = paper_suite(["strongermas_3"], {"seeds": 2, "scale": "tiny"})
    assert suite["results"] == "results/tiny"
    assert suite["experiments"]["strongermas_t3_tool_alone_seed2"] == [
        "experiment=strongermas_t3_tool_alone",
        "+tracking.tags.table='strongermas_3'",
        "seed=2",
    ]
    assert suite["evaluate"]["strongermas_t1_plan_path_separate_seed2"]["swapped"] == {
        "tool": "strongermas_t1_plan_path_separate_seed2/planner",
        "planner": "strongermas_t1_plan_path_separate_seed2/tool",
    }


@pytest.mark.slow
@pytest.mark.multirank
def test_a_table_is_made_and_its_bundle_is_verified(tmp_path: Path) -> None:
    """MAPPA's table of one experiment is made by the real jobs.

    `test_every_experiment.py` trains the experiments of all tables, but in one process.
    """
    bundle = tmp_path / "results/tiny/tables/mappa_2.bundle.zip"
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(ROOT / "workflow" / "Snakefile"),
        str(bundle),
        "--config",
        "tables=mappa_2",
        f"results={tmp_path}/results/tiny",
        "scale=tiny",
    ]
    completed = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=3600, check=False
    )
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-6000:]
    run = tmp_path / "results/tiny/mappa_dsbench"
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == [-1, 0, 1]
    assert rows[-1]["rollout/failed"] == 0
    updates = 0
    for row in rows:
        updates += sum(row[name] for name in row if re.fullmatch(r"policy/.+/updates", name))
    assert updates >= 2
    scores = json.loads((run / "evaluation" / "trained.json").read_text())
    assert scores["tasks"]
    assert scores["failed"] == {}

    # The bundle needs no other file.
    moved_bundle = bundle.rename(tmp_path / "b.zip")
    shutil.rmtree(tmp_path / "results")
    message = "the table of 2 evaluations is what their per-task scores give"
    assert message in verify_bundle(moved_bundle)
