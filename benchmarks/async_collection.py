"""Wall-clock time of a training that collects ahead, against one that trains what it just sampled.

The training loop, collection, credit and packing are the real ones. Engines and trainers only take time, on a clock
that jumps: replies of log-normal length in a fixed number of slots, and updates that cost as much as the collections of
the on-policy training do on average.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from mcore_mas.training.loop import train_steps
from tests.support.simulated import simulated_run
from tests.support.virtual_time import run_virtually

STEPS, TASKS, GROUP, SLOTS = 30, 4, 8, 32
SEEDS = (1, 2, 3)


def train(seed: int, staleness: int, update_s: float) -> tuple[float, float, Counter[int]]:
    """(Virtual seconds of a training, of its average wait for experience, turns by how far they were behind.)"""
    waits: list[float] = []
    turns: Counter[int] = Counter()
    ended: list[float] = []

    def report(step: int, metrics: Mapping[str, float]) -> None:
        now = asyncio.get_running_loop().time()
        waits.append(now - (ended[-1] if ended else 0.0) - update_s)
        ended.append(now)
        for name, value in metrics.items():
            if name.startswith("staleness/turns_"):
                turns[int(name.rpartition("_")[2])] += int(value)

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
    return ended[-1], fmean(waits), turns


def main() -> None:
    """Takes the worst of the seeds, at staleness 2."""
    gains: dict[int, list[float]] = {1: [], 2: []}
    for seed in SEEDS:
        collect_s = train(seed, 0, 0.0)[1]
        plain_s = train(seed, 0, collect_s)[0]
        print(
            f"seed {seed}: staleness 0 takes {plain_s:.0f} s, {STEPS} collections and updates of {collect_s:.1f} s"
        )
        for staleness, found in gains.items():
            seconds, wait_s, turns = train(seed, staleness, collect_s)
            assert max(turns) <= staleness
            found.append(plain_s / seconds)
            shares = ", ".join(
                f"{age} behind {n / turns.total():.0%}" for age, n in sorted(turns.items())
            )
            print(
                f"  staleness {staleness}: {seconds:.0f} s, {found[-1]:.2f}x, waits {wait_s:.1f} s a step; {shares}"
            )
    print(f"worst gain at staleness 1: {min(gains[1]):.2f}, at 2: {min(gains[2]):.2f}")
    print(
        f"name=async_collection ratio={min(gains[2]):.2f} goal=1.80 reference=staleness_0 n={len(SEEDS)}"
    )


if __name__ == "__main__":
    main()
