"""The pipeline on a real Slurm with a database: resources, failures, time limits, preemption, a paper's table."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from rollout.base.failpoints import FAILPOINTS
from rollout.records.files import read_trajectories
from tests.slurm.cluster import GPUS, Slurm, wait_until
from tests.support.run_folder import make_run
from tests.workflow.test_training import COMMON, assert_same, finished_steps, start

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

# The commands of docs/cluster.md, without their comments
(COMMANDS,) = re.findall(
    r"```sh\n(snakemake .*?)```", (ROOT / "docs/cluster.md").read_text(), re.DOTALL
)
PLAN, SUITE, TABLE, QUEUE, FOLLOW, SAVE, END = [
    line.partition(" #")[0].strip() for line in COMMANDS.splitlines()
]

SETTINGS = [*COMMON, "trainer.steps=8"]  # two policies, each on two ranks
TINY = [
    "data.train=12",
    "data.validation=2",
    "data.test=2",
    "trainer.tasks_per_step=2",
    "trainer.group_size=2",
    "trainer.steps=2",
    "trainer.validate_every=100",
    "evaluation.samples=1",
]
TINY_WITHOUT_COLD_START = [*TINY, "cold_start=null"]

# A job that preempts all others
URGENT = [
    "sbatch",
    "--parsable",
    "--qos=urgent",
    "--nodes=2",
    "--exclusive",
    "--output=/dev/null",
    "--wrap=true",
]


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
    """Return a run that was trained without Slurm and without interruption."""
    run = make_run(tmp_path_factory.mktemp("unbroken"), *SETTINGS)
    assert start(run).wait() == 0
    return run


def start_snakemake(
    slurm: Slurm, folder: Path, *arguments: str, **environment: str
) -> subprocess.Popen[str]:
    """Start the pipeline in a folder, asking Slurm for its jobs every few seconds.

    Args:
        arguments: further arguments of Snakemake.
        environment: further environment variables.
    """
    command = [
        # A shell lets its jobs in the background ignore SIGINT.
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(ROOT / "Snakefile"),
        "--workflow-profile",
        "slurm",
        "--slurm-status-command",
        "sacct" if slurm.accounting else "squeue",
        "--slurm-init-seconds-before-status-checks",
        "2",
        "--latency-wait",
        "5",
        *arguments,
    ]
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    pipeline = subprocess.Popen(
        command,
        cwd=folder,
        env=slurm.env | {"PYTHONPATH": python_path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    slurm.kill_at_exit(pipeline)
    return pipeline


def run_snakemake(slurm: Slurm, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the pipeline in a folder until it ends."""
    pipeline = start_snakemake(slurm, folder, *arguments)
    stdout, stderr = pipeline.communicate(timeout=3000)
    return subprocess.CompletedProcess(pipeline.args, pipeline.returncode, stdout, stderr)


def wait_while_running(
    pipeline: subprocess.Popen[str], condition: Callable[[], object], seconds: float = 300
) -> None:
    """Wait until a condition is true; assert that the pipeline has not ended before."""
    wait_until(lambda: condition() or pipeline.poll() is not None, seconds)
    assert pipeline.poll() is None, pipeline.communicate()


def driver_of(run: Path) -> psutil.Process:
    """Return the process of a training that is no rank."""
    config = str(run / "config.yaml")
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"].startswith("python") and config in (process.info["cmdline"] or ()):
            return process
    raise LookupError(config)


def recorded_jobs(slurm: Slurm) -> list[dict[str, str]]:
    """Return the fields of all jobs in Slurm's database."""
    fields = ["JobID", "Comment", "State", "ReqCPUS", "ReqMem", "ReqTRES", "NNodes"]
    lines = slurm.run("sacct", "-X", "-P", "-n", f"--format={','.join(fields)}").splitlines()
    return [dict(zip(fields, line.split("|"), strict=True)) for line in lines]


def write_suite(path: Path, experiments: dict[str, list[str]]) -> None:
    """Write a suite of demo_math with these settings by experiment."""
    suite = {
        "suite": path.stem,
        "experiments": {
            name: ["experiment=demo_math", *settings] for name, settings in experiments.items()
        },
    }
    path.write_text(yaml.safe_dump(suite))


def model_settings(model: Path) -> list[str]:
    return [f"policies.solver.model={model}", f"policies.verifier.model={model}"]


def error_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error: ")]


