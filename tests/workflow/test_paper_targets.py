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

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).resolve().parents[2]


def snakemake(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
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


def test_a_tiny_table_makes_its_own_data_and_models_and_shares_untrained_teams(
    tmp_path: Path,
) -> None:
    done = snakemake(tmp_path, "table_unitymas_4", "-n", "--config", "scale=tiny")
    assert done.returncode == 0, done.stderr
    jobs = dict(re.findall(r"^(\w+) +(\d+)$", done.stdout + done.stderr, re.MULTILINE))
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


def test_what_is_missing_is_said_in_lines(tmp_path: Path) -> None:
    done = snakemake(tmp_path, "table_marti_ttrl", "-n")
    lines = [
        line
        for line in done.stderr.splitlines()
        if not line.startswith("Using workflow specific profile")
    ]
    assert done.returncode != 0
    assert lines == [
        "error: 2 of 2 inputs are not on this machine:",
        "  data/math/aime_2024.parquet: HuggingFaceH4/aime_2024 of the hub, 30 rows (for marti_single_ttrl and 1 more)",
        "  models/DeepScaleR-1.5B-Preview: agentica-org/DeepScaleR-1.5B-Preview of the hub, 7.1 GB, licence mit "
        "(for marti_single_ttrl and 1 more)",
        "  run 'marti_single_ttrl' and 1 more: engine.python: .venv-sglang/bin/python: no such interpreter "
        f"({ROOT}/docs/engines.md makes one)",
        f"`snakemake acquire_marti_ttrl` fetches them (7.1 GB where known; {ROOT}/docs/tables.md), or try "
        "--config scale=tiny, which makes its own",
    ]


def test_a_target_behind_configfile_and_a_suite_that_is_not_there_are_a_line(
    tmp_path: Path,
) -> None:
    done = snakemake(tmp_path, "-n", "--configfile", "nowhere.yaml")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: --configfile nowhere.yaml: no such suite file"
    tiny = str(ROOT / "workflow/suites/tiny.yaml")
    done = snakemake(tmp_path, "-n", "--configfile", tiny, "tabel_drmas_1", "--quiet")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        f"error: --configfile took tabel_drmas_1 for a suite; name targets before it: "
        f"snakemake tabel_drmas_1 --configfile {tiny}",
    )


def test_a_target_behind_config_is_a_line() -> None:
    with pytest.raises(
        SystemExit,
        match=r"^error: --config took table_drmas_1 for a setting; name targets before it",
    ):
        check_command(["-n", "--config", "scale=tiny", "table_drmas_1"])
    check_command(["table_drmas_1", "--config", "scale=tiny", "-n", "table_drmas_2"])


def test_a_table_that_searches_needs_its_index_and_encoder(tmp_path: Path) -> None:
    done = snakemake(tmp_path, "table_unitymas_3", "-n")
    assert (
        "  data/wiki-18/index.json: made of data/wiki-18/e5_Flat.index, 70.1 GB (for unitymas_"
        in done.stderr
    )
    assert (
        "  models/e5-base-v2: intfloat/e5-base-v2 of the hub, 0.4 GB, licence mit (for unitymas_"
        in done.stderr
    )
    done = snakemake(tmp_path, "acquire_unitymas_3", "-n", "--quiet", "rules")
    assert done.returncode == 0, done.stderr


def test_a_folder_of_tasks_that_is_not_there_is_said(tmp_path: Path) -> None:
    done = snakemake(tmp_path, "table_mappa_2", "-n")
    assert "error: 2 of 2 inputs are not on this machine:" in done.stderr
    place = "data_modeling of github.com/LiqiangJing/DSBench, with data.zip unpacked in it"
    assert f"  data/dsbench/data_modeling: {place} (for mappa_dsbench)" in done.stderr
    assert (
        "`snakemake acquire_mappa_2` fetches them, except those to be put in place by hand (8.1 GB"
        in done.stderr
    )


