"""Providers of frozen models: OpenAI's chat completions at any URL, Anthropic's and Google's own libraries."""

import json
from collections.abc import Sequence
from typing import Any

import httpx

from rollout.base.http import HttpClient, Unanswered, error_for_transport, ssl_context
from rollout.engines import remote
from rollout.engines.remote import (
    Answer,
    ApiKey,
    RemoteConfig,
    RemoteError,
    ReplySettings,
    counted,
    filled,
)
from rollout.records.trajectory import Message

OPENAI_URL = "https://api.openai.com/v1"
LARGEST = 4 * 2**20  # bytes of a reply


class OpenAIChat:
    """`POST {url}/chat/completions` of one model. Redirects are not followed: the key goes to one host only."""

    def __init__(self, config: RemoteConfig, key: ApiKey | None) -> None:
        self._config = config
        self._http = HttpClient(
            config.url or OPENAI_URL,
            token=key.get_secret_value() if key else None,
            connections=config.concurrency,
            proxy=config.proxy,
            max_reply_bytes=LARGEST,
        )

    async def complete(self, messages: Sequence[Message], settings: ReplySettings) -> Answer:
        fields = {
            "model": self._config.model,
            "messages": [
                {"role": message.role, "content": message.content} for message in messages
            ],
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_tokens,
            "seed": None if settings.seed is None else settings.seed % 2**63,
        }
        reply = await self._http.send(
            "POST", "/chat/completions", filled(fields, self._config.request)
        )
        if reply.status != 200:
            raise remote.status_error(reply.status, reply.text, reply.headers)
        return _answer(reply.content)

    async def aclose(self) -> None:
        await self._http.aclose()


def _answer(content: bytes) -> Answer:
    try:
        body: Any = json.loads(content)
        choice = body["choices"][0]
        text = choice["message"]["content"]
        if text is not None and not isinstance(text, str):
            raise TypeError("content")
    except (ValueError, KeyError, IndexError, TypeError):
        raise Unanswered("a reply that is no chat completion") from None
    usage = body.get("usage") if isinstance(body.get("usage"), dict) else {}
    return Answer(
        text=text or "",  # null: a refusal
        finish_reason=str(choice.get("finish_reason") or "stop"),
        prompt_tokens=counted(usage.get("prompt_tokens")),
        completion_tokens=counted(usage.get("completion_tokens")),
    )


ANTHROPIC_URL = (
    "https://api.anthropic.com"  # named, or the library would take it from the environment
)


class AnthropicMessages:
    """The Messages API of one model."""

    def __init__(self, config: RemoteConfig, key: ApiKey | None) -> None:
        try:
            import anthropic
        except ImportError:
            raise RemoteError(
                "provider 'anthropic' needs its library; run `pip install mcore-mas[coach]`"
            ) from None
        self._library = anthropic
        self._config = config
        self._client = anthropic.AsyncAnthropic(
            api_key=remote.required(key, "anthropic").get_secret_value(),
            base_url=config.url or ANTHROPIC_URL,
            timeout=config.timeout_s,
            max_retries=0,  # retries are counted and paid for in `caller`
            http_client=anthropic.DefaultAsyncHttpxClient(
                proxy=config.proxy, trust_env=False, verify=ssl_context(), follow_redirects=False
            ),
        )

    async def complete(self, messages: Sequence[Message], settings: ReplySettings) -> Answer:
        """Ask once (see `Provider`). Messages that are not the system's alternate between user and assistant."""
        system, others = remote.split_system(messages)
        fields = {
            "model": self._config.model,
            "system": system,
            "messages": [{"role": m.role, "content": m.content} for m in others],
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
        }
        try:
            reply = await self._client.messages.create(**filled(fields, self._config.request))
        except self._library.APIStatusError as error:
            raise remote.status_error(
                error.status_code, error.message, error.response.headers
            ) from None
        except self._library.APIConnectionError as error:  # a timeout too
            raise Unanswered(str(error) or type(error).__name__) from None
        except self._library.APIError as error:
            raise Unanswered(f"a reply that is no message ({type(error).__name__})") from None
        return Answer(
            text="".join(block.text for block in reply.content if block.type == "text"),
            finish_reason={"end_turn": "stop", "max_tokens": "length"}.get(
                reply.stop_reason or "", "stop"
            ),
            prompt_tokens=counted(reply.usage.input_tokens),
            completion_tokens=counted(reply.usage.output_tokens),
        )

    async def aclose(self) -> None:
        await self._client.close()


GEMINI_URL = "https://generativelanguage.googleapis.com"  # named, or the library would take it from the environment


class GeminiContent:
    """`generate_content` of one model of the Gemini Developer API."""

    def __init__(self, config: RemoteConfig, key: ApiKey | None) -> None:
        try:
            from google import genai
            from google.genai import errors
        except ImportError:
            raise RemoteError(
                "provider 'gemini' needs google-genai; run `pip install mcore-mas[coach]`"
            ) from None
        self._error = errors.APIError
        self._config = config
        # a client of ours, because without one the library would choose aiohttp where that is installed
        self._http = httpx.AsyncClient(
            proxy=config.proxy, trust_env=False, verify=ssl_context(), timeout=config.timeout_s
        )
        self._client = genai.Client(
            api_key=remote.required(key, "gemini").get_secret_value(),
            vertexai=False,
            http_options={"base_url": config.url or GEMINI_URL, "httpx_async_client": self._http},
        )

    async def complete(self, messages: Sequence[Message], settings: ReplySettings) -> Answer:
        system, others = remote.split_system(messages)
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
                model=self._config.model,
                contents=[{"role": roles[m.role], "parts": [{"text": m.content}]} for m in others],
                config=filled(fields, self._config.request),
            )
        except self._error as error:
            headers = getattr(error.response, "headers", None) or {}
            raise remote.status_error(error.code or 500, str(error.message), headers) from None
        except httpx.RequestError as error:
            raise error_for_transport(error) from None
        usage = reply.usage_metadata
        thoughts = (getattr(usage, "thoughts_token_count", None) or 0) if usage else 0
        written = counted(usage.candidates_token_count) if usage else None
        candidates = reply.candidates or []
        reason = str(getattr(candidates[0], "finish_reason", "") or "") if candidates else ""
        return Answer(
            text=reply.text or "",  # none: a refusal, or thoughts up to the limit
            finish_reason="length" if reason.endswith("MAX_TOKENS") else "stop",
            prompt_tokens=counted(usage.prompt_token_count) if usage else None,
            completion_tokens=None
            if written is None
            else written + thoughts,  # thoughts are billed as output
        )

    async def aclose(self) -> None:
        await self._http.aclose()
