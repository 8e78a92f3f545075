"""What Snakemake would run, from dry runs of the real workflow with the real configs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEMO = {
    "suite": "demo",
    "results": "results",
    "experiments": {"demo_math": ["experiment=demo_math"], "demo_search": ["experiment=demo_search"]},
}


def snakemake(folder: Path, suite: dict[str, object], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the workflow in `folder` on `suite`, with the default profile."""
    (folder / "suite.yaml").write_text(yaml.safe_dump(suite))
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")]
    command += ["--configfile", "suite.yaml", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def planned(folder: Path, suite: dict[str, object], *arguments: str) -> dict[str, int]:
    """Jobs by rule that a dry run announces."""
    done = snakemake(folder, suite, "--dry-run", *arguments)
    assert done.returncode == 0, done.stderr
    jobs = re.findall(r"^(\w+) +(\d+)$", done.stdout + done.stderr, re.MULTILINE)
    return {rule: int(count) for rule, count in jobs if rule not in ("all", "total")}


def outputs(folder: Path, suite: dict[str, object]) -> list[Path]:
    """The files that a dry run says are missing."""
    done = snakemake(folder, suite, "--dry-run")
    found = re.findall(r"Missing output files: ([^;\n]+)", done.stdout + done.stderr)
    return [folder / name for line in found for name in line.split(", ")]


def test_the_demo_has_every_rule(tmp_path: Path) -> None:
    assert planned(tmp_path, DEMO) == {
        "resolve_config": 2,
        "prepare_tasks": 1,
        "prepare_tasks_and_passages": 1,
        "build_index": 1,
        "probe_retriever": 1,
        "make_base_model": 2,
        "bootstrap": 2,
        "train": 2,
        "evaluate": 4,
        "make_table": 1,
        "plot_curves": 1,
        "report": 1,
    }
    assert not (tmp_path / "results").exists()


def test_a_run_with_models_of_its_own_needs_no_cold_start(tmp_path: Path) -> None:
    suite = {**DEMO, "experiments": {"real": ["experiment=demo_math", "cold_start=null"]}}
    assert planned(tmp_path, suite) == {
        "resolve_config": 1,
        "prepare_tasks": 1,
        "train": 1,
        "evaluate": 2,
        "make_table": 1,
        "plot_curves": 1,
        "report": 1,
    }


@pytest.mark.parametrize(
    ("override", "words"), [("sede=1", "sede"), ("trainer.stepz=3", "stepz"), ("experiment=demo_maths", "demo_maths")]
)
def test_a_typo_is_one_line_before_anything_runs(tmp_path: Path, override: str, words: str) -> None:
    done = snakemake(tmp_path, {**DEMO, "experiments": {"demo_math": ["experiment=demo_math", override]}}, "--dry-run")
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Using workflow specific profile")]
    assert len(lines) == 1
    assert lines[0].startswith("error: suite 'demo', run 'demo_math': ")
    assert words in lines[0]
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_an_edit_reruns_the_rules_of_its_experiment_only(tmp_path: Path) -> None:
    for path in outputs(tmp_path, DEMO):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("made earlier")
    for page in (tmp_path / "results/tables/demo.csv", tmp_path / "results/tables/demo.md"):
        page.write_text("made earlier")
    assert snakemake(tmp_path, DEMO, "--touch").returncode == 0
    assert planned(tmp_path, DEMO) == {}
    edited = {**DEMO, "experiments": {**DEMO["experiments"], "demo_math": ["experiment=demo_math", "trainer.steps=3"]}}
    assert planned(tmp_path, edited) == {
        "resolve_config": 1,
        "prepare_tasks": 1,
        "make_base_model": 1,
        "bootstrap": 1,
        "train": 1,
        "evaluate": 2,
        "make_table": 1,
        "plot_curves": 1,
        "report": 1,
    }
