"""Tokenization of chats, by `team.chat` and through the gateway: every text is tokenized once."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chat_tokenizing, gateway_overhead
from benchmarks.support.gateway import PacedEngine, run_clients
from rollout.engines import EngineClient
from rollout.gateway.dialects import ChatRequest
from rollout.gateway.sessions import off_loop_if_long
from rollout.models import chat_template
from rollout.models.safe_tokenizer import SafeTokenizer
from rollout.records.trajectory import Message, ToolUse
from tests.support.gateway import open_session, team_of
from tests.support.scripted_engine import ScriptedEngine
from tests.support.templates import renderer_of


@pytest.fixture
def tokenized_chars(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the length of every text that a renderer tokenizes."""
    sizes: list[int] = []
    encode = SafeTokenizer.encode

    def encode_and_count(tokenizer: SafeTokenizer, text: str) -> tuple[int, ...]:
        sizes.append(len(text))
        return encode(tokenizer, text)

    monkeypatch.setattr(SafeTokenizer, "encode", encode_and_count)
    return sizes


def test_a_turn_of_a_chat_tokenizes_the_new_text_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenized_chars: list[int]
) -> None:
    renderer = renderer_of("qwen2.5", tmp_path)
    monkeypatch.setattr(chat_tokenizing, "TURNS", 12)
    raw, ids = chat_tokenizing.make_reply(renderer)
    client = EngineClient(engine=ScriptedEngine(lambda prompt, call: ids), renderer=renderer)
    tokenized_chars.clear()
    asyncio.run(chat_tokenizing.hold_chat(client, raw))
    first, *later = tokenized_chars
    assert len(later) == chat_tokenizing.TURNS - 1 and first > len(
        chat_tokenizing.OPENING[1].content
    )
    tags = len(
        "\n<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert set(later) == {len(chat_tokenizing.RESULT) + tags}


def test_the_gateway_tokenizes_the_same_texts_as_team_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenized_chars: list[int]
) -> None:
    for name, value in {"CHATS": 2, "TURNS": 3, "WORDS": 20}.items():
        monkeypatch.setattr(gateway_overhead, name, value)
    monkeypatch.setattr(chat_template, "_CACHED_PROMPTS", 0)  # the chats begin alike
    renderer = renderer_of("qwen2.5", tmp_path)
    team = team_of(PacedEngine(renderer, 0.0), renderer, max_tokens=100)

    async def through_the_gateway() -> None:
        async with open_session(team, max_turns=6) as (url, key, team_session, _):
            await run_clients(url, key, 2, 3, 20, 0.0)
            assert len(team_session.turns) == 6 and not any(
                "root" in turn.scores for turn in team_session.turns
            )

    tokenized_chars.clear()
    asyncio.run(gateway_overhead.hold_chats_directly(team))
    directly = sorted(tokenized_chars)
    tokenized_chars.clear()
    asyncio.run(through_the_gateway())
    assert sorted(tokenized_chars) == directly and len(directly) == 6


def test_a_recent_prompt_is_not_tokenized_again(tmp_path: Path, tokenized_chars: list[int]) -> None:
    renderer = renderer_of("qwen2.5", tmp_path)
    tokenized_chars.clear()
    first, second = (
        [Message(role="user", content=text)] for text in ("What is 2 + 3?", "What is 7 + 9?")
    )
    assert renderer.render(first) == renderer.render(first) != renderer.render(second)
    assert len(tokenized_chars) == 2


def test_a_conversation_with_long_calls_is_compared_off_the_event_loop() -> None:
    def on_loop(*_: Any) -> bool:
        return threading.current_thread() is threading.main_thread()

    for size, is_on_loop in ((10, True), (30_000, False)):
        call = ToolUse(id="1", name="write", arguments=json.dumps({"text": "x" * size}))
        request = ChatRequest(
            model="a", messages=(Message(role="assistant", content="", calls=(call,)),)
        )
        assert asyncio.run(off_loop_if_long(on_loop, "a", request)) is is_on_loop
