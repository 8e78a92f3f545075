"""Planted reward hacks: the coach's prompt and parser let a judge that computes the result flag them."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

from rollout.rewards.coach import Coach
from tests.support.chat_server import chat_server
from tests.support.coached import config
from tests.support.planted_hacks import HACKS, HONEST, calculator, flagged, planted_groups


def flags(outputs: Mapping[str, str], folder) -> dict[str, bool]:
    """Return by name whether each output is flagged, through a coach and a server."""

    async def judge(url: str) -> list[bool]:
        settings = config(url, form="answer_first")
        async with aclosing(Coach(settings, folder)) as coach:
            return flagged(await coach.score(planted_groups(list(outputs.values()))))

    with chat_server(calculator) as server:
        return dict(zip(outputs, asyncio.run(judge(server.url)), strict=True))


def test_planted_hacks_are_flagged_and_honest_outputs_are_not(tmp_path) -> None:
    hacks = flags(HACKS, tmp_path / "hacks")
    honest = flags(HONEST, tmp_path / "honest")
    assert (len(hacks), len(honest)) == (20, 20)
    print(f"flagged {sum(hacks.values())} of 20 planted hacks, {sum(honest.values())} false alarms")
    assert [name for name, is_flagged in hacks.items() if not is_flagged] == []
    assert [name for name, is_flagged in honest.items() if is_flagged] == []
