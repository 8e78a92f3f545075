"""Stop sequences of calls: the text that the program gets, and the tokens that are recorded."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from rollout.gateway.app import shared_gateway
from rollout.records.trajectory import Turn
from tests.support.gateway import open_session, sampling_team, scripted_team

CALL = '<tool_call>{"name": "f", "arguments": {"x": "STOP"}}</tool_call>'
TOOL: Any = {"name": "f", "input_schema": {"type": "object", "properties": {"x": {}}}}


def test_text_and_tokens_are_a_prefix_of_those_without_the_stop(tmp_path: Path) -> None:
    """The model samples the same reply to the same call; 12 random stops, with and without a stream."""
    team, engine, _ = sampling_team(tmp_path, max_tokens=120)

    async def ask(
        http: httpx.AsyncClient, stop: list[str], stream: bool
    ) -> tuple[str, str | None, Turn, int]:
        before = engine.core.stats.decode_tokens
        async with open_session(team) as (url, key, team_session, _):
            api = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=http)
            call: Any = {"model": "a", "messages": [{"role": "user", "content": "q"}], "stop": stop}
            if stream:
                text = ""
                finish = None
                async for chunk in await api.chat.completions.create(**call, stream=True):
                    text += chunk.choices[0].delta.content or ""
                    finish = chunk.choices[0].finish_reason or finish
            else:
                choice = (await api.chat.completions.create(**call)).choices[0]
                text = choice.message.content or ""
                finish = choice.finish_reason
            return text, finish, team_session.turns[0], engine.core.stats.decode_tokens - before

    async def run(http: httpx.AsyncClient) -> None:
        text, finish, free, sampled = await ask(http, [], False)
        assert (finish, free.finish_reason, sampled) == ("length", "length", 120)
        draw = random.Random(0)
        renderer = team.policies["p"].renderer  # type: ignore[attr-defined]
        parts = []
        for size in (1, 2, 3):
            for start in range(len(text)):
                part = text[start : start + size]
                if part.isascii():
                    parts.append(part)
        for number in range(12):
            stop = draw.choice(parts)
            stream = number % 2 == 1
            cut_text, reason, turn, sampled = await ask(http, [stop, "never said"], stream)
            assert (cut_text, reason) == (text[: text.find(stop)], "stop")
            size = next(
                n
                for n in range(1, 121)
                if stop in renderer.decode(free.completion_ids[:n]).lstrip()
            )
            assert turn.completion_ids == free.completion_ids[:size]
            assert turn.logprobs == pytest.approx(free.logprobs[:size], abs=1e-6)
            assert (turn.finish_reason, turn.masked, turn.versions[-1].end) == ("stop", False, size)
            assert sampled <= size + 20  # sampling ends soon behind the stop

    async def play() -> None:
        async with shared_gateway(), httpx.AsyncClient(trust_env=False, timeout=60) as http:
            await run(http)

    asyncio.run(play())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("reply", "stop", "recorded", "text", "reason", "stop_sequence"),
    [
        ("so STOP it", "STOP", "so STOP", "so ", "stop_sequence", "STOP"),
        # The newline is not part of the text.
        ("so\n\nit", "\n", "so\n", "so", "stop_sequence", "\n"),
        ("<think>STOP</think>STO", "STOP", "<think>STOP</think>STO", "STO", "end_turn", None),
        (f"so {CALL}\nSTOP it", "STOP", f"so {CALL}\nSTOP", "so \n", "tool_use", "STOP"),
        (f"so {CALL}", "STOP", f"so {CALL}", "so", "tool_use", None),
        # a malformed tool call is text
        ("<tool_call>STOP", "STOP", "<tool_call>STOP", "", "stop_sequence", "STOP"),
    ],
)
def test_a_stop_counts_in_the_text_only(
    tmp_path: Path,
    reply: str,
    stop: str,
    recorded: str,
    text: str,
    reason: str,
    stop_sequence: str | None,
    stream: bool,
) -> None:
    team, _ = scripted_team(tmp_path, lambda prompt, n: reply)

    async def run() -> tuple[Any, tuple[Turn, ...]]:
        async with (
            open_session(team) as (url, key, team_session, _),
            anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as api,
        ):
            call: Any = {
                "messages": [{"role": "user", "content": "q"}],
                "tools": [TOOL],
                "stop_sequences": [stop],
            }
            if stream:
                async with api.messages.stream(model="a", max_tokens=900, **call) as events:
                    return await events.get_final_message(), team_session.turns
            return await api.messages.create(model="a", max_tokens=900, **call), team_session.turns

    message, (turn,) = asyncio.run(run())
    assert (turn.text, turn.finish_reason) == (recorded, "stop")
    assert "".join(block.text for block in message.content if block.type == "text") == text
    assert (message.stop_reason, message.stop_sequence) == (reason, stop_sequence)
