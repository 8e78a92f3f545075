"""APIs of frozen models: OpenAI's chat completions, and those of Anthropic and Google."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from rollout.base.http import HttpClient, Unanswered, error_for_transport, ssl_context
from rollout.engines.remote.config import RemoteConfig
from rollout.engines.remote.errors import RemoteError, status_error
from rollout.engines.remote.keys import ApiKey, require_key
from rollout.engines.remote.protocol import Answer, ReplySettings
from rollout.records.trajectory import Message

# The vendors' libraries would take another URL from the environment if none were given.
_OPENAI_URL = "https://api.openai.com/v1"
_ANTHROPIC_URL = "https://api.anthropic.com"
_GEMINI_URL = "https://generativelanguage.googleapis.com"

_MAX_REPLY_BYTES = 4 * 2**20
# The APIs accept seeds below these numbers.
_OPENAI_SEEDS = 2**63
_GEMINI_SEEDS = 2**31


class OpenAIChat:
    """Client of OpenAI's chat completions, `POST {url}/chat/completions`.

    Redirects are not followed, so that the key is sent to one host only.
    """

    def __init__(self, config: RemoteConfig, key: ApiKey | None) -> None:
        self._config = config
        self._http = HttpClient(
            config.url or _OPENAI_URL,
            token=None if key is None else key.get_secret_value(),
            connections=config.concurrency,
            proxy=config.proxy,
            max_reply_bytes=_MAX_REPLY_BYTES,
        )

    async def complete(self, messages: Sequence[Message], settings: ReplySettings) -> Answer:
        """Send one request and return its answer; see `Provider`."""
        fields = {
            "model": self._config.model,
            "messages": [
                {"role": message.role, "content": message.content} for message in messages
            ],
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_tokens,
            "seed": None if settings.seed is None else settings.seed % _OPENAI_SEEDS,
        }
        body = _request_fields(fields, self._config.request)
        reply = await self._http.send("POST", "/chat/completions", body)
        if reply.status != 200:
            raise status_error(reply.status, reply.text, reply.headers)
        return _parse_chat_completion(reply.content)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._http.aclose()


def _parse_chat_completion(content: bytes) -> Answer:
    """Return the answer in a chat completion; raise Unanswered if it is not one."""
    try:
        body: Any = json.loads(content)
        choice = body["choices"][0]
        text = choice["message"]["content"]
        if text is not None and not isinstance(text, str):
            raise TypeError("content")
    except (ValueError, KeyError, IndexError, TypeError):
        raise Unanswered("a reply that is not a chat completion") from None

    usage = body.get("usage")
    if not isinstance(usage, dict):
        usage = {}
    return Answer(
        text=text or "",  # null: the model refuses
        finish_reason=str(choice.get("finish_reason") or "stop"),
        prompt_tokens=_token_count(usage.get("prompt_tokens")),
        completion_tokens=_token_count(usage.get("completion_tokens")),
    )


class AnthropicMessages:
    """Client of Anthropic's Messages API."""

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
            api_key=require_key(key, "anthropic").get_secret_value(),
            base_url=config.url or _ANTHROPIC_URL,
            timeout=config.timeout_s,
            max_retries=0,  # `Caller` repeats requests, and charges each of them
            http_client=anthropic.DefaultAsyncHttpxClient(
                proxy=config.proxy, trust_env=False, verify=ssl_context(), follow_redirects=False
            ),
        )

    async def complete(self, messages: Sequence[Message], settings: ReplySettings) -> Answer:
        """Send one request and return its answer; see `Provider`.

        Messages other than the system's must alternate between user and assistant. `top_p` and the
        seed of the settings are not sent.
        """
        system, chat = _split_system(messages)
        fields = {
            "model": self._config.model,
            "system": system,
            "messages": [{"role": message.role, "content": message.content} for message in chat],
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
        }
        request = _request_fields(fields, self._config.request)
        try:
            reply = await self._client.messages.create(**request)
        except self._library.APIStatusError as error:
            raise status_error(error.status_code, error.message, error.response.headers) from None
        except self._library.APIConnectionError as error:  # timeouts too
            raise Unanswered(str(error) or type(error).__name__) from None
        except self._library.APIError as error:
            raise Unanswered(f"a reply that is not a message ({type(error).__name__})") from None

        return Answer(
            text="".join(block.text for block in reply.content if block.type == "text"),
            finish_reason="length" if reply.stop_reason == "max_tokens" else "stop",
            prompt_tokens=_token_count(reply.usage.input_tokens),
            completion_tokens=_token_count(reply.usage.output_tokens),
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()


class GeminiContent:
    """Client of `generate_content` of the Gemini Developer API."""

    def __init__(self, config: RemoteConfig, key: ApiKey | None) -> None:
        try:
            from google import genai
            from google.genai import errors
        except ImportError:
            raise RemoteError(
                "provider 'gemini' needs google-genai; run `pip install mcore-mas[coach]`"
            ) from None
        self._api_error = errors.APIError
        self._config = config
        # Without a client of ours, the library would choose aiohttp where it is installed.
        self._http = httpx.AsyncClient(
            proxy=config.proxy, trust_env=False, verify=ssl_context(), timeout=config.timeout_s
        )
        self._client = genai.Client(
            api_key=require_key(key, "gemini").get_secret_value(),
            vertexai=False,
            http_options={"base_url": config.url or _GEMINI_URL, "httpx_async_client": self._http},
        )

    async def complete(self, messages: Sequence[Message], settings: ReplySettings) -> Answer:
        """Send one request and return its answer; see `Provider`."""
        system, chat = _split_system(messages)
        roles = {"user": "user", "assistant": "model"}
        fields = {
            "system_instruction": system,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_output_tokens": settings.max_tokens,
            "seed": None if settings.seed is None else settings.seed % _GEMINI_SEEDS,
        }
        try:
            reply = await self._client.aio.models.generate_content(
                model=self._config.model,
                contents=[
                    {"role": roles[message.role], "parts": [{"text": message.content}]}
                    for message in chat
                ],
                config=_request_fields(fields, self._config.request),
            )
        except self._api_error as error:
            headers = getattr(error.response, "headers", None) or {}
            raise status_error(error.code or 500, str(error.message), headers) from None
        except httpx.RequestError as error:
            raise error_for_transport(error) from None
        return _parse_gemini_content(reply)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def _parse_gemini_content(reply: Any) -> Answer:
    finish_reason = "stop"
    candidates = reply.candidates or []
    if candidates:
        reason = str(getattr(candidates[0], "finish_reason", "") or "")
        if reason.endswith("MAX_TOKENS"):
            finish_reason = "length"

    prompt_tokens = None
    completion_tokens = None
    usage = reply.usage_metadata
    if usage:
        prompt_tokens = _token_count(usage.prompt_token_count)
        completion_tokens = _token_count(usage.candidates_token_count)
        if completion_tokens is not None:
            # Thoughts are billed as output.
            completion_tokens += getattr(usage, "thoughts_token_count", None) or 0
    return Answer(
        text=reply.text or "",  # none: the model refuses, or has thought up to the limit
        finish_reason=finish_reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )


def _split_system(messages: Sequence[Message]) -> tuple[str | None, list[Message]]:
    """Return the joined text of the system's messages (None without any), and all other messages."""
    system = [message.content for message in messages if message.role == "system"]
    others = [message for message in messages if message.role != "system"]
    return "\n\n".join(system) or None, others


def _request_fields(
    fields: Mapping[str, Any], configured_fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a request; configured ones replace others, and None removes a field."""
    merged = {**fields, **configured_fields}
    return {name: value for name, value in merged.items() if value is not None}


def _token_count(value: object) -> int | None:
    """Return a number of tokens as the server counted them; None if the value is not a number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return value
