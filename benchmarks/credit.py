"""Estimating the advantages of a million turns on one core, from their ids and rewards, against a budget of 2 s."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mcore_mas.equations.advantages import ESTIMATORS
from mcore_mas.equations.turns import Turns

_GROUP, _TURNS = 8, 4  # trajectories per task, turns per trajectory
_BUDGET_S = 2.0
_NEED_TOKENS = ("gae", "reinforce_pp", "reinforce_pp_baseline")


def make(n: int) -> Turns:
    """n turns of two agents in trajectories of four turns and groups of eight, eight tokens a turn."""
    place = torch.arange(n)
    trajectory, turn = place // _TURNS, place % _TURNS
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((n,), 8)
    return Turns(
        scores=torch.rand(n, dtype=torch.float64, generator=generator),
        keys={
            "policy": torch.zeros(n, dtype=torch.int64),
            "task": trajectory // _GROUP,
            "trajectory": trajectory,
            "agent": turn % 2,
            "turn": turn,
            "round": turn // 2,
            "state": (trajectory // _GROUP) * _TURNS + turn,
            "node": place,
            "parent": torch.where(turn > 0, place - 1, -1),
        },
        lengths=lengths,
        steps=torch.rand(n, 4, dtype=torch.float64, generator=generator),
        greedy=torch.rand(n, dtype=torch.float64, generator=generator),
        values=torch.rand(int(lengths.sum()), dtype=torch.float64, generator=generator),
    )


def seconds(function: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        function()
        best = min(best, time.process_time() - started)
    return best


def peak_gib(n: int) -> float:
    """Peak memory of a process of its own that estimates n turns."""
    command = [sys.executable, __file__, "--peak", "--turns", str(n)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--peak",
        action="store_true",
        help="only run every estimator once and print the peak memory",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        turns = make(options.turns)
        for estimator in ESTIMATORS.values():
            estimator(turns)
        # getrusage would still know the peak of the process that started this one
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        print(int(status["VmHWM"].split()[0]) / 2**20)
        return
    half, full = make(options.turns // 2), make(options.turns)
    slowest = 0.0
    for name, estimator in ESTIMATORS.items():
        taken = seconds(lambda estimator=estimator: estimator(full), options.repeats)
        part = seconds(lambda estimator=estimator: estimator(half), options.repeats)
        unit = "8 M tokens" if name in _NEED_TOKENS else "turns"
        print(f"{name:22s} {taken:6.2f} s   half of them {part:6.2f} s   ({unit})")
        slowest = max(slowest, taken)
    empty, part, whole = (peak_gib(n) for n in (1000, options.turns // 2, options.turns))
    print(
        f"peak memory above that of 1000 turns: {whole - empty:.2f} GiB, half of them {part - empty:.2f} GiB"
    )
    print(
        f"name=credit ratio={_BUDGET_S / slowest:.2f} goal=1.00 reference=2s_per_million_turns n={options.repeats}"
    )


if __name__ == "__main__":
    main()
