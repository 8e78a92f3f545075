"""Trainings that are killed, stopped or preempted continue and give the same bits."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from mcore_mas.cli.main import main
from mcore_mas.training.train import train
from rollout.base.digests import sha256
from rollout.base.failpoints import FAILPOINTS
from rollout.records.files import read_trajectories
from rollout.sync.memory import MEMORY
from tests.slurm.cluster import Slurm, wait_until
from tests.support.in_process import training_here
from tests.support.ray_worker import VARIABLE as RAY_FORKS
from tests.support.rewards import WAIT_FILE
from tests.support.run_folder import make_run, metrics_of

pytestmark = pytest.mark.usefixtures("forked_programs")

COMMON = [
    "trainer.checkpoint_every=2",
    "trainer.validate_every=3",
    "trainer.keep_best=0",  # only every second step has a checkpoint
    "data.validation=2",
    "+engine.deterministic=true",
    # A random model earns this reward sometimes, so that every step has an update.
    "reward.name=tests.support.rewards:by_first_token",
    "~reward.penalties",
]
ONE_POLICY = [
    *COMMON,
    "trainer.steps=8",
    "agents.verifier.policy=solver",
    "~policies.verifier",
    "policies.solver.tp=1",
]
# the solver on two ranks, the verifier on one
TWO_POLICIES = [*COMMON, "trainer.steps=6"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run folder of the math team with one policy, ready to train."""
    return make_run(tmp_path, *ONE_POLICY)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same run, trained without interruption.

    It is trained in one process, which changes no bit.
    """
    run = make_run(tmp_path_factory.mktemp("unbroken"), *ONE_POLICY)
    with pytest.MonkeyPatch.context() as patch, training_here(patch):
        train(run / "config.yaml")
    return run


@pytest.fixture(scope="module")
def unbroken_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two policies on three ranks, trained without interruption."""
    run = make_run(tmp_path_factory.mktemp("unbroken_pair"), *TWO_POLICIES)
    process = start(run)
    _, output = process.communicate(timeout=900)
    assert process.returncode == 0, output
    for row in metrics_of(run):
        if "policy/solver/hand_over_s" in row:
            assert row["policy/solver/hand_over_mb"] > 0
    files = last_files(run)
    assert "solver/rank_00000.safetensors" in files
    assert "solver/rank_00001.safetensors" in files
    assert not list(MEMORY.glob(f"mcore_mas-*/{process.pid}-*"))  # shared memory is removed
    return run


def last_files(run: Path) -> dict[str, Any]:
    """Return size and digest of every file in the last checkpoint of a run that has ended."""
    record = json.loads((run / "train" / "done.json").read_text())
    checkpoint = run / "train" / "checkpoints" / f"step_{record['steps']:06d}"
    trainer_state = json.loads((checkpoint / "solver" / "trainer.json").read_text())
    assert trainer_state["updates"] == record["steps"]
    files: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return files


def assert_same(run: Path, unbroken: Path) -> None:
    """Assert that weights, optimizer, spike monitors and metrics equal those of an unbroken run."""
    assert sha256(run / "base" / "model.safetensors") == sha256(
        unbroken / "base" / "model.safetensors"
    )
    assert last_files(run) == last_files(unbroken)
    for model in (unbroken / "train" / "models").glob("*/model.safetensors"):
        assert sha256(run / model.relative_to(unbroken)) == sha256(model)
    assert comparable_metrics(run) == comparable_metrics(unbroken)