@pytest.mark.slow
def test_acquire_makes_a_table_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.tasks.tiny_files.ROWS_PER_FILE", 30)  # as many as AIME 2024 has
    make_tiny_model(tmp_path / "made" / "DeepScaleR")
    config = tmp_path / "made" / "DeepScaleR" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 131072})
    )  # as published
    files = {path.name: path.read_bytes() for path in (tmp_path / "made" / "DeepScaleR").iterdir()}
    folder = tmp_path / "work"
    write_tiny_file(
        folder / "data" / "math" / "aime_2024.parquet", "aime_2024"
    )  # a user's own: checked and kept
    with running(FakeHub({"agentica-org/DeepScaleR-1.5B-Preview": files})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = snakemake(folder, "acquire_marti_ttrl", "-n")
        assert (done.returncode, hub.asked) == (0, []), done.stderr
        done = snakemake(folder, "acquire_marti_ttrl", "--cores", "1")
        assert done.returncode == 0, done.stderr
    page = (folder / "data" / "acquired" / "table_marti_ttrl.md").read_text()
    assert "| data/math/aime_2024.parquet | was there |  | " in page
    assert (
        f"| agentica-org/DeepScaleR-1.5B-Preview of the hub, 7.1 GB, licence mit | {COMMIT[:12]} | "
        in page
    )
    assert "marti_single_ttrl and 1 more: 30 of 30 test tasks are in train, by id" in page
    interpreter = folder / ".venv-sglang" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.symlink_to(sys.executable)
    done = snakemake(folder, "table_marti_ttrl", "-n")
    assert done.returncode == 0, done.stderr  # all inputs are there


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
    assert (requests_inputs(["acquire_drmas_1"]), requests_inputs(["table_drmas_1"])) == (
        True,
        False,
    )
    with pytest.raises(SuiteError, match="no target table_drmas_9; expected table_drmas_1"):
        requested_tables(["table_drmas_9"], None)
    with pytest.raises(SuiteError, match=r"leave --configfile and --config experiments=\.\.\. out"):
        paper_suite(["drmas_1"], {"suite": "x", "experiments": {}})
    with pytest.raises(SuiteError, match="seeds=0; expected the number of seeds"):
        paper_suite(["drmas_1"], {"seeds": 0})


def test_the_runs_of_a_table_are_placed_on_the_gpus_that_are_named(tmp_path: Path) -> None:
    suite = paper_suite(["drmas_f5"], {"gpus": "8xH100", "results": str(tmp_path)})
    (hetero, *_) = Suite.load(suite).runs.values()
    assert (hetero["cluster"]["pool"], hetero["engine"]["sleep"]) == ("shared", True)
    assert paper_suite(["drmas_f5"], {"gpus": "8xH100", "scale": "tiny"})["overrides"] == []


def test_seeds_are_runs_and_policies_are_swapped_within_a_seed() -> None:
    suite = paper_suite(["strongermas_3"], {"seeds": 2, "scale": "tiny"})
    assert suite["results"] == "results/tiny"
    assert suite["experiments"]["strongermas_t3_tool_alone_seed2"] == [
        "experiment=strongermas_t3_tool_alone", "+tracking.tags.table='strongermas_3'", "seed=2",
    ]  # fmt: skip
    assert suite["evaluate"]["strongermas_t1_plan_path_separate_seed2"]["swapped"] == {
        "tool": "strongermas_t1_plan_path_separate_seed2/planner",
        "planner": "strongermas_t1_plan_path_separate_seed2/tool",
    }


@pytest.mark.slow
@pytest.mark.multirank
def test_a_table_is_made_and_its_bundle_is_verified(tmp_path: Path) -> None:
    """MAPPA's table of one experiment. `test_every_experiment.py` trains all in one process, and evaluates others."""
    bundle = tmp_path / "results/tiny/tables/mappa_2.bundle.zip"
    settings = ["tables=mappa_2", f"results={tmp_path}/results/tiny", "scale=tiny"]
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(ROOT / "workflow" / "Snakefile"),
        str(bundle),
    ]
    command += ["--config", *settings]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=3600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    folder = tmp_path / "results/tiny/mappa_dsbench"
    steps = [
        json.loads(line) for line in (folder / "train" / "metrics.jsonl").read_text().splitlines()
    ]
    updates = [
        step[key] for step in steps for key in step if re.fullmatch(r"policy/.+/updates", key)
    ]
    assert (
        [step["step"] for step in steps] == [-1, 0, 1]
        and steps[-1]["rollout/failed"] == 0
        and sum(updates) >= 2
    )
    scores = json.loads((folder / "evaluation" / "trained.json").read_text())
    assert scores["tasks"] and scores["failed"] == {}
    elsewhere = bundle.rename(tmp_path / "b.zip")
    shutil.rmtree(tmp_path / "results")
    assert "the table of 2 evaluations is what their per-task scores give" in verify_bundle(
        elsewhere
    )
