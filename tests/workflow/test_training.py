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

import psutil
import pytest
import yaml

from mcore_mas.rollout.base.files import sha256
from mcore_mas.rollout.records.files import read_trajectories
from mcore_mas.rollout.sync import MEMORY
from tests.slurm.cluster import Slurm, wait_until
from tests.support.run_folder import make_run, metrics_of

STEPS = 8
SETTINGS = [
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=2",
    "trainer.validate_every=3",
    "data.validation=2",
    "+engine.deterministic=true",
    "reward.name=tests.support.rewards:by_first_token",  # a random model gets some of it: every step is an update
    "~reward.penalties",
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of the math team, ready to train."""
    return make_run(tmp_path, *SETTINGS)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, trained without a stop."""
    run = make_run(tmp_path_factory.mktemp("unbroken"), *SETTINGS)
    process = start(run)
    _, said = process.communicate(timeout=900)
    assert process.returncode == 0, said
    rows = metrics_of(run)
    assert all(row["policy/solver/hand_over_mb"] > 0 for row in rows if "policy/solver/hand_over_s" in row)
    assert not list(MEMORY.glob(f"mcore_mas-*/{process.pid}-*"))  # nothing stays of the memory that ranks shared
    return run


def assert_same(run: Path, unbroken: Path) -> None:
    """Weights, moments, spike monitors and metrics are those of a run that never stopped, to the bit."""
    assert sha256(run / "base" / "model.safetensors") == sha256(unbroken / "base" / "model.safetensors")
    last = [
        json.loads((folder / "train" / "checkpoints" / f"step_{STEPS:06d}" / "manifest.json").read_text())
        for folder in (run, unbroken)
    ]
    assert {f"solver/rank_0000{n}.safetensors" for n in (0, 1)} <= last[0]["files"].keys()
    assert last[0]["files"] == last[1]["files"]
    record = run / "train" / "checkpoints" / f"step_{STEPS:06d}" / "solver" / "trainer.json"
    assert json.loads(record.read_text())["updates"] == STEPS
    for policy in ("solver", "verifier"):
        models = [folder / "train" / "models" / policy / "model.safetensors" for folder in (run, unbroken)]
        assert sha256(models[0]) == sha256(models[1])
    varies = ("_s", "/tokens_per_s", "restarts/trainers", "epoch")
    rows = [
        [
            {name: value for name, value in json.loads(line).items() if not name.endswith(varies)}
            for line in (folder / "train" / "metrics.jsonl").read_text().splitlines()
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
    assert finished - max(finished_steps(run)) in (1, 2)  # 2: its validation was still to come, and its row with it
    return saved, finished


def wait_for_step(number: int, process: subprocess.Popen[str], run: Path) -> None:
    """And for the checkpoint of the first two."""
    deadline = time.monotonic() + 600
    manifest = run / "train" / "checkpoints" / "step_000002" / "manifest.json"
    while max(finished_steps(run), default=-1) < number or not manifest.is_file():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline, f"no step {number} within 600 s"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.multirank
def test_a_training_that_slurm_preempts_is_queued_again_and_comes_to_the_same_bits(
    run: Path, unbroken: Path, slurm: Slurm
) -> None:
    job = slurm.train(run)
    wait_until(lambda: 0 in finished_steps(run) or slurm.job(job)["JobState"] == "FAILED", 300)
    assert slurm.job(job)["JobState"] == "RUNNING", (run / "logs" / "train.log").read_text()
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", f"--output={run}/urgent.out"]
    slurm.run("sbatch", *urgent, "--wrap=true")
    wait_until(lambda: slurm.job(job)["Restarts"] == "1" and slurm.job(job)["JobState"] == "PENDING", 300)
    saved, finished = last_saved(run)

    # Two minutes by default: Slurm refuses a job that starts in the second in which it was taken from its machine.
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    assert slurm.ended(job) == "COMPLETED", slurm.logs()
    first, second = (run / "logs" / "train.log").read_text().split("----- started again -----\n")
    assert f"stopped by SIGTERM after step {finished}" in first
    assert f"continuing from {saved}" in second
    assert_same(run, unbroken)


@pytest.mark.slow
@pytest.mark.multirank
def test_a_training_that_is_killed_and_then_told_to_stop_comes_to_the_same_bits(run: Path, unbroken: Path) -> None:
    first = start(run)
    wait_for_step(2, first, run)
    children = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []  # it leaves no process behind

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
    assert finished_steps(run) == [-1, *range(STEPS)]  # every step once, in order; -1 is the start
    done = json.loads((run / "train" / "done.json").read_text())
    assert done["steps"] == STEPS
    assert sorted(done["policies"]) == ["solver", "verifier"]
    for folder in done["policies"].values():
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in Path(folder).iterdir()}
    last = read_trajectories(run / "train" / "trajectories" / f"step_{STEPS - 1:06d}.parquet")
    assert len(last) == 4
    assert all(t.status == "completed" for t in last)
    assert_same(run, unbroken)


def rank_of(run: Path, process: subprocess.Popen[str], name: str, before: psutil.Process | None) -> psutil.Process:
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
def test_a_rank_that_is_killed_and_one_that_hangs_cost_steps_and_not_the_run(tmp_path: Path, unbroken: Path) -> None:
    run = make_run(tmp_path, *SETTINGS, "+cluster.hang_s=15", "+cluster.restarts=2")
    process = start(run)
    wait_for_step(2, process, run)
    killed = rank_of(run, process, "verifier-0", None)
    killed.send_signal(signal.SIGKILL)
    rank_of(run, process, "verifier-0", killed)  # all have started again, and what is done again is off the record
    wait_for_step(3, process, run)
    stopped = rank_of(run, process, "solver-1", None)
    stopped.send_signal(signal.SIGSTOP)
    _, said = process.communicate(timeout=900)
    assert process.returncode == 0, said
    restarts = [line for line in said.splitlines() if "trainers start again" in line]
    assert len(restarts) == 2, said
    again = "trainers start again from the newest state"
    assert restarts[0].endswith(f"policy verifier: rank 0 died; {again}, 1 restarts left")
    assert re.search(  # rank 0 is not told of where it has answered and does not wait for rank 1
        r"policy solver: nothing for \d+ s; rank 1 (does not answer in \w+|has not begun) \(is it stopped\?\)"
        rf"(; rank 0 stands in \w+ at \S+:\d+ \w+ > .*)?; {again}, 0 restarts left$",
        restarts[1],
    ), restarts[1]
    assert not stopped.is_running()
    last = json.loads((run / "train" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last.pop("restarts/trainers") == 2.0
    assert_same(run, unbroken)


@pytest.mark.slow
@pytest.mark.multirank
def test_a_rank_that_is_killed_in_an_update_costs_the_step_and_nothing_stays_in_memory(
    tmp_path: Path, unbroken: Path
) -> None:
    run = make_run(tmp_path, *SETTINGS, f"trainer.checkpoint_every={STEPS}")
    process = start(run)
    deadline = time.monotonic() + 600
    while 3 not in finished_steps(run):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    killed = rank_of(run, process, "verifier-0", None)
    doing = run / "train" / "ranks" / "verifier-0.txt"
    while not doing.read_text().startswith("update"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    killed.send_signal(signal.SIGKILL)
    finished = max(finished_steps(run)) + 1
    _, said = process.communicate(timeout=900)
    assert process.returncode == 0, said
    assert re.search(rf"continuing from {MEMORY}/\S+/step_{finished:06d}\n", said), said
    assert [folder.name for folder in (run / "train" / "checkpoints").iterdir()] == [f"step_{STEPS:06d}"]
    assert not list(MEMORY.glob(f"mcore_mas-*/{process.pid}-*"))
    assert_same(run, unbroken)


@pytest.mark.slow
@pytest.mark.multirank
def test_a_training_that_is_killed_leaves_no_state_in_memory(run: Path) -> None:
    process = start(run)
    wait_until(lambda: 2 in finished_steps(run) or process.poll() is not None, 600)
    kept = MEMORY / f"mcore_mas-{os.getuid()}"
    wait_until(lambda: bool(list(kept.glob(f"{process.pid}-*/step_*"))), 60)
    process.kill()
    process.wait()
    wait_until(lambda: not list(kept.glob(f"{process.pid}-*")), 60)


@pytest.mark.slow
def test_what_stands_in_the_way_is_one_line(run: Path) -> None:
    def said() -> str:
        process = start(run)
        _, text = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "Traceback" not in text
        return text.strip().splitlines()[-1]

    tasks = run / "tasks" / "train.parquet"
    tasks.write_bytes(tasks.read_bytes()[:100])
    assert "train.parquet: not a readable parquet file" in said()
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["policies"]["solver"]["model"] = "nowhere"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert "nowhere: no model here (config.json is missing)" in said()
