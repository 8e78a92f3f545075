"""Time of a small program in the sandbox, against a bare, unisolated `subprocess` of the same Python."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from pathlib import Path

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.result import print_result
from rollout.sandbox import Sandbox
from rollout.sandbox.tiers import interpreter

PROGRAM = "print(sum(map(int, input().split())))"
STDIN = "1 2 3\n"
STDOUT = "6\n"
RUNS = 100  # runs that a repeat requests at once; a fifth as many are timed one by one
SLOTS = 2
GOAL_MS = 9.0
GOAL_RATE = 180.0
GOAL_RATIO = 2.0


def run_bare() -> float:
    """Run the program in a subprocess; return the milliseconds."""
    began = time.perf_counter()
    command = [interpreter(), "-I", "-c", PROGRAM]
    process = subprocess.run(command, input=STDIN, capture_output=True, text=True, check=True)
    assert process.stdout == STDOUT
    return 1000 * (time.perf_counter() - began)


async def run_sandboxed(box: Sandbox) -> float:
    """Run the program in the sandbox; return the milliseconds."""
    began = time.perf_counter()
    result = await box.run(PROGRAM, stdin=STDIN)
    assert result.stdout == STDOUT
    return 1000 * (time.perf_counter() - began)


async def measure_rate(box: Sandbox) -> float:
    """Request RUNS runs at once; return the runs per second."""
    began = time.perf_counter()
    await asyncio.gather(*(box.run(PROGRAM, stdin=STDIN) for _ in range(RUNS)))
    return RUNS / (time.perf_counter() - began)


async def measure(tier: str, repeats: int) -> float:
    """Alternate runs in the sandbox and bare runs; return the bare median divided by the sandbox's."""
    async with Sandbox(tier=tier, slots=SLOTS) as box:
        await asyncio.sleep(1.0)  # the pool fills
        sandboxed_ms = []
        bare_ms = []
        rates = []
        for _ in range(repeats):
            for _ in range(RUNS // 5):
                sandboxed_ms.append(await run_sandboxed(box))
                bare_ms.append(run_bare())
            rates.append(await measure_rate(box))
        median_ms = statistics.median(sandboxed_ms)
        bare_median_ms = statistics.median(bare_ms)
        print(
            f"{box.tier}: median {median_ms:.1f} ms a run (goal {GOAL_MS:g}), 90th percentile "
            f"{statistics.quantiles(sandboxed_ms, n=10)[-1]:.1f}; bare subprocess "
            f"{bare_median_ms:.1f} ms; {statistics.median(rates):.0f} runs/s on {SLOTS} slots "
            f"(goal {GOAL_RATE:g})"
        )
    return bare_median_ms / median_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--tier", default="auto", help="a name in rollout.sandbox.tiers.TIERS, or auto"
    )
    options = parser.parse_args()
    ratio = asyncio.run(measure(options.tier, options.repeats))
    print_result(
        "sandbox",
        ratio,
        goal=GOAL_RATIO,
        reference="bare-python-subprocess",
        repeats=options.repeats,
    )


if __name__ == "__main__":
    main()
