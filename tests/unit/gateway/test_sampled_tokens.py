"""Tokens of a tiny model behind the gateway: each is recorded in a turn, and is computed once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.support.gateway import open_session, sampling_team
from tests.support.gateway_fuzz import fuzz, worst_logprob

TURNS = 16


def test_a_chat_prefills_each_token_once(tmp_path: Path) -> None:
    team, engine, model = sampling_team(tmp_path, max_tokens=8)

    async def run() -> Any:
        async with (
            open_session(team) as (url, key, team_session, _),
            AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as api,
        ):
            chat: list[Any] = []
            for number in range(TURNS):
                chat.append({"role": "user", "content": f"and {number}?"})
                reply = await api.chat.completions.create(model="a", messages=chat)
                chat.append({"role": "assistant", "content": reply.choices[0].message.content})
            return team_session.turns

    turns = asyncio.run(run())
    sampled = sum(len(turn.completion_ids) for turn in turns)
    earlier = sampled - len(turns[-1].completion_ids)
    # the last token of each reply is prefilled with the next prompt
    assert engine.core.stats.prefill_tokens == len(turns[-1].prompt_ids) - earlier + (TURNS - 1)
    assert engine.core.stats.decode_tokens == sampled
    assert worst_logprob(model, turns) < 1e-6


@pytest.mark.slow
def test_every_sampled_token_of_random_programs_is_accounted_for(tmp_path: Path) -> None:
    """100 random programs: rewritten histories, retries, parallel calls, cancelled streams, invalid calls."""
    report, model = asyncio.run(fuzz(tmp_path, 100))
    assert report.unaccounted == []
    assert max(report.statuses) < 500 and {200, 400, 401, 404} <= set(report.statuses)
    assert min(report.moves.values()) > 25
    assert "root" in {name for turn in report.turns for name in turn.scores}
    assert worst_logprob(model, report.turns[::7]) < 1e-6
