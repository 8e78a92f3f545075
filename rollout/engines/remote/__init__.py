"""Frozen models behind an API: their config, the provider protocol, errors of calls, and keys that are never logged."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from pydantic import Field, JsonValue, SecretStr, model_validator

from rollout.base.errors import Unusable
from rollout.base.http import error_for_status
from rollout.base.lookup import lookup, lookup_import
from rollout.base.section import Section
from rollout.base.urls import Url, check_private
from rollout.records.trajectory import Message

# Import paths, so that naming a provider imports no library.
PROVIDERS = {
    "openai": "rollout.engines.remote.providers:OpenAIChat",
    "anthropic": "rollout.engines.remote.providers:AnthropicMessages",
    "gemini": "rollout.engines.remote.providers:GeminiContent",
}
provider_class = partial(lookup_import, "provider", paths=PROVIDERS)  # of a name


class RemoteError(Unusable):
    """A frozen model cannot be used at all: one line that says what, where, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySettings:
    """How one reply is sampled."""

    temperature: float = 0.0
    max_tokens: int = 1024
    top_p: float = 1.0
    seed: int | None = None  # None: not sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model said."""

    text: str
    finish_reason: str  # stop | length | the vendor's own word
    prompt_tokens: int | None  # as the server counted them, None if it did not say
    completion_tokens: int | None


class Provider(Protocol):
    """A vendor's API, made of a config and a key. It makes one call and knows nothing of retries, caches or budgets.

    RemoteError: its library is not installed, or it answers nobody without a key.
    """

    async def complete(self, messages: Sequence[Message], settings: ReplySettings) -> Answer:
        """Ask once.

        Raises:
            Unanswered: no usable reply this time.
            Refused: this prompt will not be answered.
            RemoteError: no prompt will be answered (key, model, URL, quota).
        """

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""


def status_error(status: int, body: str, headers: Mapping[str, str]) -> Exception:
    """The error that an HTTP status other than 200 means; all vendors use the same numbers."""
    failure = error_for_status(status, body, headers)
    if (
        status in (401, 402, 403, 404)
        or 300 <= status < 400
        or (status == 429 and _out_of_quota(body))
    ):
        return RemoteError(str(failure))
    return failure


def split_system(messages: Sequence[Message]) -> tuple[str | None, list[Message]]:
    """The system's words, None without any, and all other messages: some APIs want them apart."""
    system = "\n\n".join(message.content for message in messages if message.role == "system")
    return system or None, [message for message in messages if message.role != "system"]


def filled(*fields: Mapping[str, Any]) -> dict[str, Any]:
    """One request's fields, later mappings over earlier ones, without those that are None."""
    merged = {name: value for own in fields for name, value in own.items()}
    return {name: value for name, value in merged.items() if value is not None}