def test_failing_runs_stop_no_other_run_and_jobs_request_the_resources_of_their_plan(
    cluster: Slurm, tmp_path: Path
) -> None:
    model = make_run(tmp_path, *SETTINGS) / "base"
    settings = [*TINY_WITHOUT_COLD_START, *model_settings(model)]
    write_suite(
        tmp_path / "four.yaml",
        {
            "good": settings,
            "bad": settings,  # its folder of checkpoints is a file
            "huge": [*settings, "cluster.threads_per_process=9"],  # needs 46 processors
            "gpus": [  # needs five GPUs, and SGLang is not installed
                *settings,
                "cluster.device=auto",
                "engine=sglang",
                "engine.max_length=512",
                f"engine.python={sys.executable}",
            ],
        },
    )
    checkpoints = tmp_path / "results/bad/train/checkpoints"
    checkpoints.parent.mkdir(parents=True)
    checkpoints.write_text("no folder")

    is_made = {
        "results/good/evaluation/base.json": True,
        "results/bad/evaluation/base.json": True,
        "results/good/evaluation/trained.json": True,
        "results/bad/train/done.json": False,
        "results/huge/train/done.json": False,
        "results/gpus/train/done.json": False,
    }
    resources = ["--default-resources", f"node_gpus={GPUS}", "mem_mb=4000"]
    pipeline = run_snakemake(cluster, tmp_path, *is_made, "--configfile", "four.yaml", *resources)
    assert {path: (tmp_path / path).is_file() for path in is_made} == is_made, pipeline.stderr[
        -5000:
    ]
    assert pipeline.returncode == 1

    errors = set(error_lines(pipeline.stderr))
    assert len(errors) == 3, errors
    refusal = "error: Slurm does not take the job: sbatch: error: Batch job submission failed: "
    assert f"{refusal}More processors requested than permitted" in errors
    assert any("bad/train/checkpoints" in error for error in errors)
    no_sglang = (
        "error: step 1: all 4 trajectories failed; the first: EngineError: SGLang: "
        "the server ended; results/gpus/"
    )
    assert any(
        error.startswith(no_sglang) and "No module named 'sglang'" in error for error in errors
    )

    jobs = recorded_jobs(cluster)
    requested = {
        (job["Comment"].rpartition("_")[2], job["ReqTRES"])  # run and resources
        for job in jobs
        if "rule_train" in job["Comment"]
    }
    first_try = "billing=6,cpu=6,mem=3956M,node=1"
    second_try = "billing=6,cpu=6,mem=7912M,node=1"  # twice the memory
    expected = {("good", first_try), ("bad", first_try), ("bad", second_try)}
    assert expected <= requested, requested
    assert any(
        run == "gpus" and "gres/gpu=8" in resources and "node=2" in resources
        for run, resources in requested
    ), requested
    assert {job["State"] for job in jobs if "small" in job["Comment"]} == {"COMPLETED"}


def test_a_training_at_its_time_limit_is_requeued_and_gives_the_same_bits(
    cluster: Slurm, unbroken: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path, *SETTINGS)
    job = cluster.train(run, "--time=60", "--signal=URG@600")
    wait_until(lambda: 1 in finished_steps(run), 300)

    # Slurm checks time limits every 30 s. The training is suspended, so that it does not end before.
    driver = driver_of(run)
    driver.suspend()
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    time.sleep(45)
    with suppress(psutil.NoSuchProcess):  # Slurm resumes it before it sends the signal
        driver.resume()

    cluster.wait_for_requeue(job, 300)
    cluster.start_soon(job, "TimeLimit=60")
    assert cluster.wait_for_end(job) == "COMPLETED", cluster.logs()
    assert "stopped by SIGURG after step" in (run / "logs" / "train.log").read_text()
    assert_same(run, unbroken)


def test_a_job_of_two_nodes_gives_the_same_bits(
    cluster: Slurm, unbroken: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path, *SETTINGS)
    job = cluster.train(run, "--gres=gpu:1", nodes=2)
    assert cluster.wait_for_end(job) == "COMPLETED", (run / "logs/train.log").read_text()[-3000:]
    assert cluster.job(job)["NodeList"] == "n[0-1]"
    record = json.loads((run / "train" / "done.json").read_text())
    assert record["devices"]["count"] == 8  # four of each node
    assert_same(run, unbroken)