def comparable_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics that do not vary: without times, restarts and hand-overs of weights.

    A training in one process has no hand-overs.
    """
    varying = ("_s", "/tokens_per_s", "/tflops", "restarts/trainers", "/hand_over_mb")
    return [
        {name: value for name, value in row.items() if not name.endswith(varying)}
        for row in metrics_of(run)
    ]


def start(run: Path, **options: Any) -> subprocess.Popen[str]:
    """Start the training of a run."""
    command = [sys.executable, "-m", "mcore_mas", "train", str(run / "config.yaml")]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, **options
    )


def finished_steps(run: Path) -> list[int]:
    """Return the steps whose metrics are written."""
    path = run / "train" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def last_saved(run: Path) -> tuple[Path, int]:
    """Return the newest checkpoint, and the number of steps that it has finished.

    A training that is stopped saves a checkpoint at once, and not only every second step.
    """
    checkpoint = max((run / "train" / "checkpoints").glob("step_*/manifest.json")).parent
    finished = int(checkpoint.name.removeprefix("step_"))
    # 2 if the step's validation had not ended, because its metrics are written after it
    assert finished - max(finished_steps(run)) in (1, 2)
    return checkpoint, finished


def wait_for_step(number: int, process: subprocess.Popen[str], run: Path) -> None:
    """Wait until the metrics of a step are written."""
    deadline = time.monotonic() + 600
    while max(finished_steps(run), default=-1) < number:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline, f"no step {number} within 600 s"
        time.sleep(0.1)


def kill_in_training(run: Path) -> None:
    """Kill a training after its first steps; assert its last line, and that all of it ends."""
    process = start(run)
    memory = MEMORY / f"mcore_mas-{os.getuid()}"
    wait_for_step(2, process, run)
    wait_until((run / "train" / "checkpoints" / "step_000002" / "manifest.json").is_file, 60)
    assert list(memory.glob(f"{process.pid}-*"))  # weights that are sent to the engine
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    _, output = process.communicate(timeout=120)
    message = "error: a signal ended the training (SIGTERM, or SIGKILL; was there memory left?)"
    assert output.splitlines()[-1] == message
    _, alive = psutil.wait_procs(children, timeout=30)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
    wait_until(lambda: not list(memory.glob(f"{process.pid}-*")), 60)


def assert_ended(run: Path, unbroken: Path) -> None:
    """Assert that a run has ended, with the same results as the unbroken run."""
    assert finished_steps(run) == [-1, *range(8)]  # every step once; -1 is the first validation
    record = json.loads((run / "train" / "done.json").read_text())
    assert record["steps"] == 8
    assert list(record["policies"]) == ["solver"]
    for folder in record["policies"].values():
        files = {path.name for path in Path(folder).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    last = read_trajectories(run / "train" / "trajectories" / "step_000007.parquet")
    assert len(last) == 4
    assert all(trajectory.status == "completed" for trajectory in last)
    assert_same(run, unbroken)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.usefixtures("forked_ray_workers")
def test_a_training_that_was_killed_and_that_slurm_preempts_is_queued_again_and_comes_to_the_same_bits(
    run: Path, unbroken: Path, slurm: Slurm
) -> None:
    kill_in_training(run)
    before = max(finished_steps(run))
    # Slow steps, so that the job still trains when it is preempted
    variables = {FAILPOINTS: "metrics.written=sleep:2", RAY_FORKS: os.environ[RAY_FORKS]}
    export = ",".join(f"{name}={value}" for name, value in variables.items())
    job = slurm.train(run, f"--export=ALL,{export}")
    wait_until(
        lambda: max(finished_steps(run)) > before or slurm.job(job)["JobState"] == "FAILED", 300
    )
    assert slurm.job(job)["JobState"] == "RUNNING", (run / "logs" / "train.log").read_text()
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", f"--output={run}/urgent.out"]
    slurm.run("sbatch", *urgent, "--wrap=true")
    wait_until(
        lambda: slurm.job(job)["Restarts"] == "1" and slurm.job(job)["JobState"] == "PENDING", 300
    )
    checkpoint, finished = last_saved(run)

    # By default a preempted job waits for two minutes. Slurm refuses a start in the same second.
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    assert slurm.wait_for_end(job) == "COMPLETED", slurm.logs()
    first, second = (run / "logs" / "train.log").read_text().split("----- started again -----\n")
    assert "continuing from" in first
    assert f"stopped by SIGTERM after step {finished}" in first
    assert f"continuing from {checkpoint}" in second
    assert_ended(run, unbroken)


@pytest.fixture
def no_slurm(request: pytest.FixtureRequest) -> None:
    """Skip the test if this machine has Slurm."""
    try:
        request.getfixturevalue("slurm")
    except pytest.skip.Exception:
        return
    pytest.skip("with Slurm, the test with a preempted job runs instead")


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.usefixtures("no_slurm")
def test_a_training_that_is_killed_and_then_told_to_stop_comes_to_the_same_bits(
    run: Path, unbroken: Path
) -> None:
    kill_in_training(run)
    second = start(run)
    wait_for_step(max(finished_steps(run)) + 1, second, run)
    second.send_signal(signal.SIGTERM)
    _, output = second.communicate(timeout=300)
    assert second.returncode == 143, output
    assert "continuing from" in output
    finished = max(finished_steps(run)) + 1
    checkpoint = run / "train" / "checkpoints" / f"step_{finished:06d}"
    assert f"stopped by SIGTERM after step {finished}" in output
    assert (checkpoint / "manifest.json").is_file()

    third = start(run)
    _, output = third.communicate(timeout=900)
    assert third.returncode == 0, output
    assert f"continuing from {checkpoint}" in output
    assert_ended(run, unbroken)


def press_ctrl_c(process: subprocess.Popen[str], seconds: float) -> list[str]:
    """Send SIGINT to a training's process group, as a terminal does; return its lines after its end.

    Args:
        process: the training.
        seconds: time within which it must end; on a quiet machine it takes two.
    """
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, output = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return output.splitlines()


@pytest.mark.slow
@pytest.mark.multirank
def test_ctrl_c_breaks_off_a_collection_code_that_blocks_and_an_update(
    tmp_path: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward that waits blocks the training; stopped processes make a collection and an update endless."""
    run = make_run(
        tmp_path, *ONE_POLICY[:5], "reward.name=tests.support.rewards:waiting", *ONE_POLICY[6:]
    )
    wait_file = tmp_path / "wait"
    reached = wait_file.with_suffix(".reached")
    monkeypatch.setenv(WAIT_FILE, str(wait_file))
    train_folder = run / "train"
    announcement = (
        "SIGINT: stopping after the state of the run is saved; a Ctrl-C from now on ends it at once"
    )

    # The reward of a step blocks the event loop.
    process = start(run, process_group=0)
    wait_for_step(0, process, run)
    wait_file.touch()
    wait_until(reached.exists, 120)
    lines = press_ctrl_c(process, 30)
    assert process.returncode == 143, lines
    assert announcement in lines
    (interruption,) = [line for line in lines if "interrupted" in line]
    assert re.search(r"rewards\.py:\d+ \(waiting\), which blocks the event loop$", interruption)
    saved = max(finished_steps(run)) + 1
    message = (
        f"stopped by SIGINT after step {saved}; the same command continues from its checkpoint"
    )
    assert lines[-1] == message

    # A rank is stopped before an update, which then has no end. The second Ctrl-C is not needed.
    reached.unlink()
    process = start(run, process_group=0)
    wait_until(reached.exists, 120)
    rank_of(run, process, "solver-0", None).send_signal(signal.SIGSTOP)
    step = max(finished_steps(run)) + 1
    wait_file.unlink()
    wait_until((train_folder / "advantages" / f"step_{step:06d}.parquet").is_file, 120)
    lines = press_ctrl_c(process, 30)
    assert process.returncode == 143, lines
    newest = max((train_folder / "checkpoints").glob("step_*/manifest.json")).parent.name
    assert lines[-1] == (
        f"stopped by SIGINT in the update of step {step + 1}, which is not saved; the same command "
        f"continues after step {int(newest.removeprefix('step_'))}, and repeats updates without "
        "sampling again"
    )

    # The engine is stopped, so that a collection has no end; the second Ctrl-C ends all at once.
    process = start(run, process_group=0)
    wait_for_step(step, process, run)
    for child in psutil.Process(process.pid).children(recursive=True):
        if "EngineActor" in " ".join(child.cmdline()):
            child.send_signal(signal.SIGSTOP)
    log = train_folder / "collection"
    wait_until(lambda: process.poll() is None and log.is_dir(), 120)
    lines = press_ctrl_c(process, 30)
    assert process.returncode == 143, lines
    assert re.search(r"^stopped by SIGINT after step \d+; the same command continues", lines[-1])

    process = start(run)
    _, output = process.communicate(timeout=900)
    assert process.returncode == 0, output
    assert_ended(run, unbroken)


