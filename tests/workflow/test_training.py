"""A killed training goes on from its last checkpoint; what it cannot use, it names."""

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
from tests.support.run_folder import make_run, metrics_of

COMMON = [
    "trainer.checkpoint_every=2",
    "trainer.validate_every=3",
    "data.validation=2",
    "+engine.deterministic=true",
    "reward.name=tests.support.rewards:by_first_token",  # a random model gets some of it: every step is an update
    "~reward.penalties",
]
LONE = [
    *COMMON,
    "trainer.steps=8",
    "agents.verifier.policy=solver",
    "~policies.verifier",
    "policies.solver.tp=1",
]
PAIR = [*COMMON, "trainer.steps=6"]  # the solver on two ranks, the verifier on one


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of the math team with one policy, ready to train."""
    return make_run(tmp_path, *LONE)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, trained without a stop, and in one process, which changes no bit."""
    run = make_run(tmp_path_factory.mktemp("unbroken"), *LONE)
    with pytest.MonkeyPatch.context() as patch, training_here(patch):
        train(run / "config.yaml")
    return run


@pytest.fixture(scope="module")
def unbroken_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies on three ranks, trained without a stop."""
    run = make_run(tmp_path_factory.mktemp("unbroken_pair"), *PAIR)
    process = start(run)
    _, said = process.communicate(timeout=900)
    assert process.returncode == 0, said
    rows = metrics_of(run)
    assert all(
        row["policy/solver/hand_over_mb"] > 0 for row in rows if "policy/solver/hand_over_s" in row
    )
    assert {f"solver/rank_0000{n}.safetensors" for n in (0, 1)} <= last_files(run).keys()
    assert not list(
        MEMORY.glob(f"mcore_mas-*/{process.pid}-*")
    )  # nothing stays of the memory that ranks shared
    return run


def last_files(run: Path) -> dict[str, Any]:
    """Sizes and digests by file of the last checkpoint of a run that has ended, weights and moments among them."""
    done = json.loads((run / "train" / "done.json").read_text())
    saved = run / "train" / "checkpoints" / f"step_{done['steps']:06d}"
    assert json.loads((saved / "solver" / "trainer.json").read_text())["updates"] == done["steps"]
    files: dict[str, Any] = json.loads((saved / "manifest.json").read_text())["files"]
    return files


def assert_same(run: Path, unbroken: Path) -> None:
    """Weights, moments, spike monitors and metrics are those of a run that never stopped, to the bit."""
    assert sha256(run / "base" / "model.safetensors") == sha256(
        unbroken / "base" / "model.safetensors"
    )
    assert last_files(run) == last_files(unbroken)
    for model in (unbroken / "train" / "models").glob("*/model.safetensors"):
        assert sha256(run / model.relative_to(unbroken)) == sha256(model)
    # times, and what is not there in one process: nothing is handed over
    varies = ("_s", "/tokens_per_s", "/tflops", "restarts/trainers", "/hand_over_mb")
    rows = [
        [
            {name: value for name, value in row.items() if not name.endswith(varies)}
            for row in metrics_of(folder)
        ]
        for folder in (run, unbroken)
    ]
    assert rows[0] == rows[1]


def start(run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mcore_mas", "train", str(run / "config.yaml")]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def finished_steps(run: Path) -> list[int]:
    path = run / "train" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def last_saved(run: Path) -> tuple[Path, int]:
    """The checkpoint of the last finished step, made at once and not only every second step, and the step's number."""
    saved = max((run / "train" / "checkpoints").glob("step_*/manifest.json")).parent
    finished = int(saved.name.removeprefix("step_"))
    assert finished - max(finished_steps(run)) in (
        1,
        2,
    )  # 2: its validation was still to come, and its row with it
    return saved, finished


def wait_for_step(number: int, process: subprocess.Popen[str], run: Path) -> None:
    deadline = time.monotonic() + 600
    while max(finished_steps(run), default=-1) < number:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline, f"no step {number} within 600 s"
        time.sleep(0.1)


def kill_in_training(run: Path) -> None:
    """The run's first two steps; what trains is killed, says so, and leaves nothing behind."""
    process, kept = start(run), MEMORY / f"mcore_mas-{os.getuid()}"
    wait_for_step(2, process, run)
    wait_until((run / "train" / "checkpoints" / "step_000002" / "manifest.json").is_file, 60)
    assert list(kept.glob(f"{process.pid}-*"))  # the weights on their way to the engine
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    _, said = process.communicate(timeout=120)
    assert (
        said.splitlines()[-1]
        == "error: a signal ended the training (SIGTERM, or SIGKILL; was there memory left?)"
    )
    _, alive = psutil.wait_procs(children, timeout=30)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []  # no process
    wait_until(lambda: not list(kept.glob(f"{process.pid}-*")), 60)  # and nothing in memory


def assert_ended(run: Path, unbroken: Path) -> None:
    """The run has all that one has which ended, the same as the one that never stopped."""
    assert finished_steps(run) == [-1, *range(8)]  # every step once, in order; -1 is the start
    done = json.loads((run / "train" / "done.json").read_text())
    assert done["steps"] == 8
    assert list(done["policies"]) == ["solver"]
    for folder in done["policies"].values():
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
            p.name for p in Path(folder).iterdir()
        }
    last = read_trajectories(run / "train" / "trajectories" / "step_000007.parquet")
    assert len(last) == 4
    assert all(t.status == "completed" for t in last)
    assert_same(run, unbroken)


