"""Providers that use vendors' libraries, against a server of the tests."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout.base.http import Unanswered
from rollout.engines.remote import Answer, ApiKey, RemoteError, ReplySettings
from rollout.engines.remote.registry import PROVIDERS, provider_class
from rollout.records.trajectory import Message
from rollout.rewards.coach import Coach
from tests.support.chat_server import ChatServer, Response, chat_server
from tests.support.coached import config

KEY = ApiKey("test-key-0123456789")
MESSAGES = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="6 x 7?"),
)
ANTHROPIC_REPLY = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "judge",
    "content": [{"type": "text", "text": "42"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 12, "output_tokens": 3},
}
GEMINI_REPLY = {
    "candidates": [
        {"content": {"role": "model", "parts": [{"text": "42"}]}, "finishReason": "STOP"}
    ],
    "usageMetadata": {"promptTokenCount": 12, "candidatesTokenCount": 3, "thoughtsTokenCount": 4},
}


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


needs_anthropic = pytest.mark.skipif(
    not is_installed("anthropic"), reason="needs the library anthropic (extra: coach)"
)
needs_gemini = pytest.mark.skipif(
    not is_installed("google.genai"), reason="needs the library google-genai (extra: coach)"
)
VENDORS = [
    pytest.param("anthropic", ANTHROPIC_REPLY, 3, marks=needs_anthropic),
    # Thoughts are billed as output: 3 + 4 tokens.
    pytest.param("gemini", GEMINI_REPLY, 7, marks=needs_gemini),
]


def complete(provider: str, response: Response) -> tuple[Answer, ChatServer]:
    """Send `MESSAGES` to a server that answers with `response`."""

    async def run(url: str) -> Answer:
        provider_config = config(url.removesuffix("/v1"), provider=provider)
        client = provider_class(provider)(provider_config, KEY)
        try:
            answer: Answer = await client.complete(MESSAGES, ReplySettings(max_tokens=50))
            return answer
        finally:
            await client.aclose()

    with chat_server(response) as server:
        return asyncio.run(run(server.url)), server


@pytest.mark.parametrize(("provider", "body", "reply_tokens"), VENDORS)
def test_a_vendor_answers(provider: str, body: dict[str, Any], reply_tokens: int) -> None:
    response = Response(json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    answer, server = complete(provider, response)
    assert answer == Answer(
        text="42", finish_reason="stop", prompt_tokens=12, completion_tokens=reply_tokens
    )
    sent = json.dumps(server.bodies[0])
    assert "Be brief." in sent
    assert "6 x 7?" in sent
    assert KEY.get_secret_value() not in sent


@pytest.mark.parametrize(("provider", "body", "reply_tokens"), VENDORS)
def test_a_vendor_is_busy_or_refuses_the_key(
    provider: str, body: dict[str, Any], reply_tokens: int
) -> None:
    busy = Response(b'{"error": {"message": "slow"}}', status=429, headers={"Retry-After": "3"})
    with pytest.raises(Unanswered) as caught:
        complete(provider, busy)
    assert caught.value.retry_after_s == 3.0

    refusal = Response(b'{"error": {"message": "bad key"}}', status=401)
    with pytest.raises(RemoteError, match="status 401"):
        complete(provider, refusal)


@pytest.mark.parametrize(
    ("provider", "module"), [("anthropic", "anthropic"), ("gemini", "google.genai")]
)
def test_a_missing_library_is_reported_by_the_constructor(
    provider: str, module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    with pytest.raises(RemoteError, match=r"pip install mcore-mas\[coach\]"):
        Coach(config("https://example.org", provider=provider), tmp_path)


def test_every_provider_is_found_by_its_name() -> None:
    names = [provider_class(name).__name__ for name in sorted(PROVIDERS)]
    assert names == ["AnthropicMessages", "GeminiContent", "OpenAIChat"]