def rank_of(
    run: Path, process: subprocess.Popen[str], name: str, before: psutil.Process | None
) -> psutil.Process:
    """Return the process of a rank, found by its open status file; wait until it is not `before`."""
    path = str(run / "train" / "ranks" / f"{name}.txt")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if child != before and any(file.path == path for file in child.open_files()):
                    return child
    raise LookupError(name)


@pytest.mark.slow
@pytest.mark.multirank
def test_a_rank_that_is_killed_and_one_that_hangs_cost_steps_and_not_the_run(
    tmp_path: Path, unbroken_pair: Path
) -> None:
    """A rank is killed in an update, and later another one stops.

    Each fault costs the steps since the newest checkpoint.
    """
    run = make_run(tmp_path, *TWO_POLICIES, "+cluster.hang_s=15", "+cluster.restarts=2")
    checkpoints = run / "train" / "checkpoints"
    process = start(run)
    wait_for_step(1, process, run)
    wait_until((checkpoints / "step_000002" / "manifest.json").is_file, 60)
    killed = rank_of(run, process, "verifier-0", None)
    status_file = run / "train" / "ranks" / "verifier-0.txt"
    deadline = time.monotonic() + 600
    while not status_file.read_text().startswith("update"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    killed.send_signal(signal.SIGKILL)
    finished = len([row for row in metrics_of(run) if row["step"] >= 0])
    # When the ranks have restarted, the metrics of steps that are trained again are removed.
    rank_of(run, process, "verifier-0", killed)
    wait_for_step(finished, process, run)
    stopped = rank_of(run, process, "solver-1", None)
    stopped.send_signal(signal.SIGSTOP)
    _, output = process.communicate(timeout=900)
    assert process.returncode == 0, output
    resumed_from = re.findall(rf"continuing from {checkpoints}/step_(\d+)\n", output)
    assert len(resumed_from) == 2, output
    assert 2 <= int(resumed_from[0]) <= finished, output
    restarts = [line for line in output.splitlines() if "trainers start again" in line]
    assert len(restarts) == 2, output
    restart = "trainers start again from the newest checkpoint"
    assert restarts[0].endswith(f"policy verifier: rank 0 died; {restart}, 1 restarts left")
    # Rank 0 is only mentioned if it waits for rank 1.
    assert re.search(
        r"policy solver: no progress for \d+ s; "
        r"rank 1: does not respond (in phase \w+|between phases) \(is it stopped\?\)"
        rf"(; rank 0: in phase \w+ at \S+:\d+ \w+ > .*)?; {restart}, 0 restarts left$",
        restarts[1],
    ), restarts[1]
    assert not stopped.is_running()
    assert {folder.name for folder in checkpoints.iterdir()} == {"step_000004", "step_000006"}
    assert not list(MEMORY.glob(f"mcore_mas-*/{process.pid}-*"))
    assert metrics_of(run)[-1]["restarts/trainers"] == 2.0
    assert_same(run, unbroken_pair)


def test_unusable_inputs_are_described_in_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train_error() -> str:
        """Return the last line of a training that fails."""
        monkeypatch.setattr("sys.argv", ["mcore-mas", "train", str(run / "config.yaml")])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 1
        output = capsys.readouterr().err
        assert "Traceback" not in output
        return output.strip().splitlines()[-1]

    tasks = run / "tasks" / "train.parquet"
    tasks.write_bytes(tasks.read_bytes()[:100])
    assert "train.parquet: not a readable parquet file" in train_error()
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["policies"]["solver"]["model"] = "nowhere"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert "nowhere: no model here (config.json is missing)" in train_error()
