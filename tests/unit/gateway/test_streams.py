"""Streams: text is sent as it is sampled and equals the complete reply; leaving ends the sampling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from rollout.gateway.calls import settled_text
from rollout.records.trajectory import Completion, Sampling, Turn
from tests.support.gateway import open_session, sampling_team, team_of
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
    """Run a program with a random model; return its result, the turns and the number of sampled tokens."""
    team, engine, _ = sampling_team(folder, max_tokens=max_tokens)

    async def run() -> Any:
        async with (
            open_session(team) as (url, key, team_session, session),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as openai_client,
            anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as anthropic_client,
        ):
            result = await program((openai_client, anthropic_client), team_session)
            await session.close()
            return result, team_session.turns, engine.core.stats.decode_tokens

    return asyncio.run(run())


@pytest.mark.parametrize("dialect", STREAMS)
def test_a_stream_has_the_text_of_the_complete_reply(tmp_path: Path, dialect: str) -> None:
    async def whole(clients: Clients, _: Any) -> str:
        reply = await clients[0].chat.completions.create(model="a", messages=QUESTION)
        return reply.choices[0].message.content or ""

    async def streamed(clients: Clients, team_session: Any) -> tuple[str, int]:
        text = ""
        early = 0  # number of deltas before the reply was complete
        async for delta in STREAMS[dialect](clients):
            text += delta
            early += not team_session.turns  # a turn is recorded when its reply is complete
        return text, early

    streamed_turns: tuple[Turn, ...]
    text, turns, _ = play(tmp_path, whole, 200)
    (streamed_text, early), streamed_turns, _ = play(tmp_path, streamed, 200)
    assert streamed_text == text and early > 2
    assert [
        (t.prompt_ids, t.completion_ids, t.logprobs, t.text, t.masked) for t in streamed_turns
    ] == [(t.prompt_ids, t.completion_ids, t.logprobs, t.text, False) for t in turns]


@pytest.mark.parametrize("dialect", STREAMS)
def test_leaving_a_stream_ends_its_sampling(tmp_path: Path, dialect: str) -> None:
    async def leaves(clients: Clients, team_session: Any) -> None:
        async for _ in STREAMS[dialect](clients):
            break
        async with asyncio.timeout(60):
            while not team_session.turns:
                await asyncio.sleep(0.01)

    _, (turn,), sampled = play(tmp_path, leaves, 3000)
    assert (turn.finish_reason, turn.masked, turn.scores["unread"], turn.valid) == (
        "abort",
        True,
        1.0,
        False,
    )
    assert 0 < len(turn.completion_ids) == len(turn.logprobs) == sampled < 3000


class TokenwiseEngine(ScriptedEngine):
    """A scripted engine that streams one token at a time."""

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_tokens: Any
    ) -> Completion:
        completion = await self.generate(prompt_ids, sampling)
        for position, token in enumerate(completion.token_ids):
            on_tokens(position, (token,))
            await asyncio.sleep(0)
        return completion


@pytest.mark.parametrize("dialect", STREAMS)
def test_streamed_text_stays_text_if_the_model_then_ends_a_thought(
    tmp_path: Path, dialect: str
) -> None:
    """A model may end a thought that it has not begun, after its text was streamed; the chat continues."""
    renderer = renderer_of("qwen2.5", tmp_path)
    team = team_of(
        TokenwiseEngine(lambda prompt, n: (*renderer.encode("so</think>yes"), renderer.stop[0])),
        renderer,
    )

    async def run() -> tuple[str, Any]:
        async with (
            open_session(team) as (url, key, team_session, _),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as openai_client,
            anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as anthropic_client,
        ):
            text = "".join(
                [delta async for delta in STREAMS[dialect]((openai_client, anthropic_client))]
            )
            chat: Any = [
                *QUESTION,
                {"role": "assistant", "content": text},
                {"role": "user", "content": "?"},
            ]
            await openai_client.chat.completions.create(model="a", messages=chat)
            return text, team_session.turns

    text, (first, second) = asyncio.run(run())
    assert text == "so</think>\n\nyes"
    sampled = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(sampled)] == sampled and not second.scores.get("root")


def test_settled_text_holds_back_what_later_tokens_can_change() -> None:
    end_marks = ("END", "<tool_call>")
    for raw, expected in (
        ("", ("", "")),
        ("  a b ", ("", "a b")),  # spaces around a reply are dropped
        ("a E", ("", "a")),  # E may become the stop
        ("a ENTER", ("", "a ENTER")),
        ("a END of", ("", "a")),
        ("look <tool", ("", "look")),
        ('look <tool_call>{"name"', ("", "look")),
        ("<thi", ("", "")),
        ("<think>\nhm", ("", "")),
        ("<think>\nhm\n</think>\n\nso ", ("hm", "so")),
        ("a </thin", ("", "a")),
    ):
        assert settled_text(raw, end_marks) == expected, raw
