"""CPU time of commands that print records of a run, against `import torch` in a new process.

`explain` computes the credit of 128 trajectories, for which it imports torch. `show` reads recorded
credit, and `ls` and `--help` read none, so these three need no torch. The result is that of the
slowest command.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.result import print_result
from mcore_mas.credit.advantage_files import advantage_path, write_advantages
from rollout.records.files import write_trajectories
from rollout.records.trajectory import Trajectory
from tests.support.finished import finished
from tests.support.played import trajectory, turn

ROOT = Path(__file__).resolve().parents[1]
REPEATS = 5
GOAL = 1.5
TASKS = 16
SAMPLES = 8
COMMANDS = (["--help"], ["ls"], ["show", "demo_math"], ["explain", "demo_math"])


def write_run(folder: Path) -> None:
    """Write the run demo_math with one step, whose trajectories have two turns each."""
    finished(folder / "results", "demo_math", 0)
    file = folder / "results/demo_math/train/trajectories/step_000000.parquet"
    trajectories = [played(task, sample) for task in range(TASKS) for sample in range(SAMPLES)]
    write_trajectories(file, trajectories)
    advantages = {
        (trajectory.id, turn.node, turn.index): (turn.reward or 0.0) - 0.5
        for trajectory in trajectories
        for turn in trajectory.turns
    }
    write_advantages(advantage_path(file), advantages)


def played(task: int, sample: int) -> Trajectory:
    """Return the trajectory of a sample, whose reward is 0 or 1."""
    reward = float((task + sample) % 2)
    turns = [
        replace(turn(index, agent), reward=reward)
        for index, agent in enumerate(("solver", "verifier"))
    ]
    return trajectory(
        *turns, sample=sample, outcome=reward, id=f"0/{task}/{sample}", task_id=str(task)
    )


def cpu_seconds(command: Sequence[str], folder: str) -> float:
    """Return the CPU seconds of a process."""
    # Without compiled modules the time would be that of compiling them.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure each command, and compare the slowest with the import of torch."""
    processes = {"import torch": ["-c", "import torch"]}
    processes |= {command[0]: ["-m", "mcore_mas", *command] for command in COMMANDS}
    times: dict[str, list[float]] = {name: [] for name in processes}
    with TemporaryDirectory() as folder:
        write_run(Path(folder))
        for _ in range(1 + REPEATS):
            for name, command in processes.items():
                times[name].append(cpu_seconds(command, folder))
    # The first process of each kind compiles modules.
    medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
    print("CPU seconds: " + ", ".join(f"{name} {median:.2f}" for name, median in medians.items()))
    torch_s = medians.pop("import torch")
    print_result(
        "command_start",
        max(medians.values()) / torch_s,
        goal=GOAL,
        at_most=True,
        reference="import_torch",
        repeats=REPEATS,
    )


if __name__ == "__main__":
    main()
