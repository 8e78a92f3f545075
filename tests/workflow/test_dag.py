"""What Snakemake would run, from dry runs of the real workflow with the real configs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests.support.run_folder import describe_model

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).resolve().parents[2]
DEMO = {
    "suite": "demo",
    "results": "results",
    "experiments": {
        "demo_math": ["experiment=demo_math"],
        "demo_search": ["experiment=demo_search"],
    },
}


STAND_IN = """'''Stands in for a rule: its outputs exist afterwards.'''
from pathlib import Path
for path in snakemake.output:
    Path(path).write_text("made")
"""


def snakemake(
    folder: Path, suite: dict[str, object], *arguments: str, source: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run the workflow of `source` in `folder` on `suite`, with the default profile."""
    file = folder / f"{suite['suite']}.yaml"
    file.write_text(yaml.safe_dump(suite))
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(source / "workflow" / "Snakefile"),
    ]
    command += ["--configfile", str(file), *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


def planned(
    folder: Path, suite: dict[str, object], source: Path = ROOT, target: str = "all"
) -> dict[str, int]:
    """Jobs by rule that a dry run of `target` announces."""
    done = snakemake(folder, suite, "--dry-run", target, source=source)
    assert done.returncode == 0, done.stderr
    jobs = re.findall(r"^(\w+) +(\d+)$", done.stdout + done.stderr, re.MULTILINE)
    return {rule: int(count) for rule, count in jobs if rule not in ("all", "total")}


def test_the_demo_has_every_rule(tmp_path: Path) -> None:
    assert planned(tmp_path, DEMO) == {
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


def test_every_shard_of_the_passages_has_a_job(tmp_path: Path) -> None:
    suite = {**DEMO, "experiments": {"search": ["experiment=demo_search", "++retriever.shards=3"]}}
    jobs = planned(tmp_path, suite, target="results/search/retriever.json")
    assert jobs == {
        "prepare_tasks_and_passages": 1,
        "encode_shard": 3,
        "build_index": 1,
        "probe_retriever": 1,
    }


def test_a_run_with_models_of_its_own_needs_no_cold_start(tmp_path: Path) -> None:
    suite = {**DEMO, "experiments": {"real": ["experiment=demo_math", "cold_start=null"]}}
    describe_model(tmp_path / "results/real/bootstrap/model")
    assert planned(tmp_path, suite) == {
        "prepare_tasks": 1,
        "train": 1,
        "evaluate": 2,
        "make_table": 1,
        "plot_curves": 1,
        "report": 1,
    }


def test_data_files_are_inputs(tmp_path: Path) -> None:
    overrides = [
        "cold_start=null",
        "data.generator=null",
        "+data.format=math",
        "trainer.tasks_per_step=5",
    ]
    overrides += [
        f"data.{split}=[{{path: {split}.jsonl, limit: 5}}]"
        for split in ("train", "validation", "test")
    ]
    suite = {**DEMO, "experiments": {"real": ["experiment=demo_math", *overrides]}}
    describe_model(tmp_path / "results/real/bootstrap/model")
    done = snakemake(tmp_path, suite, "--dry-run")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert all(
        f"data: {split}.jsonl does not exist" in said for split in ("train", "validation", "test")
    )
    for split in ("train", "validation", "test"):
        rows = ({"question": f"{split} {n}?", "answer": n} for n in range(5))
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert planned(tmp_path, suite)["prepare_tasks"] == 1


def test_a_typo_is_one_line_before_anything_runs(tmp_path: Path) -> None:
    typo = ["experiment=demo_math", "trainer.stepz=3"]
    done = snakemake(tmp_path, {**DEMO, "experiments": {"demo_math": typo}}, "--dry-run")
    assert done.returncode != 0
    lines = [
        line
        for line in done.stderr.splitlines()
        if not line.startswith("Using workflow specific profile")
    ]
    assert len(lines) == 1
    assert lines[0] == (
        "error: run 'demo_math': trainer.stepz: unknown key; nearest: steps "
        "(experiment=demo_math trainer.stepz=3)"
    )
    assert not (tmp_path / "results").exists()


def stand_ins(folder: Path, **scripts: str) -> None:
    """A copy of the workflow in `folder` whose rules only make their outputs, but for those of `scripts`."""
    shutil.copytree(ROOT / "workflow", folder / "workflow")
    for script in (folder / "workflow/scripts").glob("*.py"):
        script.write_text(scripts.get(script.stem, STAND_IN))


TABLE_OF_ALL = {"make_table": 1, "report": 1}


@pytest.mark.slow
def test_an_edit_reruns_what_depends_on_the_edited_keys(tmp_path: Path) -> None:
    stand_ins(tmp_path)
    done = snakemake(tmp_path, DEMO, source=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "Done.   Report: results/reports/demo.html   Table: results/tables/demo.md" in done.stdout
    )
    written = yaml.safe_load((tmp_path / "results/demo_search/config.yaml").read_text())
    assert (written["run"], written["trainer"]["steps"]) == ("demo_search", 60)
    assert planned(tmp_path, DEMO, tmp_path) == {}

    def edited(math: str, search: str) -> dict[str, int]:
        experiments = {
            "demo_math": ["experiment=demo_math", math],
            "demo_search": ["experiment=demo_search", search],
        }
        return planned(tmp_path, {**DEMO, "experiments": experiments}, tmp_path)

    # a learning rate: the training and what it leads to; the tasks: all of the run
    assert edited("policies.solver.lr=2.0e-4", "data.train=40") == {
        "prepare_tasks_and_passages": 1,
        "build_index": 1,
        "probe_retriever": 1,
        "make_base_model": 1,
        "bootstrap": 1,
        "train": 2,
        "evaluate": 1 + 2,
        "plot_curves": 1,
        **TABLE_OF_ALL,
    }
    # answers to a task: the evaluations; where metrics go: nothing
    assert edited("evaluation.samples=2", "tracking.experiment=elsewhere") == {
        "evaluate": 2,
        **TABLE_OF_ALL,
    }


WAITING = """import time
while snakemake.wildcards.run == "demo_math" and not Path("go").exists():
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_suites_run_side_by_side_where_no_run_is_in_both(tmp_path: Path) -> None:
    stand_ins(tmp_path, prepare_tasks=STAND_IN + WAITING)
    math, search = (
        {"experiments": {run: DEMO["experiments"][run]}} for run in ("demo_math", "demo_search")
    )
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(snakemake, tmp_path, {"suite": "first", **math}, source=tmp_path)
        try:
            while (
                not (tmp_path / "results/demo_math/tasks/test.parquet").exists()
                and not first.done()
            ):
                time.sleep(0.1)
            other = snakemake(tmp_path, {"suite": "other", **search}, source=tmp_path)
            again = snakemake(tmp_path, {"suite": "again", **math}, source=tmp_path)
            assert not first.done()
        finally:
            (tmp_path / "go").touch()
    assert (first.result().returncode, other.returncode) == (0, 0), (
        first.result().stderr + other.stderr
    )
    assert "error: results/demo_math: in use by process" in again.stderr
    made = [
        path.relative_to(tmp_path / "results").as_posix()
        for path in (tmp_path / "results").glob("*s/*.html")
    ]
    pages = ("reports/{}.html", "tables/{}.html", "tables/{}.runs.html")
    assert sorted(made) == sorted(
        page.format(suite) for page in pages for suite in ("first", "other")
    )


FAILING = """from mcore_mas.runtime.joblog import logged
with logged(snakemake.log[0]):
    raise ValueError("no such luck")
"""


@pytest.mark.slow
def test_a_failed_job_is_one_line_also_where_snakemake_is_quiet(tmp_path: Path) -> None:
    stand_ins(tmp_path, prepare_tasks=FAILING)
    suite = {"suite": "first", "experiments": {"demo_math": DEMO["experiments"]["demo_math"]}}
    done = snakemake(tmp_path, suite, "--quiet", "rules", source=tmp_path)
    assert done.returncode == 1
    expected = (
        "\nerror: ValueError: no such luck\n  logs: results/demo_math/logs/prepare_tasks.log\n"
    )
    assert expected in done.stderr
