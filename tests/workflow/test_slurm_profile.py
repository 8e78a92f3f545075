"""The profile for Slurm, read by Snakemake in dry runs: what each job would ask for, and what is refused before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.run_folder import describe_model

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).resolve().parents[2]
# Snakemake shows what a job asks for where its rule has no message
WITHOUT_MESSAGES = (
    f"include: {str(ROOT / 'Snakefile')!r}\nfor own in workflow.rules:\n    own.message = None\n"
)
# and what sbatch would read
WITHOUT_MESSAGES += (
    "import os, sys\nprint('sbatch', sorted(v for v in os.environ.items() if 'SBATCH' in v[0]))\n"
)


def dry_run(
    folder: Path, runs: dict[str, list[str]], *words: str, snakefile: str = WITHOUT_MESSAGES
) -> subprocess.CompletedProcess[str]:
    """What `snakemake --workflow-profile slurm -n` says of a suite of these runs."""
    suite = {
        "suite": "all",
        "experiments": {run: ["experiment=demo_math", *own] for run, own in runs.items()},
    }
    (folder / "suite.yaml").write_text(yaml.safe_dump(suite))
    (folder / "Snakefile").write_text(snakefile)
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--dry-run",
        "all",
        *words,
        "--configfile",
        "suite.yaml",
    ]
    command += ["--workflow-profile", str(ROOT / "workflow/profiles/slurm")]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a team of two policies with servers of SGLang's: two ranks and one, and a server each."""
    model = describe_model(tmp_path_factory.mktemp("models") / "model")
    models = [f"policies.{policy}.model={model}" for policy in ("solver", "verifier")]
    models += ["cold_start=null", "cluster.device=auto"]
    return [*models, "engine=sglang", f"engine.python={sys.executable}", "engine.max_length=256"]


def asked(said: str) -> dict[str, dict[str, str]]:
    """What each job asks for, by rule, run and state."""
    jobs = {}
    for block in re.split(r"^ *(?:local)?rule ", said, flags=re.MULTILINE)[1:]:
        name = [block.partition(":")[0], *re.findall(r"\b(?:run|state)=(\w+)", block)]
        [listed] = re.findall(r"^ *resources: (.*)", block, re.MULTILINE)
        jobs[" ".join(name)] = dict(item.split("=", 1) for item in listed.split(", "))
    return jobs


