"""The pipeline on a real Slurm with a database: resources, groups, failures, time limits, a paper's table."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from rollout.records.files import read_trajectories
from tests.slurm.cluster import GPUS, Slurm, wait_until
from tests.support.run_folder import make_run
from tests.workflow.test_training import COMMON, assert_same, finished_steps, start

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
SETTINGS = [*COMMON, "trainer.steps=8"]  # two policies, each on two ranks
# docs/cluster.md's block of commands, a line each without its comment
[BLOCK] = re.findall(
    r"```sh\n(snakemake .*?)```", (ROOT / "docs/cluster.md").read_text(), re.DOTALL
)
[PLAN, SUITE, TABLE, QUEUE, FOLLOW, SAVE, END] = [
    line.partition(" #")[0].strip() for line in BLOCK.splitlines()
]
URGENT = [
    "sbatch",
    "--parsable",
    "--qos=urgent",
    "--nodes=2",
    "--exclusive",
    "--output=/dev/null",
    "--wrap=true",
]
TINY = [
    "data.train=12",
    "data.validation=2",
    "data.test=2",
    "trainer.tasks_per_step=2",
    "trainer.group_size=2",
]
TINY += ["trainer.steps=2", "trainer.validate_every=100", "evaluation.samples=1", "cold_start=null"]


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Slurm]:
    if not pytestconfig.getoption("--slurm"):
        pytest.skip("takes minutes; `make test-slurm` runs it")
    with Slurm(folder=tmp_path_factory.mktemp("slurmdbd"), accounting=True) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained without Slurm, and without a stop."""
    run = make_run(tmp_path_factory.mktemp("unbroken"), *SETTINGS)
    assert start(run).wait() == 0
    return run


