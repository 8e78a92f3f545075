"""Google's Gemini models, by its official library (`pip install mcore-mas[coach]`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import httpx

from rollout.records import Message
from rollout.remote.key import Key, required
from rollout.remote.protocol import (
    Answer,
    CallFailed,
    RemoteError,
    Settings,
    counted,
    filled,
    split_system,
    status_error,
)

if TYPE_CHECKING:
    from rollout.config import RemoteConfig

URL = "https://generativelanguage.googleapis.com"  # named, or the library would take it from the environment


class GeminiContent:
    """`generate_content` of one model of the Gemini Developer API."""

    def __init__(self, config: RemoteConfig, key: Key | None) -> None:
        """
        Raises:
            RemoteError: the library is not installed, or there is no key.
        """
        try:
            from google import genai
            from google.genai import errors
        except ImportError:
            raise RemoteError("provider 'gemini' needs google-genai; run `pip install mcore-mas[coach]`") from None
        self._error = errors.APIError
        self._model = config.model
        self._extra = dict(config.request)
        # a client of ours, because without one the library would choose aiohttp where that is installed
        self._http = httpx.AsyncClient(proxy=config.proxy, trust_env=False, timeout=config.timeout_s)
        self._client = genai.Client(
            api_key=required(key, "gemini").reveal(),
            vertexai=False,
            http_options={"base_url": config.url or URL, "httpx_async_client": self._http},
        )

    async def complete(self, messages: Sequence[Message], settings: Settings) -> Answer:
        """Ask once (see `Provider`)."""
        system, others = split_system(messages)
        fields = {
            "system_instruction": system,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_output_tokens": settings.max_tokens,
            "seed": None if settings.seed is None else settings.seed % 2**31,
        }
        roles = {"user": "user", "assistant": "model"}
        try:
            reply = await self._client.aio.models.generate_content(
                model=self._model,
                contents=[{"role": roles[m.role], "parts": [{"text": m.content}]} for m in others],
                config=filled(fields, self._extra),
            )
        except self._error as error:
            headers = getattr(error.response, "headers", None) or {}
            raise status_error(error.code or 500, str(error.message), headers) from None
        except httpx.RequestError as error:
            unsent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
            raise CallFailed(str(error) or type(error).__name__, unbilled=unsent) from None
        usage = reply.usage_metadata
        thoughts = (getattr(usage, "thoughts_token_count", None) or 0) if usage else 0
        written = counted(usage.candidates_token_count) if usage else None
        candidates = reply.candidates or []
        reason = str(getattr(candidates[0], "finish_reason", "") or "") if candidates else ""
        return Answer(
            text=reply.text or "",  # none: a refusal, or thoughts up to the limit
            finish_reason="length" if reason.endswith("MAX_TOKENS") else "stop",
            prompt_tokens=counted(usage.prompt_token_count) if usage else None,
            completion_tokens=None if written is None else written + thoughts,  # thoughts are billed as output
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()
