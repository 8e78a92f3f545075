"""The Slurm profile in dry runs of Snakemake: the resources that each job requests, and requests that are refused."""

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
# Snakemake prints the resources of a job only if its rule has no message. The last line prints the
# environment variables that sbatch would read.
SNAKEFILE = f"""
include: {str(ROOT / "Snakefile")!r}
for stage in workflow.rules:
    stage.message = None
import os, sys
print("sbatch", sorted(item for item in os.environ.items() if "SBATCH" in item[0]))
"""


def dry_run(
    folder: Path, runs: dict[str, list[str]], *arguments: str, snakefile: str = SNAKEFILE
) -> subprocess.CompletedProcess[str]:
    """Run `snakemake --workflow-profile slurm -n` on a suite.

    Args:
        runs: settings of demo_math by run.
        arguments: further arguments of Snakemake.
    """
    experiments = {run: ["experiment=demo_math", *settings] for run, settings in runs.items()}
    suite = {"suite": "all", "experiments": experiments}
    (folder / "suite.yaml").write_text(yaml.safe_dump(suite))
    (folder / "Snakefile").write_text(snakefile)
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--dry-run",
        "all",
        *arguments,
        "--configfile",
        "suite.yaml",
        "--workflow-profile",
        str(ROOT / "workflow/profiles/slurm"),
    ]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module")
