"""Streams: text comes as it is sampled, ends as the whole reply would, and whoever leaves ends the sampling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from rollout.gateway.sessions import settled
from rollout.records.trajectory import Completion, Sampling, Turn
from tests.support.gateway import opened, sampling_team, team_of
from tests.support.scripted_engine import ScriptedEngine
from tests.support.templates import renderer_of

QUESTION: Any = [{"role": "user", "content": "q"}]
Deltas = AsyncIterator[str]
Clients = tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]


async def completions(clients: Clients) -> Deltas:
    async with await clients[0].chat.completions.create(
        model="a", messages=QUESTION, stream=True
    ) as chunks:
        async for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content


async def responses(clients: Clients) -> Deltas:
    async with await clients[0].responses.create(model="a", input="q", stream=True) as events:
        numbers = []
        async for event in events:
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                yield event.delta
        assert numbers == list(range(len(numbers)))


async def messages(clients: Clients) -> Deltas:
    async with clients[1].messages.stream(model="a", max_tokens=900, messages=QUESTION) as events:
        async for text in events.text_stream:
            yield text


STREAMS: dict[str, Callable[[Clients], Deltas]] = {
    "completions": completions,
    "responses": responses,
    "messages": messages,
}


def play(folder: Path, program: Callable[[Clients, Any], Awaitable[Any]], max_tokens: int) -> Any:
    """What comes of a program, and the turns, of a model that says about as many bytes as it may."""
    team, engine, _ = sampling_team(folder, max_tokens=max_tokens)

    async def run() -> Any:
        async with (
            opened(team) as (url, key, seat, session),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as one,
            anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as other,
        ):
            came = await program((one, other), seat)
            await session.close()
            return came, seat.turns, engine.core.stats.decode_tokens

    return asyncio.run(run())


@pytest.mark.parametrize("dialect", STREAMS)
def test_a_stream_brings_what_the_whole_reply_would(tmp_path: Path, dialect: str) -> None:
    async def whole(clients: Clients, _: Any) -> str:
        reply = await clients[0].chat.completions.create(model="a", messages=QUESTION)
        return reply.choices[0].message.content or ""

    async def streamed(clients: Clients, seat: Any) -> tuple[str, int]:
        early, text = 0, ""
        async for delta in STREAMS[dialect](clients):
            text += delta
            early += not seat.turns  # which are written down when they are whole
        return text, early

    told: tuple[Turn, ...]
    text, turns, _ = play(tmp_path, whole, 200)
    (came, early), told, _ = play(tmp_path, streamed, 200)
    assert came == text and early > 2
    assert [(t.prompt_ids, t.completion_ids, t.logprobs, t.text, t.masked) for t in told] == [
        (t.prompt_ids, t.completion_ids, t.logprobs, t.text, False) for t in turns
    ]


@pytest.mark.parametrize("dialect", STREAMS)
def test_who_leaves_a_stream_ends_its_sampling(tmp_path: Path, dialect: str) -> None:
    async def leaves(clients: Clients, seat: Any) -> None:
        async for _ in STREAMS[dialect](clients):
            break
        async with asyncio.timeout(60):
            while not seat.turns:
                await asyncio.sleep(0.01)

    _, (turn,), sampled = play(tmp_path, leaves, 3000)
    assert (turn.finish_reason, turn.masked, turn.scores["unread"], turn.valid) == (
        "abort",
        True,
        1.0,
        False,
    )
    assert 0 < len(turn.completion_ids) == len(turn.logprobs) == sampled < 3000


class Spelling(ScriptedEngine):
    """Tells every token by itself."""

    async def stream(self, prompt_ids: Sequence[int], sampling: Sampling, hear: Any) -> Completion:
        whole = await self.generate(prompt_ids, sampling)
        for place in range(len(whole.token_ids)):
            hear(place, whole.token_ids[place : place + 1])
            await asyncio.sleep(0)
        return whole


@pytest.mark.parametrize("dialect", STREAMS)
def test_text_that_proves_to_be_a_thought_stays_in_its_stream(tmp_path: Path, dialect: str) -> None:
    """A model may end a thought that it has not begun, after its words have gone; the chat goes on all the same."""
    renderer = renderer_of("qwen2.5", tmp_path)
    team = team_of(
        Spelling(lambda prompt, n: (*renderer.encode("so</think>yes"), renderer.stop[0])), renderer
    )

    async def run() -> tuple[str, Any]:
        async with (
            opened(team) as (url, key, seat, _),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as one,
            anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as other,
        ):
            text = "".join([delta async for delta in STREAMS[dialect]((one, other))])
            chat: Any = [
                *QUESTION,
                {"role": "assistant", "content": text},
                {"role": "user", "content": "?"},
            ]
            await one.chat.completions.create(model="a", messages=chat)
            return text, seat.turns

    text, (first, second) = asyncio.run(run())
    assert text == "so</think>\n\nyes"
    sampled = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(sampled)] == sampled and not second.scores.get("root")


def test_text_is_told_as_far_as_it_will_stay() -> None:
    stop, call = "END", "<tool_call>"
    for raw, sure in (
        ("", ("", "")),
        ("  a b ", ("", "a b")),  # the reply's own spaces go
        ("a E", ("", "a")),  # it may become the caller's stop
        ("a ENTER", ("", "a ENTER")),
        ("a END of", ("", "a")),
        ("look <tool", ("", "look")),
        ('look <tool_call>{"name"', ("", "look")),
        ("<thi", ("", "")),
        ("<think>\nhm", ("", "")),
        ("<think>\nhm\n</think>\n\nso ", ("hm", "so")),
        ("a </thin", ("", "a")),
    ):
        assert settled(raw, (stop, call)) == sure, raw