@pytest.mark.slow
@pytest.mark.multirank
def test_a_training_that_was_killed_and_that_slurm_preempts_is_queued_again_and_comes_to_the_same_bits(
    run: Path, unbroken: Path, slurm: Slurm
) -> None:
    kill_in_training(run)
    before = max(finished_steps(run))
    slowly = (
        f"--export=ALL,{FAILPOINTS}=metrics.written=sleep:2"  # it is at work when it is preempted
    )
    job = slurm.train(run, slowly)
    wait_until(
        lambda: max(finished_steps(run)) > before or slurm.job(job)["JobState"] == "FAILED", 300
    )
    assert slurm.job(job)["JobState"] == "RUNNING", (run / "logs" / "train.log").read_text()
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", f"--output={run}/urgent.out"]
    slurm.run("sbatch", *urgent, "--wrap=true")
    wait_until(
        lambda: slurm.job(job)["Restarts"] == "1" and slurm.job(job)["JobState"] == "PENDING", 300
    )
    saved, finished = last_saved(run)

    # Two minutes by default: Slurm refuses a job that starts in the second in which it was taken from its machine.
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    assert slurm.ended(job) == "COMPLETED", slurm.logs()
    first, second = (run / "logs" / "train.log").read_text().split("----- started again -----\n")
    assert "continuing from" in first and f"stopped by SIGTERM after step {finished}" in first
    assert f"continuing from {saved}" in second
    assert_ended(run, unbroken)


@pytest.fixture
def no_slurm(request: pytest.FixtureRequest) -> None:
    """The test is skipped where there is Slurm."""
    try:
        request.getfixturevalue("slurm")
    except pytest.skip.Exception:
        return
    pytest.skip("there is Slurm, which stops the training that was killed")


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
    _, said = second.communicate(timeout=300)
    assert second.returncode == 143, said
    assert "continuing from" in said
    finished = max(finished_steps(run)) + 1
    saved = run / "train" / "checkpoints" / f"step_{finished:06d}"
    assert f"stopped by SIGTERM after step {finished}" in said
    assert (saved / "manifest.json").is_file()

    third = start(run)
    _, said = third.communicate(timeout=900)
    assert third.returncode == 0, said
    assert f"continuing from {saved}" in said
    assert_ended(run, unbroken)


def rank_of(
    run: Path, process: subprocess.Popen[str], name: str, before: psutil.Process | None
) -> psutil.Process:
    """The process that writes what this rank is at, once it is another than the one `before`."""
    path, deadline = str(run / "train" / "ranks" / f"{name}.txt"), time.monotonic() + 120
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
    """Kill a rank in an update, then stop another one: each costs the steps since the newest checkpoint."""
    run = make_run(tmp_path, *PAIR, "+cluster.hang_s=15", "+cluster.restarts=2")
    checkpoints = run / "train" / "checkpoints"
    process = start(run)
    wait_for_step(1, process, run)
    wait_until((checkpoints / "step_000002" / "manifest.json").is_file, 60)
    killed = rank_of(run, process, "verifier-0", None)
    doing, deadline = run / "train" / "ranks" / "verifier-0.txt", time.monotonic() + 600
    while not doing.read_text().startswith("update"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    killed.send_signal(signal.SIGKILL)
    finished = len([row for row in metrics_of(run) if row["step"] >= 0])
    rank_of(
        run, process, "verifier-0", killed
    )  # all have started again, and what is done again is off the record
    wait_for_step(finished, process, run)
    stopped = rank_of(run, process, "solver-1", None)
    stopped.send_signal(signal.SIGSTOP)
    _, said = process.communicate(timeout=900)
    assert process.returncode == 0, said
    resumed_from = re.findall(rf"continuing from {checkpoints}/step_(\d+)\n", said)
    assert len(resumed_from) == 2 and 2 <= int(resumed_from[0]) <= finished, said
    restarts = [line for line in said.splitlines() if "trainers start again" in line]
    assert len(restarts) == 2, said
    again = "trainers start again from the newest checkpoint"
    assert restarts[0].endswith(f"policy verifier: rank 0 died; {again}, 1 restarts left")
    assert re.search(  # rank 0 is not told of where it has answered and does not wait for rank 1
        r"policy solver: nothing for \d+ s; rank 1 (does not answer in \w+|has not begun) \(is it stopped\?\)"
        rf"(; rank 0 stands in \w+ at \S+:\d+ \w+ > .*)?; {again}, 0 restarts left$",
        restarts[1],
    ), restarts[1]
    assert not stopped.is_running()
    assert {folder.name for folder in checkpoints.iterdir()} == {"step_000004", "step_000006"}
    assert not list(MEMORY.glob(f"mcore_mas-*/{process.pid}-*"))
    assert metrics_of(run)[-1]["restarts/trainers"] == 2.0
    assert_same(run, unbroken_pair)


def test_what_stands_in_the_way_is_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        monkeypatch.setattr("sys.argv", ["mcore-mas", "train", str(run / "config.yaml")])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
        text = capsys.readouterr().err
        assert "Traceback" not in text
        return text.strip().splitlines()[-1]

    tasks = run / "tasks" / "train.parquet"
    tasks.write_bytes(tasks.read_bytes()[:100])
    assert "train.parquet: not a readable parquet file" in said()
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["policies"]["solver"]["model"] = "nowhere"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert "nowhere: no model here (config.json is missing)" in said()
