"""How much faster a small program runs in the sandbox than in a bare, unisolated `subprocess` of the same Python."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from rollout.sandbox import Sandbox
from rollout.sandbox.tiers import interpreter

PROGRAM, STDIN, STDOUT = "print(sum(map(int, input().split())))", "1 2 3\n", "6\n"
RUNS, SLOTS = 100, 2  # per repeat
GOAL_MS, GOAL_RATE, GOAL_RATIO = 9.0, 180.0, 2.0


def bare_ms() -> float:
    """Wall milliseconds of one unisolated start."""
    began = time.perf_counter()
    command = [interpreter(), "-I", "-c", PROGRAM]
    done = subprocess.run(command, input=STDIN, capture_output=True, text=True, check=True)
    assert done.stdout == STDOUT
    return 1000 * (time.perf_counter() - began)


async def sandboxed_ms(box: Sandbox) -> float:
    """Wall milliseconds of one run in the sandbox."""
    began = time.perf_counter()
    result = await box.run(PROGRAM, stdin=STDIN)
    assert result.stdout == STDOUT
    return 1000 * (time.perf_counter() - began)


async def runs_per_s(box: Sandbox) -> float:
    """Runs a second, all asked for at once."""
    began = time.perf_counter()
    await asyncio.gather(*(box.run(PROGRAM, stdin=STDIN) for _ in range(RUNS)))
    return RUNS / (time.perf_counter() - began)


async def measure(tier: str, repeats: int) -> tuple[float, float, float]:
    """Medians of the sandbox's and the bare start's milliseconds, taken in turn, and of the runs a second."""
    async with Sandbox(tier=tier, slots=SLOTS) as box:
        await asyncio.sleep(1.0)  # let the pool warm up
        ours, bare, rates = [], [], []
        for _ in range(repeats):
            for _ in range(RUNS // 5):
                ours.append(await sandboxed_ms(box))
                bare.append(bare_ms())
            rates.append(await runs_per_s(box))
        print(
            f"{box.tier}: median {statistics.median(ours):.1f} ms a run (goal {GOAL_MS:g}), 90th percentile "
            f"{statistics.quantiles(ours, n=10)[-1]:.1f}; bare subprocess {statistics.median(bare):.1f} ms; "
            f"{statistics.median(rates):.0f} runs/s on {SLOTS} slots (goal {GOAL_RATE:g})"
        )
    return statistics.median(ours), statistics.median(bare), statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--tier", default="auto", help="a name in rollout.sandbox.pool.TIERS, or auto"
    )
    options = parser.parse_args()
    ours, bare, _ = asyncio.run(measure(options.tier, options.repeats))
    print(
        f"name=sandbox ratio={bare / ours:.2f} goal={GOAL_RATIO:.2f} reference=bare-python-subprocess "
        f"n={options.repeats}"
    )


if __name__ == "__main__":
    main()
