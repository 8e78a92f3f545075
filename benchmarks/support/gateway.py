"""Engine with a fixed response time, and clients of the gateway in a process of their own."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Runs from a checkout, as the process of the clients.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx

from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Completion, Sampling, VersionSpan
from rollout.teams.team import Team
from tests.support.gateway import open_session

REPLY_TOKENS = 100


class PacedEngine:
    """Engine that returns the same reply of `REPLY_TOKENS` tokens to every request, after `seconds`.

    Attributes:
        longest: tokens of the longest prompt so far.
    """

    def __init__(self, renderer: Renderer, seconds: float) -> None:
        text_ids = renderer.encode("w" * (REPLY_TOKENS - 1))[: REPLY_TOKENS - 1]
        reply = (*text_ids, renderer.stop[0])
        self._completion = Completion(
            token_ids=reply,
            logprobs=(-1.0,) * len(reply),
            finish_reason="stop",
            versions=(VersionSpan(version=0, start=0, end=len(reply)),),
        )
        self._seconds = seconds
        self.longest = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.longest = max(self.longest, len(prompt_ids))
        await asyncio.sleep(self._seconds)
        return self._completion


async def run_clients(
    url: str, key: str, chats: int, turns: int, words: int, interval_s: float
) -> None:
    """Hold concurrent chats with agent `a`.

    Args:
        url: URL of the gateway's session.
        key: API key of the session.
        chats: number of chats.
        turns: calls of each chat.
        words: words of the first message of each chat.
        interval_s: seconds between the starts of two chats.
    """
    async with httpx.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"},
        timeout=1200,
        trust_env=False,
        limits=httpx.Limits(max_connections=chats),
    ) as http:

        async def hold_chat(number: int) -> None:
            draw = random.Random(number)
            await asyncio.sleep(number * interval_s)
            text = " ".join(f"{draw.choice('bcdfg')}{draw.choice('aeiou')}" for _ in range(words))
            messages: list[Any] = [{"role": "user", "content": f" {text}"}]
            for _ in range(turns):
                body = {"model": "a", "messages": messages}
                reply = await http.post("/v1/chat/completions", json=body)
                reply.raise_for_status()
                messages.append(reply.json()["choices"][0]["message"])
                messages.append({"role": "user", "content": " go on"})

        await asyncio.gather(*(hold_chat(number) for number in range(chats)))


async def hold_chats(team: Team, chats: int, turns: int, words: int, interval_s: float) -> None:
    """Hold chats through the gateway, from another process; assert that each of them stays one path.

    The arguments are those of `run_clients`.
    """
    async with open_session(team, max_turns=chats * turns) as (url, key, team_session, _):
        arguments = json.dumps([url, key, chats, turns, words, interval_s])
        child = subprocess.Popen([sys.executable, __file__, arguments])
        while child.poll() is None:
            await asyncio.sleep(0.1)
        assert child.returncode == 0
        assert len(team_session.turns) == chats * turns
        assert not any("root" in turn.scores for turn in team_session.turns)


if __name__ == "__main__":
    asyncio.run(run_clients(*json.loads(sys.argv[1])))
