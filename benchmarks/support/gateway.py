"""What benchmarks of the gateway share: an engine that takes its time, and clients in a process of their own."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # runs from a checkout, as the clients' process

import httpx

from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Completion, Sampling, VersionSpan
from rollout.teams.team import Team
from tests.support.gateway import open_session

REPLY_TOKENS = 100


class Paced:
    """An engine whose replies, of `REPLY_TOKENS` tokens and all the same, take `seconds`."""

    def __init__(self, renderer: Renderer, seconds: float) -> None:
        self._reply = (
            *renderer.encode("w" * (REPLY_TOKENS - 1))[: REPLY_TOKENS - 1],
            renderer.stop[0],
        )
        self._seconds = seconds
        self.longest = 0  # prompt, in tokens

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.longest = max(self.longest, len(prompt_ids))
        await asyncio.sleep(self._seconds)
        size = len(self._reply)
        spans = (VersionSpan(version=0, start=0, end=size),)
        return Completion(
            token_ids=self._reply, logprobs=(-1.0,) * size, finish_reason="stop", versions=spans
        )


async def clients(url: str, key: str, chats: int, turns: int, words: int, apart_s: float) -> None:
    """Hold chats side by side, which begin `apart_s` after one another with a message of so many words."""
    head, limits = {"Authorization": f"Bearer {key}"}, httpx.Limits(max_connections=chats)
    async with httpx.AsyncClient(
        base_url=url, headers=head, timeout=1200, trust_env=False, limits=limits
    ) as http:

        async def hold(number: int) -> None:
            draw = random.Random(number)
            await asyncio.sleep(number * apart_s)
            text = " ".join(f"{draw.choice('bcdfg')}{draw.choice('aeiou')}" for _ in range(words))
            said: list[Any] = [{"role": "user", "content": f" {text}"}]
            for _ in range(turns):
                reply = await http.post(
                    "/v1/chat/completions", json={"model": "a", "messages": said}
                )
                reply.raise_for_status()
                said += [
                    reply.json()["choices"][0]["message"],
                    {"role": "user", "content": " go on"},
                ]

        await asyncio.gather(*(hold(number) for number in range(chats)))


async def hold_chats(team: Team, chats: int, turns: int, words: int, apart_s: float) -> None:
    """Have clients in another process hold chats with agent `a` through the gateway, and see that all are one path."""
    async with open_session(team, max_turns=chats * turns) as (url, key, team_session, _):
        arguments = json.dumps([url, key, chats, turns, words, apart_s])
        child = subprocess.Popen([sys.executable, __file__, arguments])
        while child.poll() is None:
            await asyncio.sleep(0.1)
        assert child.returncode == 0 and len(team_session.turns) == chats * turns
        assert not any("root" in turn.scores for turn in team_session.turns)


if __name__ == "__main__":
    asyncio.run(clients(*json.loads(sys.argv[1])))
