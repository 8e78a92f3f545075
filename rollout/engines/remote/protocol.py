"""Interface that a vendor's API implements, with the settings and the answer of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout.records.trajectory import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySettings:
    """Sampling of one reply.

    Attributes:
        max_tokens: maximum number of tokens of the reply.
        seed: seed of the sampling; None: no seed is sent.
    """

    temperature: float = 0.0
    max_tokens: int = 1024
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Reply of a model.

    Attributes:
        finish_reason: "stop", "length", or the vendor's own word.
        prompt_tokens, completion_tokens: numbers of tokens that the server counted; None if it did not.
    """

    text: str
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None


class Provider(Protocol):
    """Client of one vendor's API.

    A provider sends single requests; retries, cache and budget are the work of `Caller`. Its class is
    called with a `RemoteConfig` and an `ApiKey` (None without a key), and raises RemoteError if a
    library is not installed, or if a key is needed and there is none.
    """

    async def complete(self, messages: Sequence[Message], settings: ReplySettings) -> Answer:
        """Send one request and return its answer.

        Raises:
            Unanswered: there is no usable reply; another attempt may get one.
            Refused: this prompt will not be answered.
            RemoteError: no prompt will be answered (key, model, URL or quota).
        """

    async def aclose(self) -> None:
        """Close the connections of this provider; each event loop has a provider of its own (see `Caller`)."""
