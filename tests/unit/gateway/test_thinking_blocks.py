"""Thinking blocks of Anthropic's Messages API have signatures, in streams and complete replies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest

from rollout.records.trajectory import Turn
from tests.support.gateway import open_session, scripted_team

CALL = '<tool_call>{"name": "add", "arguments": {"a": 40, "b": 2}}</tool_call>'
THOUGHTS = "I add.\n\nBoth numbers — 40 and 2."
WITH_TEXT = f"<think>\n{THOUGHTS}\n</think>\n\nLet me see."
WITH_CALL = f"<think>\n{THOUGHTS}\n</think>\n\n{CALL}"
QUESTION: Any = {"role": "user", "content": "40 + 2?"}
TOOLS: Any = [{"name": "add", "input_schema": {"type": "object", "properties": {}}}]


def play(
    folder: Path,
    replies: list[str],
    program: Callable[[anthropic.AsyncAnthropic], Awaitable[Any]],
    kind: str = "qwen2.5",
) -> tuple[Any, tuple[Turn, ...]]:
    """Run a program whose calls get these replies; return its result and the turns."""
    team, _ = scripted_team(folder, lambda prompt, call: replies[call], kind)

    async def run() -> tuple[Any, tuple[Turn, ...]]:
        async with (
            open_session(team) as (url, key, team_session, _),
            anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client,
        ):
            return await program(client), team_session.turns

    return asyncio.run(run())


async def create(client: anthropic.AsyncAnthropic, *messages: Any) -> anthropic.types.Message:
    return await client.messages.create(
        model="a", max_tokens=900, messages=[*messages], tools=TOOLS
    )


async def stream_events(client: anthropic.AsyncAnthropic) -> list[Any]:
    events = await client.messages.create(
        model="a", max_tokens=900, messages=[QUESTION], tools=TOOLS, stream=True
    )
    return [event async for event in events]


async def stream_message(client: anthropic.AsyncAnthropic) -> anthropic.types.Message:
    async with client.messages.stream(
        model="a", max_tokens=900, messages=[QUESTION], tools=TOOLS
    ) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("reply", [WITH_TEXT, WITH_CALL], ids=["text", "call"])
def test_a_streamed_block_has_the_signature_of_the_complete_reply(
    tmp_path: Path, reply: str
) -> None:
    complete, _ = play(tmp_path, [reply], lambda client: create(client, QUESTION))
    streamed, _ = play(tmp_path, [reply], stream_message)
    thinking = complete.content[0]
    assert thinking.type == "thinking"
    assert thinking.thinking == THOUGHTS
    assert thinking.signature
    assert streamed.content[0] == thinking


@pytest.mark.parametrize("reply", [WITH_TEXT, WITH_CALL], ids=["text", "call"])
def test_the_signature_is_the_last_delta_of_a_thinking_block(tmp_path: Path, reply: str) -> None:
    events, _ = play(tmp_path, [reply], stream_events)
    opening, *deltas, closing = [event for event in events if getattr(event, "index", None) == 0]
    assert opening.type == "content_block_start"
    assert (opening.content_block.type, opening.content_block.signature) == ("thinking", "")
    assert closing.type == "content_block_stop"

    types = [event.delta.type for event in deltas]
    assert types[-1] == "signature_delta"
    assert set(types[:-1]) == {"thinking_delta"}
    assert "".join(event.delta.thinking for event in deltas[:-1]) == THOUGHTS

    other_deltas = [
        event.delta.type
        for event in events
        if event.type == "content_block_delta" and event.index > 0
    ]
    assert other_deltas
    assert "signature_delta" not in other_deltas


def test_signatures_differ_if_thoughts_differ(tmp_path: Path) -> None:
    async def ask_three_times(client: anthropic.AsyncAnthropic) -> list[str]:
        return [(await create(client, QUESTION)).content[0].signature for _ in range(3)]  # type: ignore[union-attr]

    replies = [WITH_TEXT, WITH_TEXT.replace("I add", "I guess"), WITH_CALL]
    (first, second, third), _ = play(tmp_path, replies, ask_three_times)
    assert first != second
    assert first == third


def test_a_reply_without_thoughts_has_no_signature(tmp_path: Path) -> None:
    events, _ = play(tmp_path, ["It is 42."], stream_events)
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert set(deltas) == {"text_delta"}


@pytest.mark.parametrize("kind", ["qwen2.5", "qwen3"])
def test_a_chat_continues_after_a_block_that_comes_back(tmp_path: Path, kind: str) -> None:
    """The thoughts stay in the next prompt as they were sampled, also with another signature."""

    async def program(client: anthropic.AsyncAnthropic) -> None:
        reply = await create(client, QUESTION)
        blocks = [block.model_dump(exclude_none=True) for block in reply.content]
        result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "42"}
        messages = [QUESTION, {"role": "assistant", "content": blocks}]
        messages.append({"role": "user", "content": [result]})
        await create(client, *messages)
        blocks[0]["signature"] = "of another server"
        await create(client, *messages)

    _, (first, second, third) = play(tmp_path, [WITH_CALL, "42.", "42."], program, kind)
    sampled_ids = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(sampled_ids)] == sampled_ids
    assert third.prompt_ids == second.prompt_ids


def test_blocks_of_another_model_are_accepted(tmp_path: Path) -> None:
    blocks = [
        {"type": "thinking", "thinking": "I know.", "signature": "EqQBCgIYAhIM"},
        {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"},
        {"type": "text", "text": "It is 42."},
    ]
    messages = [QUESTION, {"role": "assistant", "content": blocks}, QUESTION]
    reply, turns = play(tmp_path, ["Yes."], lambda client: create(client, *messages))
    assert reply.content[0].text == "Yes."
    assert len(turns) == 1