def test_each_job_would_ask_for_what_its_plan_says(tmp_path: Path, on_gpus: list[str]) -> None:
    store = "cluster.object_store_mb=1000"
    runs = {
        "cpus": [store],
        "gpus": [*on_gpus, store],
        "wide": [*on_gpus, store, "policies.verifier.dp=8"],
    }
    done = dry_run(tmp_path, runs)
    assert done.returncode == 0, done.stdout[-3000:]
    jobs = asked(done.stdout)
    names = ("nodes", "tasks", "gres", "cpus_per_task", "runtime")
    shown = {
        job: tuple(own.get(name) for name in names)
        for job, own in jobs.items()
        if "cpus_per_task" in own
    }
    # ranks: 2 of the solver, 1 of the verifier, in `wide` 8; one engine each. Processors: one for each of these and one
    # for the driver, on GPUs one more and one for each GPU of the job
    assert shown == {
        "bootstrap cpus": ("1", "1", None, "5", "120"),
        "train cpus": ("1", "1", None, "6", "1440"),
        "train gpus": ("1", "1", "gpu:5", "12", "1440"),
        "train wide": ("2", "2", "gpu:8", "20", "1440"),  # 12 GPUs are two whole machines
        **{f"evaluate cpus {state}": ("1", "1", None, "3", "240") for state in ("base", "trained")},
        **{
            f"evaluate gpus {state}": ("1", "1", "gpu:4", "10", "240")
            for state in ("base", "trained")
        },  # 2 x 2 servers
        **{
            f"evaluate wide {state}": ("1", "1", "gpu:8", "18", "240")
            for state in ("base", "trained")
        },  # 4 x 2
    }
    memory = {job: int(own["mem_mb"]) for job, own in jobs.items()}
    assert memory["bootstrap cpus"] == 700 + 4 * 600
    assert memory["train cpus"] == 700 + 5 * 600 + 1000
    assert memory["evaluate cpus base"] == 700 + 2 * 600
    assert memory["evaluate gpus base"] == 16_000 + 4 * 6_000
    for job, least in (
        ("train gpus", 16_000 + 5 * 6_000 + 1000),
        ("train wide", (16_000 + 12 * 6_000 + 1000) // 2),
    ):
        assert least < memory[job] < least + 100  # with the weights of a small model on their way
    assert (memory["make_base_model cpus"], jobs["make_base_model cpus"]["runtime"]) == (2000, "30")


@pytest.mark.slow
def test_a_dry_run_shows_what_each_job_asks_for_also_at_a_retry(tmp_path: Path) -> None:
    limits = ["node_gpus=8", "node_mem_mb=5000", "mem_mb=1", "runtime=1"]
    done = dry_run(
        tmp_path,
        {"one": ["cluster.object_store_mb=1000"]},
        *("--attempt", "2", "--default-resources", *limits),
        snakefile=f"include: {str(ROOT / 'Snakefile')!r}\n",
    )
    assert done.returncode == 0, done.stdout[-3000:]
    lines = done.stdout.splitlines()
    train = next(n for n, line in enumerate(lines) if "one: reinforcement learning of" in line)
    # 4.7 GB are planned, and twice as much is more than a machine has
    assert lines[train + 1].endswith(
        "Asks for 1 machine with 6 CPUs and 5.0 GB of memory, for 24 h"
    )
    report = next(n for n, line in enumerate(lines) if ": make the table" in line)
    assert "Asks for" not in lines[report + 1]


@pytest.mark.slow
def test_jobs_are_told_to_save_whatever_resources_a_command_line_sets(tmp_path: Path) -> None:
    words = ["--set-resources", "train:runtime=600", "train:constraint=h100"]
    done = dry_run(
        tmp_path, {"one": []}, *words, "--default-resources", "node_gpus=4", "slurm_partition=main"
    )
    assert done.returncode == 0, done.stdout[-3000:]
    train = asked(done.stdout)["train one"]
    assert [train[name] for name in ("runtime", "constraint", "slurm_partition")] == [
        "600",
        "h100",
        "main",
    ]
    assert (
        "sbatch [('SBATCH_OPEN_MODE', 'append'), ('SBATCH_SIGNAL', 'URG@300')]"
        in done.stdout.splitlines()
    )


@pytest.mark.slow
def test_an_evaluation_that_no_machine_has_the_gpus_for_is_refused_before_anything(
    tmp_path: Path, on_gpus: list[str]
) -> None:
    runs = {"big": [*on_gpus, "policies.solver.own.engine.tp=2"]}
    line = (
        "error: run 'big': an evaluation needs 2 GPUs of one machine for a server of solver (engine.tp 2), and "
        "node_gpus is 1; lower engine.tp, name servers elsewhere (engine.urls), or raise node_gpus where machines "
        "have more"
    )
    done = dry_run(tmp_path, runs, "--default-resources", "node_gpus=1", "mem_mb=1")
    assert done.returncode == 1
    assert line in (done.stdout + done.stderr).splitlines()
    assert (
        dry_run(tmp_path, runs, "--default-resources", "node_gpus=2", "mem_mb=1").returncode == 0
    )  # it shares


# Commands of a Slurm that runs each job at once, here; a job's number is that of sbatch's process
STAND_INS = {
    "sbatch": """for word; do case $word in --wrap=*) wrap=${word#*=};; esac; done
bash -c "$wrap" > "$JOBS.$$" 2>&1 && state=COMPLETED || state=FAILED
echo "$$|$state" >> "$JOBS"; echo $$""",
    "squeue": 'cat "$JOBS"',
    "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
    "scontrol": "echo MinJobAge = 300 sec",
    "sinfo": "",
    "sacct": "",
    "sacctmgr": "echo lab",
}
SHORT_STAGES = """
from mcore_mas.runtime.snakemake_patches import report_silent_failures
report_silent_failures()
rule all:
    input: expand("{run}/model", run=["bad", "good", "refused"])
    localrule: True
rule prepare_tasks:
    output: "{run}/tasks"
    resources: slurm_account=lambda wildcards: "other" if wildcards.run == "refused" else "lab"
    shell: "[ {wildcards.run} = good ] && touch {output}"
rule make_base_model:
    input: "{run}/tasks"
    output: "{run}/model"
    shell: "touch {output}"
"""


@pytest.mark.slow
def test_short_stages_of_a_run_are_one_job_which_takes_no_other_runs_down(tmp_path: Path) -> None:
    for name, script in STAND_INS.items():
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/bash\n{script}\n")
        command.chmod(0o755)
    (tmp_path / "Snakefile").write_text(SHORT_STAGES)
    words = [
        "--workflow-profile",
        str(ROOT / "workflow/profiles/slurm"),
        "--retries",
        "0",
        "--latency-wait",
        "1",
    ]
    words += ["--slurm-init-seconds-before-status-checks", "1"]
    env = {
        **os.environ,
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "JOBS": str(tmp_path / "jobs"),
    }
    command = [sys.executable, "-m", "snakemake", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 1
    states = [line.partition("|")[2] for line in (tmp_path / "jobs").read_text().splitlines()]
    assert sorted(states) == ["COMPLETED", "FAILED"], done.stderr[-3000:]
    assert [path.parent.name for path in tmp_path.glob("*/model")] == ["good"]
    for why in (
        "SLURM status is: 'FAILED'",
        "The given account other appears to be invalid. Available accounts:\nlab",
    ):
        assert why in done.stderr
