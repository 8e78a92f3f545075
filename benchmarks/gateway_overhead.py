"""What calls through the gateway cost beyond the same chats by `team.chat`, as a share of the time of generation.

A reply of 100 tokens takes a second, as of an engine that decodes 100 tokens a second for each request. Cost is this
process's own processor time, which other processes on the machine do not lengthen; the clients are another process.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from benchmarks.support.gateway import REPLY_TOKENS, Paced, hold_chats
from rollout.teams.team import Team
from tests.support.gateway import team_of
from tests.support.templates import renderer_of

CHATS, TURNS, WORDS, REPLY_S, REPEATS, GOAL = 32, 8, 200, 1.0, 3, 0.97


async def directly(team: Team) -> None:
    """The same chats, without HTTP."""

    async def hold(number: int) -> None:
        chat = team.session(number).chat("a")
        await chat.say(" ba" * WORDS)
        for _ in range(TURNS - 1):
            await chat.say(" go on")

    await asyncio.gather(*(hold(number) for number in range(CHATS)))


def cost(play: Callable[[], Coroutine[Any, Any, None]]) -> float:
    """Seconds of processor time of one call."""
    began = time.process_time()
    asyncio.run(play())
    return (time.process_time() - began) / (CHATS * TURNS)


def main() -> None:
    """Plays both ways, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        renderer = renderer_of("qwen2.5", Path(folder))
        team = team_of(Paced(renderer, REPLY_S), renderer, max_tokens=REPLY_TOKENS)
        ratios = []
        for _ in range(REPEATS):
            plain = cost(lambda: directly(team))
            ours = cost(lambda: hold_chats(team, CHATS, TURNS, WORDS, 0.0))
            ratios.append(REPLY_S / (REPLY_S + ours - plain))
            print(
                f"a call costs {plain * 1e3:.2f} ms by team.chat and {ours * 1e3:.2f} ms through the gateway"
            )
    print(
        f"name=gateway_overhead ratio={statistics.median(ratios):.3f} goal={GOAL:.2f} reference=team_chat n={REPEATS}"
    )


if __name__ == "__main__":
    main()