def test_a_training_on_two_nodes_is_requeued_while_it_loads(cluster: Slurm, tmp_path: Path) -> None:
    run, arguments = write_page_suite(tmp_path, "trainer.steps=2")
    resources = ["train:nodes=2", "train:tasks=2", "train:cpus_per_task=4"]
    # The home folder has no token of Ray yet.
    pipeline = start_snakemake(cluster, tmp_path, *arguments, *resources, HOME=str(tmp_path))
    wait_while_running(pipeline, (run / "train/ranks/solver-0.txt").is_file)
    job = cluster.find_job("rule_train")
    cluster.run("scancel", "--signal=URG", job)
    cluster.wait_for_requeue(job, 120)
    assert "stopped by SIGURG while it was loading" in (run / "logs/train.log").read_text()
    (slurm_log,) = (tmp_path / f"logs/slurm/rule_train/{run.name}").glob("*.log")
    first_output = slurm_log.read_text()

    cluster.start_soon(job)
    _, stderr = pipeline.communicate(timeout=600)
    assert pipeline.returncode == 0, stderr
    devices = json.loads((run / "train/done.json").read_text())["devices"]
    assert (devices["kind"], devices["count"], devices["nodes"]) == ("CPU", 8, 2)
    assert (tmp_path / ".ray/auth_token").stat().st_mode & 0o777 == 0o600
    # The second start appends to Slurm's log.
    assert first_output
    assert slurm_log.read_text().startswith(first_output)
    assert len(slurm_log.read_text()) > len(first_output)


def test_a_preempted_training_and_a_preempted_evaluation_continue(
    cluster: Slurm, unbroken: Path, tmp_path: Path
) -> None:
    (tmp_path / "trained").mkdir()
    run = make_run(tmp_path / "trained", *SETTINGS)
    training_job = cluster.train(run)
    wait_until(lambda: 0 in finished_steps(run), 300)
    # The training waits until the evaluation has written files. Slurm resumes it before it sends a signal.
    driver_of(run).suspend()
    evaluation = start_evaluation(cluster, tmp_path / "evaluated", run / "base")

    urgent_job = cluster.run(*URGENT).strip()
    assert cluster.wait_for_end(urgent_job, 300) == "COMPLETED"
    first_shards = evaluation.read_shards()
    assert not evaluation.scores.is_file()
    for job in (training_job, evaluation.job):
        wait_until(lambda job=job: cluster.job(job)["Restarts"] == "1", 60)
        cluster.start_soon(job)
    output = evaluation.pipeline.communicate(timeout=900)
    assert evaluation.pipeline.returncode == 0, output
    assert cluster.wait_for_end(training_job) == "COMPLETED", cluster.logs()
    assert_same(run, unbroken)

    states = [
        job["State"] for job in recorded_jobs(cluster) if "evaluate_wildcards_one" in job["Comment"]
    ]
    assert states == ["COMPLETED"]
    evaluation.assert_played_once(first_shards)


def test_a_preempted_cold_start_continues_from_its_last_step(
    cluster: Slurm, tmp_path: Path
) -> None:
    cold_start = {
        "stop_accuracy": 1,
        "base.layers": 1,
        "base.hidden": 32,
        "base.heads": 2,
        "base.kv_heads": 2,
        "base.ffn": 32,
        "batch": 2,
        "max_steps": 1500,
        "check_every": 50,
        "check_tasks": 1,
        "first_check": 0,
        "stop_legal": 1,
    }
    settings = [*TINY, *(f"cold_start.{name}={value}" for name, value in cold_start.items())]
    write_suite(tmp_path / "one.yaml", {"one": settings})
    run = tmp_path / "results/one"
    result_file = run / "bootstrap/bootstrap.json"
    log = run / "logs/bootstrap.log"
    pipeline = start_snakemake(
        cluster,
        tmp_path,
        str(result_file.relative_to(tmp_path)),
        "--configfile",
        "one.yaml",
        "--retries",
        "0",
    )
    wait_while_running(
        pipeline, lambda: list(result_file.parent.glob("checkpoints/*/step_*")), seconds=400
    )
    job = cluster.find_job("bootstrap")
    urgent_job = cluster.run(*URGENT).strip()
    assert cluster.wait_for_end(urgent_job, 300) == "COMPLETED"
    (stopped_after,) = re.findall(r"stopped by SIGTERM after step (\d+)", log.read_text())
    wait_until(lambda: cluster.job(job)["Restarts"] == "1", 60)
    assert not result_file.is_file()

    cluster.start_soon(job)
    _, stderr = pipeline.communicate(timeout=900)
    assert pipeline.returncode == 0, stderr
    continuation = rf"^continuing from .*/step_{int(stopped_after):06d}$"
    assert re.search(continuation, log.read_text(), re.MULTILINE), log.read_text()
    # Both starts together check each step once.
    history = json.loads(result_file.read_text())["history"]
    assert [row["step"] for row in history] == list(range(50, 1501, 50))
    stage = json.loads((run / "logs/bootstrap.json").read_text())
    assert stage["tags"]["slurm_job"] == job


