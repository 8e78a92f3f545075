"""Anthropic's models, by its official library (`pip install mcore-mas[coach]`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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

URL = "https://api.anthropic.com"  # named, or the library would take it from the environment


class AnthropicMessages:
    """The Messages API of one model."""

    def __init__(self, config: RemoteConfig, key: Key | None) -> None:
        """
        Raises:
            RemoteError: the library is not installed, or there is no key.
        """
        try:
            import anthropic
        except ImportError:
            raise RemoteError("provider 'anthropic' needs its library; run `pip install mcore-mas[coach]`") from None
        self._library = anthropic
        self._model = config.model
        self._extra = dict(config.request)
        self._client = anthropic.AsyncAnthropic(
            api_key=required(key, "anthropic").reveal(),
            base_url=config.url or URL,
            timeout=config.timeout_s,
            max_retries=0,  # retries are counted and paid for in `caller`
            http_client=anthropic.DefaultAsyncHttpxClient(proxy=config.proxy, trust_env=False, follow_redirects=False),
        )

    async def complete(self, messages: Sequence[Message], settings: Settings) -> Answer:
        """Ask once (see `Provider`). Messages that are not the system's alternate between user and assistant."""
        system, others = split_system(messages)
        fields = {
            "model": self._model,
            "system": system,
            "messages": [{"role": m.role, "content": m.content} for m in others],
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
        }
        try:
            reply = await self._client.messages.create(**filled(fields, self._extra))
        except self._library.APIStatusError as error:
            raise status_error(error.status_code, error.message, error.response.headers) from None
        except self._library.APIConnectionError as error:  # a timeout too
            raise CallFailed(str(error) or type(error).__name__) from None
        except self._library.APIError as error:
            raise CallFailed(f"a reply that is no message ({type(error).__name__})") from None
        return Answer(
            text="".join(block.text for block in reply.content if block.type == "text"),
            finish_reason={"end_turn": "stop", "max_tokens": "length"}.get(reply.stop_reason or "", "stop"),
            prompt_tokens=counted(reply.usage.input_tokens),
            completion_tokens=counted(reply.usage.output_tokens),
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()
