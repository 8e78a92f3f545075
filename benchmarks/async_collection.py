"""Wall-clock time of a training that collects ahead, against one that trains on what it just sampled.

The training loop, collection, credit and packing are real. Engines and trainers only take time, on a
virtual clock: replies of log-normal length in a fixed number of slots, and updates that take as long
as an average collection of the on-policy training.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.result import print_result
from mcore_mas.training.loop import train_steps
from tests.support.simulated import simulated_run
from tests.support.virtual_time import run_virtually

STEPS = 30
TASKS = 4
GROUP = 8
SLOTS = 32
SEEDS = (1, 2, 3)
GOAL = 1.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Measurements of one training.

    Attributes:
        seconds: virtual time of the training.
        mean_wait_s: mean time of a step that is not its update.
        turns_by_age: number of turns by the number of weight updates since they were sampled.
    """

    seconds: float
    mean_wait_s: float
    turns_by_age: Counter[int]


def train(seed: int, staleness: int, update_s: float) -> Training:
    """Run one training whose updates take `update_s` seconds."""
    waits: list[float] = []
    step_ends: list[float] = []
    turns_by_age: Counter[int] = Counter()

    def report(step: int, metrics: Mapping[str, float]) -> None:
        now = asyncio.get_running_loop().time()
        previous_end = step_ends[-1] if step_ends else 0.0
        waits.append(now - previous_end - update_s)
        step_ends.append(now)
        for name, value in metrics.items():
            if name.startswith("staleness/turns_"):
                turns_by_age[int(name.rpartition("_")[2])] += int(value)

    settings = [
        f"seed={seed}",
        f"trainer.steps={STEPS}",
        f"trainer.tasks_per_step={TASKS}",
        f"trainer.group_size={GROUP}",
        f"+trainer.staleness={staleness}",
        *(f"+policies.{policy}.max_in_flight={SLOTS}" for policy in ("solver", "verifier")),
    ]
    with tempfile.TemporaryDirectory() as folder:
        run = simulated_run(Path(folder), *settings, seconds=lambda _: update_s, report=report)
        run_virtually(train_steps(run, 0))
    return Training(seconds=step_ends[-1], mean_wait_s=fmean(waits), turns_by_age=turns_by_age)


def main() -> None:
    """Measure all seeds; the result is the smallest gain at staleness 2."""
    gains: dict[int, list[float]] = {1: [], 2: []}  # by staleness
    for seed in SEEDS:
        collect_s = train(seed, staleness=0, update_s=0.0).mean_wait_s
        on_policy = train(seed, staleness=0, update_s=collect_s)
        print(
            f"seed {seed}: staleness 0 takes {on_policy.seconds:.0f} s, {STEPS} collections and "
            f"updates of {collect_s:.1f} s"
        )
        for staleness in gains:
            ahead = train(seed, staleness, update_s=collect_s)
            assert max(ahead.turns_by_age) <= staleness
            gain = on_policy.seconds / ahead.seconds
            gains[staleness].append(gain)
            shares = ", ".join(
                f"{age} behind {turns / ahead.turns_by_age.total():.0%}"
                for age, turns in sorted(ahead.turns_by_age.items())
            )
            print(
                f"  staleness {staleness}: {ahead.seconds:.0f} s, {gain:.2f}x, waits "
                f"{ahead.mean_wait_s:.1f} s a step; {shares}"
            )
    print(f"worst gain at staleness 1: {min(gains[1]):.2f}, at 2: {min(gains[2]):.2f}")
    print_result(
        "async_collection",
        min(gains[2]),
        goal=GOAL,
        reference="staleness_0",
        repeats=len(SEEDS),
    )


if __name__ == "__main__":
    main()
