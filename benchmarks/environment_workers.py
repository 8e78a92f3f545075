"""Delay of the run's event loop (99th percentile) while 16 trajectories play a busy environment.

A step keeps a processor busy in Python for 20 ms, as environments of web pages and of texts do. Two worker processes
play the environment; the reference plays it in the run's own process. Other lines have the trajectories per second of
both, and the delay of an idle loop, which depends on other load.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gateway_loop_delay import measure_p99
from benchmarks.support.result import print_result
from rollout.config.environment import EnvConfig, build_env
from rollout.records.trajectory import Task

TRAJECTORIES = 16
STEPS = 10
BUSY_S = 0.02
MODEL_S = 0.02  # time between two steps, in which an engine would reply
WORKERS = 2
REPEATS = 3
GOAL = 2.0
TASK = Task(id="t", prompt="Go.", answers=("1",), env="busy", source="s", split="train")


async def play(make_env: Callable[[Task], Any]) -> None:
    """Play one trajectory."""
    env = make_env(TASK)
    if hasattr(env, "open"):
        await env.open(TASK)
    env.reset(TASK)
    for _ in range(STEPS):
        await asyncio.sleep(MODEL_S)
        await env.step("go")
    if hasattr(env, "close"):
        await env.close()


async def play_all(make_env: Callable[[Task], Any], rates: list[float]) -> None:
    """Play all trajectories at the same time; append their number per second."""
    began = time.perf_counter()
    await asyncio.gather(*(play(make_env) for _ in range(TRAJECTORIES)))
    rates.append(TRAJECTORIES / (time.perf_counter() - began))


def measure(workers: int) -> tuple[float, float]:
    """Return the delay of the event loop in ms, and the trajectories per second."""
    make_env = build_env(
        EnvConfig(
            name="tests.support.busy_worlds:BusyEnv", options={"busy_s": BUSY_S}, workers=workers
        )
    )
    rates: list[float] = []

    async def work() -> None:
        await play(make_env)  # starts a worker
        await play_all(make_env, rates)  # starts all workers
        await play_all(make_env, rates)

    delay_ms = measure_p99(f"{workers or 'no'} workers", work())
    return delay_ms, rates[-1]


def main() -> None:
    """Measure both ways in turns, and print the median of their ratios."""
    measure_p99("idle", asyncio.sleep(3))
    ratios = []
    for _ in range(REPEATS):
        here_ms, here_rate = measure(0)
        there_ms, there_rate = measure(WORKERS)
        ratios.append(here_ms / there_ms)
        print(
            f"trajectories per second: {there_rate:.2f} in {WORKERS} workers, {here_rate:.2f} in the "
            "run's process",
            flush=True,
        )
    print_result(
        "environment_workers",
        median(ratios),
        goal=GOAL,
        reference="in_the_runs_process",
        repeats=REPEATS,
    )


if __name__ == "__main__":
    main()
