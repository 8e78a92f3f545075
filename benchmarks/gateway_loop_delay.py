"""How long a request waits for the event loop while 256 chats of 128k tokens go on in the gateway (99th percentile).

Every call carries its whole chat, is compared with what was said before, tokenised and written down; the clients are
another process. The reference does the same work on the event loop, in the same run. The first line has the delay of a
loop that does nothing: on a machine with other work, that is late too.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

import rollout.engines
import rollout.gateway.app
import rollout.gateway.sessions
from benchmarks.support.gateway import REPLY_TOKENS, Paced, hold_chats
from rollout.models.chat_template import Renderer
from tests.support.gateway import team_of
from tests.support.templates import renderer_of

CHATS, TURNS, WORDS, REPLY_S, APART_S, GOAL = (
    256,
    4,
    42_700,
    2.0,
    0.5,
    3.0,
)  # a word and its space are 3 tokens
TICK_S, MOST_MS = 0.005, 25.0
_FAR = {  # from which size on work is done on other threads
    rollout.engines: "_OFF_LOOP_CHARS",
    rollout.gateway.sessions: "_OFF_LOOP_CHARS",
    rollout.gateway.app: "_OFF_LOOP_BYTES",
}


async def watched(work: Coroutine[Any, Any, None]) -> list[float]:
    """How late sleeps of 5 ms end while the work goes on, in ms."""
    found, task = [], asyncio.create_task(work)
    while not task.done():
        due = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        found.append((time.perf_counter() - due) * 1e3)
    task.result()
    return found


def waits(late: Sequence[float], part: float) -> float:
    """How long at most this part of all requests waits for the loop, in ms, when they come at any moment alike.

    A loop that is busy for 100 ms is one late sleep and yet 100 ms in which requests come, the first of which waits
    longest: of all the time, sum(max(0, late - x)) is spent by requests that wait longer than x.
    """
    low, high, total = 0.0, max(late), len(late) * TICK_S * 1e3 + sum(late)
    for _ in range(50):
        x = (low + high) / 2
        low, high = (
            (x, high) if sum(max(0.0, ms - x) for ms in late) > (1 - part) * total else (low, x)
        )
    return high


def p99(what: str, work: Coroutine[Any, Any, None]) -> float:
    """The 99th percentile of the waits, in ms."""
    began = time.perf_counter()
    late = asyncio.run(watched(work))
    listed = ", ".join(f"{waits(late, part):.1f}" for part in (0.5, 0.9, 0.99, 0.999))
    took = time.perf_counter() - began
    print(
        f"{what}: {listed} ms (50, 90, 99, 99.9 %), {max(late):.1f} ms at most, {took:.0f} s",
        flush=True,
    )
    return waits(late, 0.99)


async def chats(renderer: Renderer, number: int) -> None:
    """The chats, through the gateway."""
    engine = Paced(renderer, REPLY_S)
    await hold_chats(
        team_of(engine, renderer, max_tokens=REPLY_TOKENS), number, TURNS, WORDS, APART_S
    )
    assert engine.longest > 128_000


def main() -> None:
    """Measures both ways once; the reference on an eighth of the chats, as slow as it is."""
    with tempfile.TemporaryDirectory() as folder:
        renderer = renderer_of("qwen2.5", Path(folder))
        p99("idle", asyncio.sleep(10))
        ours = p99(f"{CHATS} chats", chats(renderer, CHATS))
        for module, name in _FAR.items():
            setattr(module, name, sys.maxsize)
        on_the_loop = p99("on the loop", chats(renderer, CHATS // 8))
    print(f"name=gateway_loop_delay_ms ratio={ours:.2f} at_most={MOST_MS:.2f} reference=ms n=1")
    print(
        f"name=gateway_loop_delay ratio={on_the_loop / ours:.2f} goal={GOAL:.2f} reference=on_the_loop n=1"
    )


if __name__ == "__main__":
    main()