def gpu_settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the settings of a team on GPUs: three ranks of two policies, and an SGLang server of each."""
    model = describe_model(tmp_path_factory.mktemp("models") / "model")
    return [
        f"policies.solver.model={model}",
        f"policies.verifier.model={model}",
        "cold_start=null",
        "cluster.device=auto",
        "engine=sglang",
        f"engine.python={sys.executable}",
        "engine.max_length=256",
    ]


def requested_resources(output: str) -> dict[str, dict[str, str]]:
    """Return the resources of each job of a dry run, by rule, run and state."""
    jobs = {}
    for block in re.split(r"^ *(?:local)?rule ", output, flags=re.MULTILINE)[1:]:
        name = [block.partition(":")[0], *re.findall(r"\b(?:run|state)=(\w+)", block)]
        (resources,) = re.findall(r"^ *resources: (.*)", block, re.MULTILINE)
        jobs[" ".join(name)] = dict(item.split("=", 1) for item in resources.split(", "))
    return jobs


def test_each_job_requests_the_resources_of_its_plan(
    tmp_path: Path, gpu_settings: list[str]
) -> None:
    store = "cluster.object_store_mb=1000"
    runs = {
        "cpus": [store],
        "gpus": [*gpu_settings, store],
        "wide": [*gpu_settings, store, "policies.verifier.dp=8"],
    }
    completed = dry_run(tmp_path, runs)
    assert completed.returncode == 0, completed.stdout[-3000:]
    jobs = requested_resources(completed.stdout)

    # The solver has 2 ranks, the verifier 1 (8 in `wide`), and each policy has an engine. Each rank,
    # each engine and the driver need a CPU. On GPUs a job needs one more, and one for each GPU.
    names = ("nodes", "tasks", "gres", "cpus_per_task", "runtime")
    requests = {
        job: tuple(resources.get(name) for name in names)
        for job, resources in jobs.items()
        if "cpus_per_task" in resources
    }
    assert requests == {
        "bootstrap cpus": ("1", "1", None, "3", "120"),
        "train cpus": ("1", "1", None, "6", "1440"),
        "train gpus": ("1", "1", "gpu:5", "12", "1440"),
        "train wide": ("2", "2", "gpu:8", "20", "1440"),  # 12 GPUs are two whole nodes
        "evaluate cpus base": ("1", "1", None, "3", "240"),
        "evaluate cpus trained": ("1", "1", None, "3", "240"),
        "evaluate gpus base": ("1", "1", "gpu:4", "10", "240"),  # 2 servers of each policy
        "evaluate gpus trained": ("1", "1", "gpu:4", "10", "240"),
        "evaluate wide base": ("2", "2", "gpu:8", "26", "240"),  # 8 servers of each policy
        "evaluate wide trained": ("2", "2", "gpu:8", "26", "240"),
    }

    memory_mb = {job: int(resources["mem_mb"]) for job, resources in jobs.items()}
    assert memory_mb["bootstrap cpus"] == 700 + 2 * 600
    assert memory_mb["train cpus"] == 700 + 5 * 600 + 1000
    assert memory_mb["evaluate cpus base"] == 700 + 2 * 600
    assert memory_mb["evaluate gpus base"] == 16_000 + 4 * 6_000
    # The weights that trainers send to engines need up to 100 MB more.
    train_gpus_mb = 16_000 + 5 * 6_000 + 1000
    assert train_gpus_mb < memory_mb["train gpus"] < train_gpus_mb + 100
    train_wide_mb = (16_000 + 12 * 6_000 + 1000) // 2
    assert train_wide_mb < memory_mb["train wide"] < train_wide_mb + 100
    assert memory_mb["make_base_model cpus"] == 2000
    assert jobs["make_base_model cpus"]["runtime"] == "30"


@pytest.mark.slow
def test_a_dry_run_shows_the_requests_of_each_job_also_for_a_retry(tmp_path: Path) -> None:
    completed = dry_run(
        tmp_path,
        {"one": ["cluster.object_store_mb=1000"]},
        "--attempt",
        "2",
        "--default-resources",
        "node_gpus=8",
        "node_mem_mb=5000",
        "mem_mb=1",
        "runtime=1",
        snakefile=f"include: {str(ROOT / 'Snakefile')!r}\n",
    )
    assert completed.returncode == 0, completed.stdout[-3000:]
    lines = completed.stdout.splitlines()
    train = next(n for n, line in enumerate(lines) if "one: reinforcement learning of" in line)
    # The plan is 4.7 GB. The second attempt would request twice as much, but a node has only 5 GB.
    request = "Asks for 1 machine with 6 CPUs and 5.0 GB of memory, for 24 h"
    assert request in lines[train + 1]
    report = next(n for n, line in enumerate(lines) if ": make the table" in line)
    assert "Asks for" not in lines[report + 1]


@pytest.mark.slow
def test_resources_of_the_command_line_do_not_replace_the_signal_to_save(tmp_path: Path) -> None:
    completed = dry_run(
        tmp_path,
        {"one": []},
        "--set-resources",
        "train:runtime=600",
        "train:constraint=h100",
        "--default-resources",
        "node_gpus=4",
        "slurm_partition=main",
    )
    assert completed.returncode == 0, completed.stdout[-3000:]
    train = requested_resources(completed.stdout)["train one"]
    assert train["runtime"] == "600"
    assert train["constraint"] == "h100"
    assert train["slurm_partition"] == "main"
    variables = "sbatch [('SBATCH_OPEN_MODE', 'append'), ('SBATCH_SIGNAL', 'URG@300')]"
    assert variables in completed.stdout.splitlines()


@pytest.mark.slow
def test_an_evaluation_that_needs_more_gpus_than_a_node_has_is_refused(
    tmp_path: Path, gpu_settings: list[str]
) -> None:
    runs = {"big": [*gpu_settings, "policies.solver.overrides.engine.tp=2"]}
    message = (
        "error: run 'big': an evaluation needs 2 GPUs of one machine for a server of solver (engine.tp 2), and "
        "node_gpus is 1; lower engine.tp, name servers elsewhere (engine.urls), or raise node_gpus where machines "
        "have more"
    )
    completed = dry_run(tmp_path, runs, "--default-resources", "node_gpus=1", "mem_mb=1")
    assert completed.returncode == 1
    assert message in (completed.stdout + completed.stderr).splitlines()

    # On a node with two GPUs the servers of both policies share them.
    completed = dry_run(tmp_path, runs, "--default-resources", "node_gpus=2", "mem_mb=1")
    assert completed.returncode == 0


# Commands of a fake Slurm that runs each job at once, on this machine. A job's number is the process
# number of its sbatch.
FAKE_SLURM = {
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
def test_short_stages_of_a_run_are_one_job_and_stop_no_other_run(tmp_path: Path) -> None:
    """Run `bad` fails, Slurm refuses the jobs of run `refused`, and run `good` succeeds."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, script in FAKE_SLURM.items():
        (commands / name).write_text(f"#!/bin/bash\n{script}\n")
        (commands / name).chmod(0o755)
    (tmp_path / "Snakefile").write_text(SHORT_STAGES)
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--workflow-profile",
        str(ROOT / "workflow/profiles/slurm"),
        "--retries",
        "0",
        "--latency-wait",
        "1",
        "--slurm-init-seconds-before-status-checks",
        "1",
    ]
    jobs_file = tmp_path / "jobs"
    environment = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "JOBS": str(jobs_file),
    }
    completed = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert completed.returncode == 1
    states = [line.partition("|")[2] for line in jobs_file.read_text().splitlines()]
    assert sorted(states) == ["COMPLETED", "FAILED"], completed.stderr[-3000:]
    assert [path.parent.name for path in tmp_path.glob("*/model")] == ["good"]
    assert "SLURM status is: 'FAILED'" in completed.stderr
    refusal = "The given account other appears to be invalid. Available accounts:\nlab"
    assert refusal in completed.stderr
