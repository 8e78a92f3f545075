"""CPU time and memory of estimating the advantages of a million turns on one core, against a budget of 2 s."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.process import cpu_time, memory_bytes
from benchmarks.support.result import print_result
from mcore_mas.equations.advantages import ESTIMATORS, TOKEN_LEVEL_ESTIMATORS
from mcore_mas.equations.turns import Turns

_GROUP_SIZE = 8
_TURNS_PER_TRAJECTORY = 4
_TOKENS_PER_TURN = 8
_BUDGET_S = 2.0


def make_turns(n: int) -> Turns:
    """Return n turns of two agents, in trajectories of four turns and groups of eight, with eight tokens each."""
    index = torch.arange(n)
    trajectory = index // _TURNS_PER_TRAJECTORY
    turn = index % _TURNS_PER_TRAJECTORY
    task = trajectory // _GROUP_SIZE
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((n,), _TOKENS_PER_TURN)
    return Turns(
        rewards=torch.rand(n, dtype=torch.float64, generator=generator),
        keys={
            "policy": torch.zeros(n, dtype=torch.int64),
            "task": task,
            "trajectory": trajectory,
            "agent": turn % 2,
            "turn": turn,
            "round": turn // 2,
            "state": task * _TURNS_PER_TRAJECTORY + turn,
            "node": index,
            "parent": torch.where(turn > 0, index - 1, -1),
        },
        lengths=lengths,
        step_rewards=torch.rand(n, 4, dtype=torch.float64, generator=generator),
        greedy_rewards=torch.rand(n, dtype=torch.float64, generator=generator),
        values=torch.rand(int(lengths.sum()), dtype=torch.float64, generator=generator),
    )


def run_all_estimators(n: int) -> None:
    """Run every estimator once on n turns, and print the peak memory of this process in GiB."""
    turns = make_turns(n)
    for estimator in ESTIMATORS.values():
        estimator(turns)
    print(memory_bytes() / 2**30)


def peak_gib(n: int) -> float:
    """Return the peak memory of a new process that runs every estimator on n turns."""
    command = [sys.executable, __file__, "--peak", "--turns", str(n)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--peak",
        action="store_true",
        help="only run every estimator once, and print the peak memory",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        run_all_estimators(options.turns)
        return

    all_turns = make_turns(options.turns)
    half_turns = make_turns(options.turns // 2)
    slowest_s = 0.0
    for name, estimator in ESTIMATORS.items():
        all_s = cpu_time(lambda estimator=estimator: estimator(all_turns), options.repeats)
        half_s = cpu_time(lambda estimator=estimator: estimator(half_turns), options.repeats)
        unit = "tokens" if name in TOKEN_LEVEL_ESTIMATORS else "turns"
        print(f"{name:22s} {all_s:6.2f} s   half of them {half_s:6.2f} s   (by {unit})")
        slowest_s = max(slowest_s, all_s)

    base_gib = peak_gib(1000)
    half_gib = peak_gib(options.turns // 2) - base_gib
    all_gib = peak_gib(options.turns) - base_gib
    print(
        f"peak memory above that of 1000 turns: {all_gib:.2f} GiB, half of them {half_gib:.2f} GiB"
    )
    print_result(
        "credit",
        _BUDGET_S / slowest_s,
        goal=1.0,
        reference="2s_per_million_turns",
        repeats=options.repeats,
    )


if __name__ == "__main__":
    main()
