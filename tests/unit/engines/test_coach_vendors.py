"""Vendors' own libraries against a server of the tests' own; without a library, one line that says what to install."""

import asyncio
import importlib.util
import json
import sys

import pytest

from rollout.base.http import Unanswered
from rollout.engines.remote import PROVIDERS, ApiKey, RemoteError, ReplySettings, provider_class
from rollout.records.trajectory import Message
from rollout.rewards.coach import Coach
from tests.support.chat_server import Response, chat_server
from tests.support.coached import config

KEY = ApiKey("test-key-0123456789")
ASKED = (Message(role="system", content="Be brief."), Message(role="user", content="6 x 7?"))
ANTHROPIC = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "judge",
    "content": [{"type": "text", "text": "42"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 12, "output_tokens": 3},
}
GEMINI = {
    "candidates": [
        {"content": {"role": "model", "parts": [{"text": "42"}]}, "finishReason": "STOP"}
    ],
    "usageMetadata": {"promptTokenCount": 12, "candidatesTokenCount": 3, "thoughtsTokenCount": 4},
}


def has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


needs_anthropic = pytest.mark.skipif(
    not has("anthropic"), reason="needs the library anthropic (extra: coach)"
)
needs_gemini = pytest.mark.skipif(
    not has("google.genai"), reason="needs the library google-genai (extra: coach)"
)
VENDORS = [
    pytest.param("anthropic", ANTHROPIC, 3, marks=needs_anthropic),
    pytest.param("gemini", GEMINI, 7, marks=needs_gemini),  # thoughts are billed as output
]


def complete(provider: str, response: Response):
    async def run(url):
        client = provider_class(provider)(config(url.removesuffix("/v1"), provider=provider), KEY)
        try:
            return await client.complete(ASKED, ReplySettings(max_tokens=50))
        finally:
            await client.aclose()

    with chat_server(response) as server:
        return asyncio.run(run(server.url)), server


@pytest.mark.parametrize(("provider", "body", "reply_tokens"), VENDORS)
def test_a_vendor_answers(provider, body, reply_tokens) -> None:
    response = Response(json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    answer, server = complete(provider, response)
    assert (answer.text, answer.finish_reason) == ("42", "stop")
    assert (answer.prompt_tokens, answer.completion_tokens) == (12, reply_tokens)
    sent = json.dumps(server.bodies[0])
    assert "Be brief." in sent
    assert "6 x 7?" in sent
    assert KEY.get_secret_value() not in sent


@pytest.mark.parametrize(("provider", "body", "reply_tokens"), VENDORS)
def test_a_vendor_is_busy_or_refuses_the_key(provider, body, reply_tokens) -> None:
    with pytest.raises(Unanswered) as caught:
        complete(
            provider,
            Response(b'{"error": {"message": "slow"}}', status=429, headers={"Retry-After": "3"}),
        )
    assert caught.value.retry_after_s == 3.0
    with pytest.raises(RemoteError, match="status 401"):
        complete(provider, Response(b'{"error": {"message": "bad key"}}', status=401))


@pytest.mark.parametrize(
    ("provider", "module"), [("anthropic", "anthropic"), ("gemini", "google.genai")]
)
def test_a_missing_library_is_one_line_before_anything_is_played(
    provider, module, monkeypatch, tmp_path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(RemoteError, match=r"pip install mcore-mas\[coach\]"):
        Coach(config("https://example.org", provider=provider), tmp_path)


def test_every_provider_can_be_named() -> None:
    assert [provider_class(name).__name__ for name in sorted(PROVIDERS)] == [
        "AnthropicMessages",
        "GeminiContent",
        "OpenAIChat",
    ]