def snakemake(slurm: Slurm, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The pipeline from a folder of its own, asking Slurm every few seconds."""
    pipeline = begun(slurm, folder, *words)
    said = pipeline.communicate(timeout=3000)
    return subprocess.CompletedProcess(pipeline.args, pipeline.returncode, *said)


def begun(slurm: Slurm, folder: Path, *words: str, **own: str) -> subprocess.Popen[str]:
    """As `snakemake`, not waited for; with environment variables of its own."""
    command = ["env", "--default-signal=INT"]  # which a shell's jobs in the background ignore
    command += [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")]
    command += [
        "--workflow-profile",
        "slurm",
        "--slurm-status-command",
        "sacct" if slurm.accounting else "squeue",
    ]
    command += ["--slurm-init-seconds-before-status-checks", "2", "--latency-wait", "5", *words]
    env = slurm.env | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **own,
    }
    pipe = subprocess.PIPE
    pipeline = subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)
    slurm.ends(pipeline)
    return pipeline


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


def test_failing_runs_take_none_down_and_jobs_ask_for_what_their_plan_says(
    cluster: Slurm, tmp_path: Path
) -> None:
    model = make_run(tmp_path, *SETTINGS) / "base"
    own = [*TINY, f"policies.solver.model={model}", f"policies.verifier.model={model}"]
    runs = {
        "good": [],
        "bad": [],  # finds a file where its checkpoints go
        "huge": ["cluster.threads_per_process=9"],  # 46 processors
        # five, without SGLang
        "gpus": [
            "cluster.device=auto",
            "engine=sglang",
            "engine.max_length=512",
            f"engine.python={sys.executable}",
        ],
    }
    suite = {
        "suite": "four",
        "experiments": {run: ["experiment=demo_math", *own, *more] for run, more in runs.items()},
    }
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
    ended = "error: step 0: all 4 trajectories failed; the first: EngineError: SGLang: the server ended; results/gpus/"
    assert any(
        reason.startswith(ended) and "No module named 'sglang'" in reason for reason in reasons
    )

    jobs = submitted(cluster)
    asked = {
        (job["Comment"].rpartition("_")[2], job["ReqTRES"])
        for job in jobs
        if "rule_train" in job["Comment"]
    }
    once, again = "billing=6,cpu=6,mem=3956M,node=1", "billing=6,cpu=6,mem=7912M,node=1"
    assert {("good", once), ("bad", once), ("bad", again)} <= asked, (
        asked
    )  # once more, with twice the memory
    assert any(
        run == "gpus" and "gres/gpu=8" in what and "node=2" in what for run, what in asked
    ), asked
    assert {job["State"] for job in jobs if "small" in job["Comment"]} == {"COMPLETED"}


def test_a_training_whose_time_is_up_is_queued_again_and_comes_to_the_same_bits(
    cluster: Slurm, unbroken: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path, *SETTINGS)
    job = cluster.train(run, "--time=60", "--signal=URG@600")
    wait_until(lambda: 1 in finished_steps(run), 300)
    driver = driver_of(run)
    driver.suspend()  # Slurm looks at limits every 30 s, and this training would be done
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    time.sleep(45)
    with suppress(psutil.NoSuchProcess):  # Slurm wakes it before it sends the signal
        driver.resume()
    wait_until(
        lambda: cluster.job(job)["Restarts"] == "1" and cluster.job(job)["JobState"] == "PENDING",
        300,
    )
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60", "StartTime=now+5")
    assert cluster.ended(job) == "COMPLETED", cluster.logs()
    assert "stopped by SIGURG after step" in (run / "logs" / "train.log").read_text()
    assert_same(run, unbroken)


def test_a_job_of_two_machines_trains_over_both_to_the_same_bits(
    cluster: Slurm, unbroken: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path, *SETTINGS)
    job = cluster.train(run, "--gres=gpu:1", nodes=2)
    assert cluster.ended(job) == "COMPLETED", (run / "logs" / "train.log").read_text()[-3000:]
    assert cluster.job(job)["NodeList"] == "n[0-1]"
    assert (
        json.loads((run / "train" / "done.json").read_text())["devices"]["count"] == 8
    )  # four of each machine
    assert_same(run, unbroken)


def test_the_rule_trains_over_two_machines_and_is_queued_again_while_it_loads(
    cluster: Slurm, tmp_path: Path
) -> None:
    run, words = long_run(tmp_path, "trainer.steps=2")
    two = ["train:nodes=2", "train:tasks=2", "train:cpus_per_task=4"]
    pipeline = begun(
        cluster, tmp_path, *words, *two, HOME=str(tmp_path)
    )  # a home without Ray's token
    wait_until(
        lambda: (run / "train/ranks/solver-0.txt").is_file() or pipeline.poll() is not None, 300
    )
    assert pipeline.poll() is None, pipeline.communicate()
    queue = [line.split() for line in cluster.run("squeue", "-h", "-o", "%i %k").splitlines()]
    [job] = [number for number, comment in queue if "rule_train" in comment]
    cluster.run("scancel", "--signal=URG", job)
    wait_until(
        lambda: cluster.job(job)["Restarts"] == "1" and cluster.job(job)["JobState"] == "PENDING",
        120,
    )
    assert "stopped by SIGURG while it was loading" in (run / "logs/train.log").read_text()
    [log] = (tmp_path / f"logs/slurm/rule_train/{run.name}").glob("*.log")
    first = log.read_text()
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    _, said = pipeline.communicate(timeout=600)
    assert pipeline.returncode == 0, said
    devices = json.loads((run / "train/done.json").read_text())["devices"]
    assert (devices["kind"], devices["count"], devices["nodes"]) == ("CPU", 8, 2)
    assert (tmp_path / ".ray/auth_token").stat().st_mode & 0o777 == 0o600
    assert (
        log.read_text().startswith(first) and len(log.read_text()) > len(first) > 0
    )  # Slurm's own, appended to


def test_a_training_and_an_evaluation_that_a_qos_preempts_go_on(
    cluster: Slurm, unbroken: Path, tmp_path: Path
) -> None:
    (tmp_path / "trained").mkdir()
    run = make_run(tmp_path / "trained", *SETTINGS)
    job = cluster.train(run)
    wait_until(lambda: 0 in finished_steps(run), 300)
    driver_of(
        run
    ).suspend()  # until the evaluation has something to lose; Slurm wakes it before it sends a signal
    pipeline, scores, evaluation = evaluating(cluster, tmp_path / "evaluated", run / "base")
    urgent = cluster.run(*URGENT).strip()
    assert cluster.ended(urgent, 300) == "COMPLETED"
    first = shards(scores)
    assert not scores.is_file()
    for number in (job, evaluation):
        wait_until(lambda number=number: cluster.job(number)["Restarts"] == "1", 60)
        cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now+5")
    said = pipeline.communicate(timeout=900)
    assert pipeline.returncode == 0, said
    assert cluster.ended(job) == "COMPLETED", cluster.logs()
    assert_same(run, unbroken)

    assert [j["State"] for j in submitted(cluster) if "evaluate_wildcards_one" in j["Comment"]] == [
        "COMPLETED"
    ]
    assert_played_once(scores, first)


def test_a_cold_start_that_a_qos_preempts_goes_on_from_the_step_it_was_at(
    cluster: Slurm, tmp_path: Path
) -> None:
    sizes = {
        "base.layers": 1,
        "base.hidden": 32,
        "base.heads": 2,
        "base.kv_heads": 2,
        "base.ffn": 32,
        "batch": 2,
    }
    sizes |= {
        "max_steps": 1500,
        "check_every": 50,
        "check_tasks": 1,
        "first_check": 0,
        "stop_legal": 1,
    }
    own = [
        *TINY[:-1],
        "cold_start.stop_accuracy=1",
        *(f"cold_start.{name}={value}" for name, value in sizes.items()),
    ]
    suite = {"suite": "one", "experiments": {"one": ["experiment=demo_math", *own]}}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(suite))
    folder = tmp_path / "results/one/bootstrap"
    done = folder / "bootstrap.json"
    pipeline = begun(
        cluster,
        tmp_path,
        str(done.relative_to(tmp_path)),
        "--configfile",
        "one.yaml",
        "--retries",
        "0",
    )
    wait_until(
        lambda: list(folder.glob("checkpoints/*/step_*")) or pipeline.poll() is not None, 400
    )
    assert pipeline.poll() is None, pipeline.communicate()
    queue = [line.split() for line in cluster.run("squeue", "-h", "-o", "%i %k").splitlines()]
    [job] = [number for number, comment in queue if "bootstrap" in comment]
    urgent = cluster.run(*URGENT).strip()
    assert cluster.ended(urgent, 300) == "COMPLETED"
    [stopped] = re.findall(
        r"stopped by SIGTERM after step (\d+)",
        (tmp_path / "results/one/logs/bootstrap.log").read_text(),
    )
    wait_until(lambda: cluster.job(job)["Restarts"] == "1", 60)
    assert not done.is_file()
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    _, said = pipeline.communicate(timeout=900)
    assert pipeline.returncode == 0, said
    log = (tmp_path / "results/one/logs/bootstrap.log").read_text()
    assert re.search(rf"^continuing from .*/step_{int(stopped):06d}$", log, re.MULTILINE), log
    measured = json.loads(done.read_text())["history"]
    assert [row["step"] for row in measured] == list(
        range(50, 1501, 50)
    )  # each once, over both tries
    assert (
        json.loads((tmp_path / "results/one/logs/bootstrap.json").read_text())["tags"]["slurm_job"]
        == job
    )


def test_an_evaluation_whose_time_is_up_is_queued_again_and_goes_on_from_its_shards(
    cluster: Slurm, tmp_path: Path
) -> None:
    model = make_run(tmp_path, *SETTINGS) / "base"
    pipeline, scores, job = evaluating(cluster, tmp_path / "evaluated", model)
    [stage] = [
        process
        for process in psutil.process_iter(["cmdline", "cwd"])
        if process.info["cwd"] == str(tmp_path / "evaluated")
        and process.info["cmdline"]
        and process.info["cmdline"][-1].endswith("evaluate.py")
    ]
    stage.suspend()  # Slurm looks at limits every 30 s, and this evaluation would be done
    cluster.run(
        "scontrol", "update", f"JobId={job}", "TimeLimit=5"
    )  # the profile's signal comes 300 s before the end
    time.sleep(45)
    with suppress(psutil.NoSuchProcess):
        stage.resume()
    wait_until(
        lambda: cluster.job(job)["Restarts"] == "1" and cluster.job(job)["JobState"] == "PENDING",
        120,
    )
    first = shards(scores)
    assert first and not scores.is_file()
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60", "StartTime=now+5")
    said = pipeline.communicate(timeout=900)
    assert pipeline.returncode == 0, said
    assert_played_once(scores, first)


def evaluating(slurm: Slurm, folder: Path, model: Path) -> tuple[subprocess.Popen[str], Path, str]:
    """A pipeline whose evaluation has played some of its 600 trajectories, where its scores go, and its job."""
    folder.mkdir(exist_ok=True)
    own = [*TINY, "evaluation.samples=300", "engine.slots=8", f"policies.solver.model={model}"]
    suite = {
        "experiments": {"one": ["experiment=demo_math", *own, f"policies.verifier.model={model}"]}
    }
    (folder / "one.yaml").write_text(yaml.safe_dump({"suite": "one", **suite}))
    scores = folder / "results/one/evaluation/base.json"
    pipeline = begun(slurm, folder, str(scores.relative_to(folder)), "--configfile", "one.yaml")
    wait_until(lambda: bool(shards(scores)) or pipeline.poll() is not None, 300)
    assert pipeline.poll() is None, pipeline.communicate()
    queue = [line.split() for line in slurm.run("squeue", "-h", "-o", "%i %k").splitlines()]
    return pipeline, scores, next(number for number, comment in queue if "evaluate" in comment)


def shards(scores: Path) -> dict[Path, bytes]:
    """What an evaluation has written of its trajectories."""
    return {shard: shard.read_bytes() for shard in scores.with_suffix("").glob("*.parquet")}


def assert_played_once(scores: Path, first: dict[Path, bytes]) -> None:
    """Nothing that was written `first` was played again."""
    assert {shard: shard.read_bytes() for shard in first} == first
    played = [t.id for shard in shards(scores) for t in read_trajectories(shard)]
    assert (len(played), len(set(played))) == (600, 600)


def test_a_job_that_is_killed_for_memory_is_submitted_again_with_twice_as_much(
    pytestconfig: pytest.Config, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if not pytestconfig.getoption("--slurm"):
        pytest.skip("takes minutes; `make test-slurm` runs it")
    model = make_run(tmp_path, *SETTINGS) / "base"
    own = [*TINY, "policies.solver.tp=1", "trainer.steps=1", f"policies.solver.model={model}"]
    own += [
        f"policies.verifier.model={model}",
        "reward.name=tests.support.rewards:hungry",
        "~reward.penalties",
    ]
    suite = {"suite": "one", "experiments": {"hungry": ["experiment=demo_math", *own]}}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(suite))
    polling = ["JobAcctGatherType=jobacct_gather/linux", "JobAcctGatherFrequency=task=1"]
    polling += ["JobAcctGatherParams=OverMemoryKill,UsePss"]
    asked = ["--set-resources", "train:runtime=77", "--configfile", "one.yaml"]
    with Slurm(folder=tmp_path_factory.mktemp("killing"), nodes=1, settings=polling) as slurm:
        done = snakemake(slurm, tmp_path, "results/hungry/train/done.json", *asked)
        assert done.returncode == 0, done.stderr[-5000:]
        jobs = [
            slurm.job(number)
            for number in slurm.run("squeue", "-h", "-t", "all", "-o", "%i").split()
        ]
    _, killed, finished = sorted(jobs, key=lambda job: int(job["JobId"]))
    assert (killed["JobState"], finished["JobState"]) == (
        "FAILED",
        "COMPLETED",
    )  # control groups: OUT_OF_MEMORY
    log = tmp_path / f"logs/slurm/rule_train/hungry/{killed['JobId']}.log"
    assert "exceeded memory limit" in log.read_text()
    assert (killed["MinMemoryNode"], finished["MinMemoryNode"]) == ("3356M", "6712M")
    assert (killed["TimeLimit"], finished["TimeLimit"]) == ("01:17:00", "01:17:00")


def test_a_person_saves_a_training_by_scancel_and_then_ends_it(
    cluster: Slurm, tmp_path: Path
) -> None:
    run, words = long_run(tmp_path, "trainer.steps=500")
    planned = snakemake(cluster, tmp_path, *words_of(PLAN))
    assert (
        planned.returncode == 0
        and "demo_math: reinforcement learning of every policy" in planned.stdout
    ), planned.stderr
    assert not cluster.run("squeue", "-h").strip()
    pipeline = begun(cluster, tmp_path, *words)
    wait_until(lambda: 1 in finished_steps(run) or pipeline.poll() is not None, 300)
    assert pipeline.poll() is None, pipeline.communicate()
    listed = typed(cluster, tmp_path, QUEUE).splitlines()
    job, state, *_ = next(line for line in listed if "rule_train" in line).split()
    found = cluster.job(job)
    assert (state, found["MinMemoryNode"], found["TimeLimit"]) == ("RUNNING", "5000M", "10:00:00")

    assert "demo_math train: " in typed(cluster, tmp_path, f"timeout 2 {FOLLOW} || true")
    typed(cluster, tmp_path, SAVE, job)
    wait_until(
        lambda: cluster.job(job)["Restarts"] == "1" and cluster.job(job)["JobState"] == "PENDING",
        120,
    )
    first = saved_by("SIGURG", run)
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    wait_until(lambda: max(finished_steps(run)) > first, 300)

    typed(cluster, tmp_path, END, job)
    assert cluster.ended(job, 120) == "CANCELLED"
    _, said = pipeline.communicate(timeout=300)
    assert pipeline.returncode == 1
    [reason] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert reason.startswith(
        (f"error: Slurm job {job}: CANCELLED", "error: stopped by SIGTERM after step")
    )
    assert saved_by("SIGTERM", run) > first  # saved, and not queued again
    assert (run / "logs/train.log").read_text().count("started again") == 1
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("CANCELLED", "1")
    assert "rule_train" not in cluster.run("squeue", "-h", "-o", "%k")

    # without a database: a job that is cancelled before it has done anything
    pipeline = begun(cluster, tmp_path, *words, "--slurm-status-command", "squeue")
    wait_until(
        lambda: (
            "rule_train" in cluster.run("squeue", "-h", "-o", "%k") or pipeline.poll() is not None
        ),
        300,
    )
    job = cluster.run("squeue", "-h", "-o", "%i").split()[0]
    cluster.run("scancel", job)
    _, said = pipeline.communicate(timeout=300)
    [reason] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert pipeline.returncode == 1
    assert reason.startswith((f"error: Slurm job {job}: CANCELLED", "error: stopped by SIGTERM"))


def long_run(folder: Path, *more: str) -> tuple[Path, list[str]]:
    """The page's suite, of one run in `folder`: where the run will be, and the page's words that train it."""
    model = make_run(folder, *SETTINGS) / "base"
    own = [
        *TINY,
        *SETTINGS,
        f"policies.solver.model={model}",
        f"policies.verifier.model={model}",
        *more,
    ]
    suite = {"suite": "one", "experiments": {"demo_math": ["experiment=demo_math", *own]}}
    (folder / "my_suite.yaml").write_text(yaml.safe_dump(suite))
    words = ["results/demo_math/train/done.json", *words_of(SUITE), "--retries", "0"]
    return folder / "results/demo_math", [
        *words,
        "--set-resources",
        "train:mem_mb=5000",
        "train:runtime=600",
    ]


def words_of(command: str) -> list[str]:
    """What a command of the page gives Snakemake beyond its profile."""
    profile = "snakemake --workflow-profile slurm "
    assert command.startswith(profile)
    return shlex.split(command.removeprefix(profile))


def typed(slurm: Slurm, folder: Path, command: str, job: str = "") -> str:
    """What a command of the page prints, with the number of a job of ours."""
    command = re.sub(r"\b12\b", job, command)
    done = subprocess.run(
        ["bash", "-euc", command],
        cwd=folder,
        env=slurm.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


def saved_by(name: str, run: Path) -> int:
    """The step after which a signal stopped the training, which has its checkpoint."""
    log = (run / "logs/train.log").read_text()
    [step] = set(re.findall(rf"^(?:error: )?stopped by {name} after step (\d+)", log, re.MULTILINE))
    assert (run / f"train/checkpoints/step_{int(step):06d}/manifest.json").is_file()
    return int(step)


def test_ctrl_c_of_a_pipeline_cancels_its_jobs_and_the_same_command_goes_on(
    cluster: Slurm, tmp_path: Path
) -> None:
    run, words = long_run(tmp_path, "trainer.steps=6")
    pipeline = begun(cluster, tmp_path, *words)
    wait_until(lambda: 1 in finished_steps(run) or pipeline.poll() is not None, 300)
    assert pipeline.poll() is None, pipeline.communicate()
    pipeline.send_signal(signal.SIGINT)
    _, said = pipeline.communicate(timeout=300)
    assert pipeline.returncode == 1, said
    wait_until(lambda: not cluster.run("squeue", "-h").strip(), 120)
    first = saved_by("SIGTERM", run)
    trained = [
        job["State"]
        for job in submitted(cluster)
        if job["Comment"] == "rule_train_wildcards_demo_math"
    ]
    assert trained and trained[-1].startswith("CANCELLED")

    done = snakemake(cluster, tmp_path, *words)
    assert done.returncode == 0, done.stderr[-5000:]
    assert (
        finished_steps(run) == list(range(-1, 6)) and first < 6
    )  # the first validation, then steps
    assert (run / "logs/train.log").read_text().count("started again") == 1


def test_a_papers_table_is_made_by_jobs(cluster: Slurm, tmp_path: Path) -> None:
    before = {job["JobID"] for job in submitted(cluster)}
    planned = snakemake(cluster, tmp_path, *words_of(TABLE), "--dry-run")
    assert (planned.returncode, {job["JobID"] for job in submitted(cluster)}) == (0, before)
    done = snakemake(cluster, tmp_path, *words_of(TABLE))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    table = (tmp_path / "results/tiny/tables/marti_ttrl.md").read_text()
    assert "|" in table
    jobs = [job for job in submitted(cluster) if job["JobID"] not in before]
    assert jobs
    assert {job["State"] for job in jobs} == {"COMPLETED"}
    print(table, *jobs, sep="\n")


def test_the_pages_slurm_for_a_look_is_used_by_the_path_it_prints_and_leaves_nothing(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    if not pytestconfig.getoption("--slurm"):
        pytest.skip("takes minutes; `make test-slurm` runs it")
    [command] = re.findall(
        r"`(python -m tests\.slurm\.cluster FOLDER)`", (ROOT / "docs/cluster.md").read_text()
    )
    folder = tmp_path / "look"
    words = [str(folder) if word == "FOLDER" else word for word in command.split()[1:]]
    words = ["env", "--default-signal=INT", sys.executable, *words]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        path = process.stdout.readline()
        seen = subprocess.check_output(
            [
                "bash",
                "-euc",
                f"{path}sinfo --noheader --Node --partition main --format '%N %T %c %G'",
            ],
            text=True,
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    assert seen.splitlines() == [f"n{node} idle 12 gpu:fake:4" for node in (0, 1)]
    assert not folder.exists()