def counted(value: object) -> int | None:
    """A server's count of tokens, None if it is no count."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _out_of_quota(body: str) -> bool:
    """OpenAI says 429 both for "slow down" and for "no money left"."""
    try:
        return bool(json.loads(body)["error"]["code"] == "insufficient_quota")
    except (ValueError, KeyError, TypeError):
        return False


SHOWN_AT_MOST = 3  # first characters of a key, at the end of a text that was cut there
SHORTEST = (
    8  # characters; a shorter secret could not be taken out of a text without harm to the text
)


class ApiKey(SecretStr):
    """A secret that shows itself only to `get_secret_value`, for the one header it belongs in."""

    def redact(self, text: str) -> str:
        """`text` without the key, also where it was cut off within: servers quote it in error messages."""
        key = self.get_secret_value()
        text = text.replace(key, "[key]")
        for length in range(len(key) - 1, SHOWN_AT_MOST, -1):
            if text.endswith(key[:length]):
                return text[:-length] + "[key]"
        return text

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key does not leave its process")


def required(key: ApiKey | None, provider: str) -> ApiKey:
    """The key of a provider that answers nobody without one; RemoteError if there is none."""
    if key is None:
        raise RemoteError(f"provider '{provider}' needs a key; name key_variable or key_file")
    return key


_taken: dict[str, ApiKey] = {}  # by variable, as found there, for another use in this process


def hide(variable: str | None) -> None:
    """Take a key out of the environment, if it is there, and keep it: child processes started from now on lack it."""
    value = os.environ.pop(variable, None) if variable else None
    if variable and value is not None:
        _taken[variable] = ApiKey(value)


def has_key(variable: str) -> bool:
    """Whether the environment has such a key, or had it before it was hidden."""
    return variable in _taken or bool(os.environ.get(variable))


def read_key(variable: str | None, file: Path | None) -> ApiKey | None:
    """The key in `file`, or in the environment's `variable`, which is removed there so that no child inherits it.

    Raises:
        RemoteError: both or the named one cannot be read; the message never holds the value.
    """
    if file is not None:
        try:
            if file.stat().st_mode & 0o077:
                raise RemoteError(f"{file}: others may read this key; run `chmod 600 {file}`")
            return _checked(file.read_text(), str(file))
        except (OSError, UnicodeDecodeError) as error:
            why = f"cannot read the key ({type(error).__name__}); expected one line of text"
            raise RemoteError(f"{file}: {why}") from None
    if variable is None:
        return None
    hide(variable)
    if variable not in _taken:
        raise RemoteError(f"the environment has no {variable}; set it, or name a file in key_file")
    return _checked(_taken[variable].get_secret_value(), variable)


def _checked(value: str, where: str) -> ApiKey:
    value = value.strip()
    if len(value) < SHORTEST or not value.isascii() or not value.isprintable() or " " in value:
        raise RemoteError(
            f"{where}: not an API key; expected one word of at least {SHORTEST} ASCII characters"
        )
    return ApiKey(value)


class PriceConfig(Section):
    """What a million tokens cost, in any currency."""

    prompt: float = Field(default=0.0, ge=0)
    reply: float = Field(default=0.0, ge=0)

    def nanos(self, prompt: int, reply: int) -> int:
        """1e-9 units of money for so many tokens: one costs 1000 times the price of a million."""
        return math.ceil(1000 * (prompt * self.prompt + reply * self.reply) - 1e-6)


class BudgetConfig(Section):
    """What may be spent in all, over every start of the run; None is no limit."""

    calls: int | None = Field(default=None, ge=1)  # requests sent, retries included
    tokens: int | None = Field(default=None, ge=1)  # of prompts and replies
    money: float | None = Field(default=None, ge=0)  # in the currency of the prices


class RemoteConfig(Section):
    """A frozen model behind an API."""

    provider: str = "openai"  # name in PROVIDERS
    model: str = Field(min_length=1)
    url: Url | None = None  # None: the vendor's own
    key_variable: str | None = Field(
        None, min_length=1
    )  # name of the environment variable with the key ...
    key_file: Path | None = (
        None  # ... or a file with nothing else in it, which only its owner may read
    )
    proxy: Url | None = None
    request: dict[str, JsonValue] = Field(
        default_factory=dict
    )  # further fields of the request; null takes one out
    concurrency: int = Field(default=16, ge=1)  # questions in flight at once
    retries: int = Field(default=4, ge=0)  # after the first call
    timeout_s: float = Field(default=60.0, gt=0)  # of one call
    deadline_s: float = Field(
        default=180.0, gt=0
    )  # of one question, with retries, pauses and a repair
    prices: PriceConfig = PriceConfig()
    budget: BudgetConfig = BudgetConfig()

    @model_validator(mode="after")
    def _usable(self) -> RemoteConfig:
        lookup("provider", self.provider, PROVIDERS)
        if self.key_variable and self.key_file:
            raise ValueError("key_variable and key_file are both set; name one")
        if self.budget.money is not None and not (self.prices.prompt or self.prices.reply):
            raise ValueError(
                "budget.money is set without prices; set prices.prompt and prices.reply"
            )
        if self.request.get("stream"):
            raise ValueError("request.stream is set; replies are read whole, so leave it out")
        if self.key_variable or self.key_file:
            check_private("url", self.url)
        return self
