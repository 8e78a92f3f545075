"""Time that a request waits for the gateway's event loop (99th percentile) during 256 chats of 128k tokens.

Every call carries its whole chat, which the gateway compares with the messages so far, tokenizes and
records; the clients are another process. The reference does the same work on the event loop, in the
same run. The first line shows the delay of an idle loop, which depends on other load of the machine.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.gateway import REPLY_TOKENS, PacedEngine, hold_chats
from benchmarks.support.result import print_result
from rollout.engines import rendering
from rollout.gateway import app, sessions
from rollout.models.chat_template import Renderer
from tests.support.gateway import team_of
from tests.support.templates import renderer_of

CHATS = 256
TURNS = 4
WORDS = 42_700  # a word and its space are 3 tokens
REPLY_S = 2.0
INTERVAL_S = 0.5  # between the starts of two chats
GOAL = 3.0
SLEEP_S = 0.005
MAX_DELAY_MS = 25.0
# Constants, by module: the size from which work is done in a thread instead of on the event loop.
THREAD_SIZES = {
    rendering: "_LONG_CHAT_CHARS",
    sessions: "_OFF_LOOP_CHARS",
    app: "_OFF_LOOP_BYTES",
}


async def measure_delays(work: Coroutine[Any, Any, None]) -> list[float]:
    """Return the delays of short sleeps in ms, while the work runs in the same event loop."""
    delays_ms = []
    task = asyncio.create_task(work)
    while not task.done():
        due = time.perf_counter() + SLEEP_S
        await asyncio.sleep(SLEEP_S)
        delays_ms.append((time.perf_counter() - due) * 1e3)
    task.result()
    return delays_ms


def wait_quantile(delays_ms: Sequence[float], quantile: float) -> float:
    """Return a quantile of the waits of requests that arrive at random times, in ms.

    A loop that is busy for 100 ms gives one delayed sleep, but all requests that arrive in these 100
    ms wait, the first of them longest. Of all time, sum(max(0, delay - x)) is the part in which a
    request would wait longer than x. The quantile is found by bisection on x.
    """
    total_ms = len(delays_ms) * SLEEP_S * 1e3 + sum(delays_ms)
    low = 0.0
    high = max(delays_ms)
    for _ in range(50):
        middle = (low + high) / 2
        longer_ms = sum(max(0.0, delay - middle) for delay in delays_ms)
        if longer_ms > (1 - quantile) * total_ms:
            low = middle
        else:
            high = middle
    return high


def measure_p99(label: str, work: Coroutine[Any, Any, None]) -> float:
    """Run the work, print quantiles of the waits, and return the 99th percentile in ms."""
    began = time.perf_counter()
    delays_ms = asyncio.run(measure_delays(work))
    seconds = time.perf_counter() - began
    quantiles = [wait_quantile(delays_ms, quantile) for quantile in (0.5, 0.9, 0.99, 0.999)]
    shown = ", ".join(f"{wait_ms:.1f}" for wait_ms in quantiles)
    print(
        f"{label}: {shown} ms (50, 90, 99, 99.9 %), {max(delays_ms):.1f} ms at most, {seconds:.0f} s",
        flush=True,
    )
    return quantiles[2]


@contextmanager
def all_work_on_the_loop() -> Iterator[None]:
    """Do the work of all sizes on the event loop, for this block."""
    with ExitStack() as stack:
        for module, name in THREAD_SIZES.items():
            stack.enter_context(patch.object(module, name, sys.maxsize))
        yield


async def run_chats(renderer: Renderer, count: int) -> None:
    """Hold chats through the gateway."""
    engine = PacedEngine(renderer, REPLY_S)
    team = team_of(engine, renderer, max_tokens=REPLY_TOKENS)
    await hold_chats(team, count, TURNS, WORDS, INTERVAL_S)
    assert engine.longest > 128_000


def main() -> None:
    """Measure both ways once; the reference has an eighth of the chats, because it is slow."""
    with tempfile.TemporaryDirectory() as folder:
        renderer = renderer_of("qwen2.5", Path(folder))
        measure_p99("idle", asyncio.sleep(10))
        gateway_ms = measure_p99(f"{CHATS} chats", run_chats(renderer, CHATS))
        with all_work_on_the_loop():
            on_loop_ms = measure_p99("on the loop", run_chats(renderer, CHATS // 8))
    print_result(
        "gateway_loop_delay_ms",
        gateway_ms,
        goal=MAX_DELAY_MS,
        at_most=True,
        reference="ms",
        repeats=1,
    )
    print_result(
        "gateway_loop_delay",
        on_loop_ms / gateway_ms,
        goal=GOAL,
        reference="on_the_loop",
        repeats=1,
    )


if __name__ == "__main__":
    main()