def test_an_evaluation_at_its_time_limit_is_requeued_and_continues_from_its_shards(
    cluster: Slurm, tmp_path: Path
) -> None:
    model = make_run(tmp_path, *SETTINGS) / "base"
    folder = tmp_path / "evaluated"
    evaluation = start_evaluation(cluster, folder, model)
    (stage,) = (
        process
        for process in psutil.process_iter(["cmdline", "cwd"])
        if process.info["cwd"] == str(folder)
        and process.info["cmdline"]
        and process.info["cmdline"][-1].endswith("evaluate.py")
    )
    # Slurm checks time limits every 30 s. The evaluation is suspended, so that it does not end before.
    stage.suspend()
    # The profile lets Slurm send a signal 300 s before the limit.
    cluster.run("scontrol", "update", f"JobId={evaluation.job}", "TimeLimit=5")
    time.sleep(45)
    with suppress(psutil.NoSuchProcess):
        stage.resume()
    cluster.wait_for_requeue(evaluation.job, 120)
    first_shards = evaluation.read_shards()
    assert first_shards
    assert not evaluation.scores.is_file()

    cluster.start_soon(evaluation.job, "TimeLimit=60")
    output = evaluation.pipeline.communicate(timeout=900)
    assert evaluation.pipeline.returncode == 0, output
    evaluation.assert_played_once(first_shards)


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of 600 trajectories in a running pipeline.

    Attributes:
        scores: file that it will write.
        job: number of its Slurm job.
    """

    pipeline: subprocess.Popen[str]
    scores: Path
    job: str

    def read_shards(self) -> dict[Path, bytes]:
        """Return the content of the files of trajectories that are written so far."""
        return read_shards(self.scores)

    def assert_played_once(self, first_shards: dict[Path, bytes]) -> None:
        """Assert that each trajectory was played once, and that the first files did not change."""
        assert {shard: shard.read_bytes() for shard in first_shards} == first_shards
        ids = []
        for shard in self.read_shards():
            ids += [trajectory.id for trajectory in read_trajectories(shard)]
        assert len(ids) == 600
        assert len(set(ids)) == 600


def read_shards(scores: Path) -> dict[Path, bytes]:
    return {shard: shard.read_bytes() for shard in scores.with_suffix("").glob("*.parquet")}


def start_evaluation(slurm: Slurm, folder: Path, model: Path) -> Evaluation:
    """Start a pipeline that evaluates a model; wait until some of its 600 trajectories are written."""
    folder.mkdir(exist_ok=True)
    settings = [
        *TINY_WITHOUT_COLD_START,
        "evaluation.samples=300",
        "engine.slots=8",
        *model_settings(model),
    ]
    write_suite(folder / "one.yaml", {"one": settings})
    scores = folder / "results/one/evaluation/base.json"
    pipeline = start_snakemake(
        slurm, folder, str(scores.relative_to(folder)), "--configfile", "one.yaml"
    )
    wait_while_running(pipeline, lambda: read_shards(scores))
    return Evaluation(pipeline, scores, slurm.find_job("evaluate"))


def test_a_job_killed_for_memory_is_submitted_again_with_twice_as_much(
    pytestconfig: pytest.Config, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if not pytestconfig.getoption("--slurm"):
        pytest.skip("takes minutes; `make test-slurm` runs it")
    model = make_run(tmp_path, *SETTINGS) / "base"
    settings = [
        *TINY_WITHOUT_COLD_START,
        "policies.solver.tp=1",
        "trainer.steps=1",
        *model_settings(model),
        "reward.name=tests.support.rewards:hungry",
        "~reward.penalties",
    ]
    write_suite(tmp_path / "one.yaml", {"hungry": settings})
    memory_polling = [
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=1",
        "JobAcctGatherParams=OverMemoryKill,UsePss",
    ]
    folder = tmp_path_factory.mktemp("killing")
    with Slurm(folder=folder, nodes=1, settings=memory_polling) as slurm:
        pipeline = run_snakemake(
            slurm,
            tmp_path,
            "results/hungry/train/done.json",
            "--set-resources",
            "train:runtime=77",
            "--configfile",
            "one.yaml",
        )
        assert pipeline.returncode == 0, pipeline.stderr[-5000:]
        numbers = slurm.run("squeue", "-h", "-t", "all", "-o", "%i").split()
        jobs = [slurm.job(number) for number in numbers]

    _, killed, repeated = sorted(jobs, key=lambda job: int(job["JobId"]))
    assert killed["JobState"] == "FAILED"  # with control groups it would be OUT_OF_MEMORY
    assert repeated["JobState"] == "COMPLETED"
    log = tmp_path / f"logs/slurm/rule_train/hungry/{killed['JobId']}.log"
    assert "exceeded memory limit" in log.read_text()
    assert (killed["MinMemoryNode"], repeated["MinMemoryNode"]) == ("3356M", "6712M")
    assert (killed["TimeLimit"], repeated["TimeLimit"]) == ("01:17:00", "01:17:00")


def test_scancel_saves_a_training_with_sigurg_and_ends_it_without(
    cluster: Slurm, tmp_path: Path
) -> None:
    run, arguments = write_page_suite(tmp_path, "trainer.steps=500")
    log = run / "logs/train.log"
    dry_run = run_snakemake(cluster, tmp_path, *snakemake_arguments(PLAN))
    assert dry_run.returncode == 0, dry_run.stderr
    assert "demo_math: reinforcement learning of every policy" in dry_run.stdout, dry_run.stderr
    assert cluster.is_idle()

    pipeline = start_snakemake(cluster, tmp_path, *arguments)
    wait_while_running(pipeline, lambda: 1 in finished_steps(run))
    queue = run_page_command(cluster, tmp_path, QUEUE).splitlines()
    number, state, *_ = next(line for line in queue if "rule_train" in line).split()
    job = cluster.job(number)
    assert (state, job["MinMemoryNode"], job["TimeLimit"]) == ("RUNNING", "5000M", "10:00:00")
    followed = run_page_command(cluster, tmp_path, f"timeout 2 {FOLLOW} || true")
    assert "demo_math train: " in followed

    run_page_command(cluster, tmp_path, SAVE, job=number)
    cluster.wait_for_requeue(number, 120)
    first_stop = stopped_and_saved(run, "SIGURG")
    cluster.start_soon(number)
    wait_until(lambda: max(finished_steps(run)) > first_stop, 300)

    run_page_command(cluster, tmp_path, END, job=number)
    assert cluster.wait_for_end(number, 120) == "CANCELLED"
    _, stderr = pipeline.communicate(timeout=300)
    assert pipeline.returncode == 1
    (error,) = error_lines(stderr)
    possible_errors = (
        f"error: Slurm job {number}: CANCELLED",
        "error: stopped by SIGTERM after step",
    )
    assert error.startswith(possible_errors)
    # The training has saved a checkpoint, and is not requeued.
    assert stopped_and_saved(run, "SIGTERM") > first_stop
    assert log.read_text().count("started again") == 1
    job = cluster.job(number)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "1")
    assert "rule_train" not in cluster.run("squeue", "-h", "-o", "%k")

    # A job that is cancelled before its training has started, with squeue instead of the database
    pipeline = start_snakemake(cluster, tmp_path, *arguments, "--slurm-status-command", "squeue")
    wait_until(
        lambda: (
            "rule_train" in cluster.run("squeue", "-h", "-o", "%k") or pipeline.poll() is not None
        ),
        300,
    )
    number = cluster.run("squeue", "-h", "-o", "%i").split()[0]
    cluster.run("scancel", number)
    _, stderr = pipeline.communicate(timeout=300)
    assert pipeline.returncode == 1
    (error,) = error_lines(stderr)
    possible_errors = (f"error: Slurm job {number}: CANCELLED", "error: stopped by SIGTERM")
    assert error.startswith(possible_errors)


def write_page_suite(folder: Path, *settings: str) -> tuple[Path, list[str]]:
    """Write the suite of docs/cluster.md with one run.

    Returns:
        The folder that the run will have, and the arguments of the page's command that trains it.
    """
    model = make_run(folder, *SETTINGS) / "base"
    experiment = [*TINY_WITHOUT_COLD_START, *SETTINGS, *model_settings(model), *settings]
    write_suite(folder / "my_suite.yaml", {"demo_math": experiment})
    arguments = [
        "results/demo_math/train/done.json",
        *snakemake_arguments(SUITE),
        "--retries",
        "0",
        "--set-resources",
        "train:mem_mb=5000",
        "train:runtime=600",
    ]
    return folder / "results/demo_math", arguments


def snakemake_arguments(command: str) -> list[str]:
    """Return the arguments of a command of the page after those that choose the profile."""
    prefix = "snakemake --workflow-profile slurm "
    assert command.startswith(prefix)
    return shlex.split(command.removeprefix(prefix))


def run_page_command(slurm: Slurm, folder: Path, command: str, job: str = "") -> str:
    """Run a command of the page, with the number of a job in place of the page's; return its output."""
    command = re.sub(r"\b12\b", job, command)
    completed = subprocess.run(
        ["bash", "-euc", command],
        cwd=folder,
        env=slurm.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, (command, completed.stderr)
    return completed.stdout


def stopped_and_saved(run: Path, signal_name: str) -> int:
    """Return the step after which a signal stopped the training; assert that it has a checkpoint."""
    pattern = rf"^(?:error: )?stopped by {signal_name} after step (\d+)"
    log = (run / "logs/train.log").read_text()
    (step,) = set(re.findall(pattern, log, re.MULTILINE))
    assert (run / f"train/checkpoints/step_{int(step):06d}/manifest.json").is_file()
    return int(step)


def test_ctrl_c_cancels_the_jobs_of_a_pipeline_and_the_same_command_continues(
    cluster: Slurm, tmp_path: Path
) -> None:
    run, arguments = write_page_suite(tmp_path, "trainer.steps=6")
    # Slow steps, so that the job still trains when it is cancelled
    variables = {FAILPOINTS: "metrics.written=sleep:5"}
    pipeline = start_snakemake(cluster, tmp_path, *arguments, **variables)
    wait_while_running(pipeline, lambda: 1 in finished_steps(run))
    pipeline.send_signal(signal.SIGINT)
    _, stderr = pipeline.communicate(timeout=300)
    assert pipeline.returncode == 1, stderr
    wait_until(cluster.is_idle, 120)
    assert stopped_and_saved(run, "SIGTERM") < 6
    comment = "rule_train_wildcards_demo_math"
    states = [job["State"] for job in recorded_jobs(cluster) if job["Comment"] == comment]
    assert states
    assert states[-1].startswith("CANCELLED")

    second = run_snakemake(cluster, tmp_path, *arguments)
    assert second.returncode == 0, second.stderr[-5000:]
    assert finished_steps(run) == list(range(-1, 6))  # -1 is the first validation
    assert (run / "logs/train.log").read_text().count("started again") == 1


def test_a_papers_table_is_made_by_jobs(cluster: Slurm, tmp_path: Path) -> None:
    earlier_jobs = {job["JobID"] for job in recorded_jobs(cluster)}
    dry_run = run_snakemake(cluster, tmp_path, *snakemake_arguments(TABLE), "--dry-run")
    assert dry_run.returncode == 0
    assert {job["JobID"] for job in recorded_jobs(cluster)} == earlier_jobs

    pipeline = run_snakemake(cluster, tmp_path, *snakemake_arguments(TABLE))
    assert pipeline.returncode == 0, pipeline.stdout[-3000:] + pipeline.stderr[-5000:]
    table = (tmp_path / "results/tiny/tables/marti_ttrl.md").read_text()
    assert "|" in table
    jobs = [job for job in recorded_jobs(cluster) if job["JobID"] not in earlier_jobs]
    assert jobs
    assert {job["State"] for job in jobs} == {"COMPLETED"}
    print(table, *jobs, sep="\n")


def test_the_pages_cluster_for_a_look_prints_its_path_and_leaves_nothing(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    if not pytestconfig.getoption("--slurm"):
        pytest.skip("takes minutes; `make test-slurm` runs it")
    page = (ROOT / "docs/cluster.md").read_text()
    (page_command,) = re.findall(r"`(python -m tests\.slurm\.cluster FOLDER)`", page)
    folder = tmp_path / "look"
    arguments = [str(folder) if word == "FOLDER" else word for word in page_command.split()[1:]]
    command = ["env", "--default-signal=INT", sys.executable, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        export = process.stdout.readline()
        sinfo = "sinfo --noheader --Node --partition main --format '%N %T %c %G'"
        nodes = subprocess.check_output(["bash", "-euc", f"{export}{sinfo}"], text=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    assert nodes.splitlines() == [f"n{node} idle 12 gpu:fake:4" for node in (0, 1)]
    assert not folder.exists()
