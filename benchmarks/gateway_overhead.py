"""Cost of calls through the gateway beyond the same chats by `team.chat`, as a share of the generation time.

A reply of 100 tokens takes a second, as in an engine that decodes 100 tokens per second for each
request. The cost is the CPU time of this process; the clients are another process.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.gateway import REPLY_TOKENS, PacedEngine, hold_chats
from benchmarks.support.result import print_result
from rollout.teams.team import Team
from tests.support.gateway import team_of
from tests.support.templates import renderer_of

CHATS = 32
TURNS = 8
WORDS = 200
REPLY_S = 1.0
REPEATS = 3
GOAL = 0.97


async def hold_chats_directly(team: Team) -> None:
    """Hold the same chats without HTTP."""

    async def hold_chat(number: int) -> None:
        chat = team.session(number).chat("a")
        await chat.say(" ba" * WORDS)
        for _ in range(TURNS - 1):
            await chat.say(" go on")

    await asyncio.gather(*(hold_chat(number) for number in range(CHATS)))


def cpu_per_call(chats: Coroutine[Any, Any, None]) -> float:
    """Return the CPU seconds of this process per call."""
    began = time.process_time()
    asyncio.run(chats)
    return (time.process_time() - began) / (CHATS * TURNS)


def main() -> None:
    """Alternate both ways; the result is the median."""
    with tempfile.TemporaryDirectory() as folder:
        renderer = renderer_of("qwen2.5", Path(folder))
        team = team_of(PacedEngine(renderer, REPLY_S), renderer, max_tokens=REPLY_TOKENS)
        ratios = []
        for _ in range(REPEATS):
            direct_s = cpu_per_call(hold_chats_directly(team))
            gateway_s = cpu_per_call(hold_chats(team, CHATS, TURNS, WORDS, interval_s=0.0))
            ratios.append(REPLY_S / (REPLY_S + gateway_s - direct_s))
            print(
                f"a call costs {direct_s * 1e3:.2f} ms by team.chat and {gateway_s * 1e3:.2f} ms "
                "through the gateway"
            )
    print_result(
        "gateway_overhead",
        statistics.median(ratios),
        goal=GOAL,
        reference="team_chat",
        repeats=REPEATS,
    )


if __name__ == "__main__":
    main()
