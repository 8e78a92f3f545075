"""Jobs that Snakemake plans, in dry runs of the real workflow with the real configs."""

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

# Script of a rule that only writes its outputs
WRITE_OUTPUTS = """from pathlib import Path
for path in snakemake.output:
    Path(path).write_text("made")
"""


def snakemake(
    folder: Path, suite: dict[str, object], *arguments: str, source: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run the workflow of the repository `source` on a suite in a folder, with the default profile."""
    file = folder / f"{suite['suite']}.yaml"
    file.write_text(yaml.safe_dump(suite))
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(source / "workflow" / "Snakefile"),
        "--configfile",
        str(file),
        *arguments,
    ]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


def planned_jobs(
    folder: Path, suite: dict[str, object], source: Path = ROOT, target: str = "all"
) -> dict[str, int]:
    """Return the number of jobs of each rule in a dry run of `target`."""
    completed = snakemake(folder, suite, "--dry-run", target, source=source)
    assert completed.returncode == 0, completed.stderr
    jobs = re.findall(r"^(\w+) +(\d+)$", completed.stdout + completed.stderr, re.MULTILINE)
    return {rule: int(count) for rule, count in jobs if rule not in ("all", "total")}


def test_the_demo_has_every_rule(tmp_path: Path) -> None:
    assert planned_jobs(tmp_path, DEMO) == {
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
    jobs = planned_jobs(tmp_path, suite, target="results/search/retriever.json")
    assert jobs == {
        "prepare_tasks_and_passages": 1,
        "encode_shard": 3,
        "build_index": 1,
        "probe_retriever": 1,
    }


def test_a_run_without_cold_start_starts_from_its_models(tmp_path: Path) -> None:
    suite = {**DEMO, "experiments": {"real": ["experiment=demo_math", "cold_start=null"]}}
    describe_model(tmp_path / "results/real/bootstrap/model")
    assert planned_jobs(tmp_path, suite) == {
        "prepare_tasks": 1,
        "train": 1,
        "evaluate": 2,
        "make_table": 1,
        "plot_curves": 1,
        "report": 1,
    }


def test_data_files_are_inputs_of_the_tasks(tmp_path: Path) -> None:
    overrides = [
        "cold_start=null",
        "data.generator=null",
        "+data.format=math",
        "trainer.tasks_per_step=5",
    ]
    splits = ("train", "validation", "test")
    overrides += [f"data.{split}=[{{path: {split}.jsonl, limit: 5}}]" for split in splits]
    suite = {**DEMO, "experiments": {"real": ["experiment=demo_math", *overrides]}}
    describe_model(tmp_path / "results/real/bootstrap/model")
    completed = snakemake(tmp_path, suite, "--dry-run")
    assert completed.returncode != 0
    output = completed.stdout + completed.stderr
    for split in splits:
        assert f"data: {split}.jsonl does not exist" in output

    for split in splits:
        rows = ({"question": f"{split} {n}?", "answer": n} for n in range(5))
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert planned_jobs(tmp_path, suite)["prepare_tasks"] == 1


def test_a_typo_is_reported_in_one_line_before_any_job(tmp_path: Path) -> None:
    typo = ["experiment=demo_math", "trainer.stepz=3"]
    suite = {**DEMO, "experiments": {"demo_math": typo}}
    completed = snakemake(tmp_path, suite, "--dry-run")
    assert completed.returncode != 0
    lines = [
        line
        for line in completed.stderr.splitlines()
        if not line.startswith("Using workflow specific profile")
    ]
    assert lines == [
        "error: run 'demo_math': trainer.stepz: unknown key; nearest: steps "
        "(experiment=demo_math trainer.stepz=3)"
    ]
    assert not (tmp_path / "results").exists()


def copy_workflow(folder: Path, **scripts: str) -> None:
    """Copy the workflow to a folder, with rules that only write their outputs.

    Args:
        scripts: other scripts of some rules.
    """
    shutil.copytree(ROOT / "workflow", folder / "workflow")
    for script in (folder / "workflow/scripts").glob("*.py"):
        script.write_text(scripts.get(script.stem, WRITE_OUTPUTS))


TABLE_AND_REPORT = {"make_table": 1, "report": 1}


@pytest.mark.slow
def test_an_edit_repeats_the_stages_that_depend_on_the_edited_keys(tmp_path: Path) -> None:
    copy_workflow(tmp_path)
    completed = snakemake(tmp_path, DEMO, source=tmp_path)
    assert completed.returncode == 0, completed.stderr
    message = "Done.   Report: results/reports/demo.html   Table: results/tables/demo.md"
    assert message in completed.stdout
    config = yaml.safe_load((tmp_path / "results/demo_search/config.yaml").read_text())
    assert config["run"] == "demo_search"
    assert config["trainer"]["steps"] == 60
    assert planned_jobs(tmp_path, DEMO, tmp_path) == {}

    def jobs_after_edit(math: str, search: str) -> dict[str, int]:
        """Return the planned jobs if each run has one more setting."""
        experiments = {
            "demo_math": ["experiment=demo_math", math],
            "demo_search": ["experiment=demo_search", search],
        }
        return planned_jobs(tmp_path, {**DEMO, "experiments": experiments}, tmp_path)

    # A learning rate repeats the training and the stages after it. The number of tasks repeats all
    # stages of the run.
    assert jobs_after_edit("policies.solver.lr=2.0e-4", "data.train=40") == {
        "prepare_tasks_and_passages": 1,
        "build_index": 1,
        "probe_retriever": 1,
        "make_base_model": 1,
        "bootstrap": 1,
        "train": 2,
        "evaluate": 1 + 2,
        "plot_curves": 1,
        **TABLE_AND_REPORT,
    }
    # The number of samples repeats the evaluations. The tracked experiment repeats nothing.
    assert jobs_after_edit("evaluation.samples=2", "tracking.experiment=elsewhere") == {
        "evaluate": 2,
        **TABLE_AND_REPORT,
    }


# Script of a training that fails while the file `refuse` exists
REFUSE = """if Path("refuse").exists():
    raise ValueError("refused")
"""


@pytest.mark.slow
def test_a_failed_retraining_is_repeated_by_the_next_call(tmp_path: Path) -> None:
    header, _, body = WRITE_OUTPUTS.partition("\n")
    script = f"{header}\n{REFUSE}{body}"
    copy_workflow(tmp_path, train=script, evaluate=script)
    run = ["experiment=demo_math"]
    suite: dict[str, object] = {**DEMO, "experiments": {"demo_math": run}}
    assert snakemake(tmp_path, suite, source=tmp_path).returncode == 0

    (tmp_path / "refuse").touch()
    suite["experiments"] = {"demo_math": [*run, "advantage=grpo"]}
    assert snakemake(tmp_path, suite, source=tmp_path).returncode == 1
    done_file = tmp_path / "results/demo_math/train/done.json"
    assert not done_file.exists()
    retraining = {"train": 1, "evaluate": 1, "plot_curves": 1, **TABLE_AND_REPORT}
    assert planned_jobs(tmp_path, suite, tmp_path) == retraining
    (tmp_path / "refuse").unlink()
    assert snakemake(tmp_path, suite, source=tmp_path).returncode == 0
    assert done_file.exists()

    # A failed evaluation is repeated in the same way.
    (tmp_path / "refuse").touch()
    suite["experiments"] = {"demo_math": [*run, "advantage=grpo", "evaluation.samples=2"]}
    assert snakemake(tmp_path, suite, source=tmp_path).returncode == 1
    assert planned_jobs(tmp_path, suite, tmp_path) == {"evaluate": 2, **TABLE_AND_REPORT}


# Script of a rule that waits in the run demo_math until the file `go` exists
WAIT_FOR_GO = """import time
while snakemake.wildcards.run == "demo_math" and not Path("go").exists():
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_suites_without_common_runs_run_side_by_side(tmp_path: Path) -> None:
    copy_workflow(tmp_path, prepare_tasks=WRITE_OUTPUTS + WAIT_FOR_GO)
    math = {"demo_math": DEMO["experiments"]["demo_math"]}
    search = {"demo_search": DEMO["experiments"]["demo_search"]}
    tasks = tmp_path / "results/demo_math/tasks/test.parquet"
    with ThreadPoolExecutor(1) as pool:
        suite = {"suite": "first", "experiments": math}
        running = pool.submit(snakemake, tmp_path, suite, source=tmp_path)
        try:
            while not tasks.exists() and not running.done():
                time.sleep(0.1)
            suite = {"suite": "other", "experiments": search}
            other = snakemake(tmp_path, suite, source=tmp_path)
            suite = {"suite": "again", "experiments": math}
            again = snakemake(tmp_path, suite, source=tmp_path)
            assert not running.done()
        finally:
            (tmp_path / "go").touch()
    first = running.result()
    assert first.returncode == 0, first.stderr
    assert other.returncode == 0, other.stderr
    assert "error: results/demo_math: in use by process" in again.stderr
    results = tmp_path / "results"
    pages = [path.relative_to(results).as_posix() for path in results.glob("*s/*.html")]
    assert sorted(pages) == [
        "reports/first.html",
        "reports/other.html",
        "tables/first.html",
        "tables/first.runs.html",
        "tables/other.html",
        "tables/other.runs.html",
    ]


# Script of a rule that fails
FAIL = """from mcore_mas.runtime.joblog import logged
with logged(snakemake.log[0]):
    raise ValueError("no such luck")
"""


@pytest.mark.slow
def test_the_error_of_a_failed_job_is_printed_even_with_quiet(tmp_path: Path) -> None:
    copy_workflow(tmp_path, prepare_tasks=FAIL)
    suite = {"suite": "first", "experiments": {"demo_math": DEMO["experiments"]["demo_math"]}}
    completed = snakemake(tmp_path, suite, "--quiet", "rules", source=tmp_path)
    assert completed.returncode == 1
    # The message comes after Snakemake's own last line.
    assert completed.stderr.splitlines()[-4:] == [
        "",
        "error: ValueError: no such luck",
        "  logs: results/demo_math/logs/prepare_tasks.log",
        "When the cause is mended, the same command continues from what is saved.",
    ]
