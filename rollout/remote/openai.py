"""Any URL that speaks OpenAI's chat completions: OpenAI, DeepSeek, and servers of one's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import httpx

from rollout.records import Message
from rollout.remote.key import Key
from rollout.remote.protocol import Answer, CallFailed, Settings, counted, filled, status_error

if TYPE_CHECKING:
    from rollout.config import RemoteConfig

URL = "https://api.openai.com/v1"
LARGEST = 4 * 2**20  # bytes of a reply
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError, httpx.UnsupportedProtocol)


class OpenAIChat:
    """`POST {url}/chat/completions` of one model. Redirects are not followed: the key goes to one host only."""

    def __init__(self, config: RemoteConfig, key: Key | None) -> None:
        self._model = config.model
        self._extra = dict(config.request)
        self._http = httpx.AsyncClient(
            base_url=config.url or URL,
            headers={"Authorization": f"Bearer {key.reveal()}"} if key else {},
            timeout=config.timeout_s,
            proxy=config.proxy,
            trust_env=False,  # proxies are configured by name: a variable must not send the key elsewhere
            limits=httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency),
        )

    async def complete(self, messages: Sequence[Message], settings: Settings) -> Answer:
        """Ask once (see `Provider`)."""
        fields = {
            "model": self._model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_tokens,
            "seed": None if settings.seed is None else settings.seed % 2**63,
        }
        try:
            async with self._http.stream("POST", "/chat/completions", json=filled(fields, self._extra)) as reply:
                content = await _read(reply)
        except httpx.RequestError as error:
            trouble = str(error) or type(error).__name__
            raise CallFailed(trouble, unbilled=isinstance(error, UNSENT)) from None
        if reply.status_code != 200:
            raise status_error(reply.status_code, content.decode(errors="replace"), reply.headers)
        return _answer(content)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()


async def _read(reply: httpx.Response) -> bytes:
    content = b""
    async for chunk in reply.aiter_bytes():
        content += chunk
        if len(content) > LARGEST:
            raise CallFailed(f"a reply of more than {LARGEST} bytes")
    return content


def _answer(content: bytes) -> Answer:
    try:
        body: Any = json.loads(content)
        choice = body["choices"][0]
        text = choice["message"]["content"]
        if text is not None and not isinstance(text, str):
            raise TypeError("content")
    except (ValueError, KeyError, IndexError, TypeError):
        raise CallFailed("a reply that is no chat completion") from None
    usage = body.get("usage") if isinstance(body.get("usage"), dict) else {}
    return Answer(
        text=text or "",  # null: a refusal
        finish_reason=str(choice.get("finish_reason") or "stop"),
        prompt_tokens=counted(usage.get("prompt_tokens")),
        completion_tokens=counted(usage.get("completion_tokens")),
    )
