"""What a chat is tokenised, by team.chat and through the gateway: every text once, whatever it has grown to."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chat_tokenising, gateway_overhead
from benchmarks.support.gateway import Paced, clients
from rollout.engines import EngineClient
from rollout.gateway.dialects import ChatRequest
from rollout.gateway.sessions import _maybe_far
from rollout.models import chat_template
from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Message, ToolUse
from tests.support.gateway import opened, team_of
from tests.support.scripted_engine import ScriptedEngine
from tests.support.templates import renderer_of


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of every text that any renderer tokenises."""
    sizes: list[int] = []
    encode = Renderer._encode

    def counted(self: Renderer, marked: str) -> tuple[int, ...]:
        sizes.append(len(marked))
        return encode(self, marked)

    monkeypatch.setattr(Renderer, "_encode", counted)
    return sizes


def test_a_turn_of_a_chat_tokenises_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenised: list[int]
) -> None:
    renderer = renderer_of("qwen2.5", tmp_path)
    monkeypatch.setattr(chat_tokenising, "TURNS", 12)
    raw, ids = chat_tokenising.reply(renderer)
    client = EngineClient(engine=ScriptedEngine(lambda prompt, call: ids), renderer=renderer)
    tokenised.clear()
    asyncio.run(chat_tokenising.chat(client, raw))
    first, *later = tokenised
    assert len(later) == chat_tokenising.TURNS - 1 and first > len(
        chat_tokenising.OPENING[1].content
    )
    tags = len(
        "\n<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert set(later) == {len(chat_tokenising.RESULT) + tags}


def test_the_gateway_tokenises_what_team_chat_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenised: list[int]
) -> None:
    for name, value in {"CHATS": 2, "TURNS": 3, "WORDS": 20}.items():
        monkeypatch.setattr(gateway_overhead, name, value)
    monkeypatch.setattr(chat_template, "_RECENT", 0)  # the chats begin alike
    renderer = renderer_of("qwen2.5", tmp_path)
    team = team_of(Paced(renderer, 0.0), renderer, max_tokens=100)

    async def through_the_gateway() -> None:
        async with opened(team, most_turns=6) as (url, key, seat, _):
            await clients(url, key, 2, 3, 20, 0.0)
            assert len(seat.turns) == 6 and not any("root" in turn.scores for turn in seat.turns)

    tokenised.clear()
    asyncio.run(gateway_overhead.directly(team))
    directly = sorted(tokenised)
    tokenised.clear()
    asyncio.run(through_the_gateway())
    assert sorted(tokenised) == directly and len(directly) == 6


def test_a_prompt_that_was_just_tokenised_is_not_tokenised_again(
    tmp_path: Path, tokenised: list[int]
) -> None:
    renderer = renderer_of("qwen2.5", tmp_path)
    tokenised.clear()
    first, second = (
        [Message(role="user", content=text)] for text in ("What is 2 + 3?", "What is 7 + 9?")
    )
    assert renderer.render(first) == renderer.render(first) != renderer.render(second)
    assert len(tokenised) == 2


def test_a_conversation_of_long_calls_is_compared_off_the_event_loop() -> None:
    def on_loop(*_: Any) -> bool:
        return threading.current_thread() is threading.main_thread()

    for size, near in ((10, True), (30_000, False)):
        written = ToolUse(id="1", name="write", arguments=json.dumps({"text": "x" * size}))
        asked = ChatRequest(
            model="a", messages=(Message(role="assistant", content="", calls=(written,)),)
        )
        assert asyncio.run(_maybe_far(on_loop, "a", asked)) is near
