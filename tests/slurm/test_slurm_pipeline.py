"""The pipeline on a real Slurm with a database: resources, groups, failures, time limits, a paper's table."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.slurm.cluster import GPUS, NoSlurm, Slurm, wait_until
from tests.support.run_folder import make_run
from tests.workflow.test_training import SETTINGS, assert_same, finished_steps, start

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
TINY = ["data.train=12", "data.validation=2", "data.test=2", "trainer.tasks_per_step=2", "trainer.group_size=2"]
TINY += ["trainer.steps=2", "trainer.validate_every=100", "evaluation.samples=1", "cold_start=null"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Slurm]:
    if not pytestconfig.getoption("--slurm"):
        pytest.skip("takes minutes; `make test-slurm` runs it")
    try:
        with Slurm(folder=tmp_path_factory.mktemp("slurmdbd"), accounting=True) as slurm:
            yield slurm
    except NoSlurm as error:
        pytest.skip(str(error))


def snakemake(slurm: Slurm, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The pipeline from a folder of its own, asking Slurm's database every few seconds."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--workflow-profile", "slurm"]
    command += ["--slurm-status-command", "sacct", "--slurm-init-seconds-before-status-checks", "2"]
    env = slurm.env | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [*command, "--latency-wait", "5", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=3000
    )


def driver_of(run: Path) -> psutil.Process:
    """The training's own process."""
    config = str(run / "config.yaml")
    return next(
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"].startswith("python") and config in (process.info["cmdline"] or ())
    )


def submitted(slurm: Slurm) -> list[dict[str, str]]:
    """What Slurm's database has of all jobs."""
    fields = ["JobID", "Comment", "State", "ReqCPUS", "ReqMem", "ReqTRES", "NNodes"]
    lines = slurm.run("sacct", "-X", "-P", "-n", f"--format={','.join(fields)}").splitlines()
    return [dict(zip(fields, line.split("|"), strict=True)) for line in lines]


def test_failing_runs_take_none_down_and_jobs_ask_for_what_their_plan_says(cluster: Slurm, tmp_path: Path) -> None:
    model = make_run(tmp_path, *SETTINGS) / "base"
    own = [*TINY, f"policies.solver.model={model}", f"policies.verifier.model={model}"]
    runs = {
        "good": [],
        "bad": [],  # finds a file where its checkpoints go
        "huge": ["cluster.threads_per_process=9"],  # 46 processors
        "gpus": ["engine=sglang", "engine.max_length=512", f"engine.python={sys.executable}"],  # five, without SGLang
    }
    suite = {"suite": "four", "experiments": {run: ["experiment=demo_math", *own, *more] for run, more in runs.items()}}
    (tmp_path / "four.yaml").write_text(yaml.safe_dump(suite))
    blocked = tmp_path / "results/bad/train/checkpoints"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("no folder")

    made = {f"results/{run}/evaluation/base.json": True for run in ("good", "bad")}
    made |= {"results/good/evaluation/trained.json": True}
    made |= {f"results/{run}/train/done.json": False for run in ("bad", "huge", "gpus")}
    machines = ["--default-resources", f"node_gpus={GPUS}", "mem_mb=4000"]
    done = snakemake(cluster, tmp_path, *made, "--configfile", "four.yaml", *machines)
    assert {path: (tmp_path / path).is_file() for path in made} == made, done.stderr[-5000:]
    assert done.returncode == 1
    reasons = {line for line in done.stderr.splitlines() if line.startswith("error: ")}
    assert len(reasons) == 3, reasons
    refused = "error: Slurm does not take the job: sbatch: error: Batch job submission failed: "
    assert f"{refused}More processors requested than permitted" in reasons
    assert any("bad/train/checkpoints" in reason for reason in reasons)

    jobs = submitted(cluster)
    asked = {(job["Comment"].rpartition("_")[2], job["ReqTRES"]) for job in jobs if "rule_train" in job["Comment"]}
    once, again = "billing=6,cpu=6,mem=3956M,node=1", "billing=6,cpu=6,mem=7912M,node=1"
    assert {("good", once), ("bad", once), ("bad", again)} <= asked, asked  # once more, with twice the memory
    assert any(run == "gpus" and "gres/gpu=8" in what and "node=2" in what for run, what in asked), asked
    assert [job["State"] for job in jobs if "small" in job["Comment"]] == ["COMPLETED"]


def test_a_training_whose_time_is_up_is_queued_again_and_comes_to_the_same_bits(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "unbroken").mkdir()
    (tmp_path / "limited").mkdir()
    unbroken, run = make_run(tmp_path / "unbroken", *SETTINGS), make_run(tmp_path / "limited", *SETTINGS)
    assert start(unbroken).wait() == 0
    job = cluster.train(run, "--time=60", "--signal=URG@600")
    wait_until(lambda: 1 in finished_steps(run), 300)
    driver = driver_of(run)
    driver.suspend()  # Slurm looks at limits every 30 s, and this training would be done
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    time.sleep(45)
    with suppress(psutil.NoSuchProcess):  # Slurm wakes it before it sends the signal
        driver.resume()
    wait_until(lambda: cluster.job(job)["Restarts"] == "1" and cluster.job(job)["JobState"] == "PENDING", 300)
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60", "StartTime=now")
    assert cluster.ended(job) == "COMPLETED", cluster.logs()
    assert "stopped by a signal after step" in (run / "logs" / "train.log").read_text()
    assert_same(run, unbroken)


def test_a_job_of_two_machines_trains_over_both_to_the_same_bits(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "unbroken").mkdir()
    (tmp_path / "over_two").mkdir()
    unbroken, run = make_run(tmp_path / "unbroken", *SETTINGS), make_run(tmp_path / "over_two", *SETTINGS)
    assert start(unbroken).wait() == 0
    job = cluster.train(run, "--gres=gpu:1", nodes=2)
    assert cluster.ended(job) == "COMPLETED", (run / "logs" / "train.log").read_text()[-3000:]
    assert cluster.job(job)["NodeList"] == "n[0-1]"
    assert json.loads((run / "train" / "done.json").read_text())["devices"]["count"] == 8  # four of each machine
    assert_same(run, unbroken)


def test_a_papers_table_is_made_by_jobs(cluster: Slurm, tmp_path: Path) -> None:
    before = {job["JobID"] for job in submitted(cluster)}
    done = snakemake(cluster, tmp_path, "table_marti_ttrl", "--config", "scale=tiny")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    table = (tmp_path / "results/tiny/tables/marti_ttrl.md").read_text()
    assert "|" in table
    jobs = [job for job in submitted(cluster) if job["JobID"] not in before]
    assert jobs
    assert {job["State"] for job in jobs} == {"COMPLETED"}
    print(table, *jobs, sep="\n")
