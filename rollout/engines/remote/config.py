"""Config sections of a frozen model: its API, the prices of its tokens, and the budget."""

from __future__ import annotations

import math
from pathlib import Path

from pydantic import Field, JsonValue, model_validator

from rollout.base.lookup import lookup
from rollout.base.section import Section
from rollout.base.urls import Url, check_private
from rollout.engines.remote.registry import PROVIDERS

# A price of 1 per million tokens is 1000 nanos (units of 1e-9) per token.
_NANOS_PER_TOKEN = 1000
_ROUNDING = 1e-6  # nanos by which a cost may exceed a whole number and still be rounded down to it


class PriceConfig(Section):
    """Prices of a million tokens, in any currency."""

    # Price of a million tokens of prompts.
    prompt: float = Field(default=0.0, ge=0)
    # Price of a million tokens of replies.
    reply: float = Field(default=0.0, ge=0)

    def cost_nanos(self, prompt_tokens: int, reply_tokens: int) -> int:
        """Return the cost of a call in 1e-9 units of the currency, rounded up."""
        cost = prompt_tokens * self.prompt + reply_tokens * self.reply
        return math.ceil(_NANOS_PER_TOKEN * cost - _ROUNDING)


class BudgetConfig(Section):
    """Limits of the spending over all starts of a run; None: no limit."""

    # Maximum number of requests, including retries.
    calls: int | None = Field(default=None, ge=1)
    # Maximum number of tokens of prompts and replies.
    tokens: int | None = Field(default=None, ge=1)
    # Maximum cost, in the currency of the prices.
    money: float | None = Field(default=None, ge=0)


class RemoteConfig(Section):
    """A frozen model behind an API."""

    # Vendor's API by name, or the import path of a class.
    provider: str = "openai"
    # Name of the model at the provider.
    model: str = Field(min_length=1)
    # URL of the API; None: the vendor's.
    url: Url | None = None
    # Environment variable with the API key.
    key_variable: str | None = Field(None, min_length=1)
    # File that contains only the API key, and that only its owner may read.
    key_file: Path | None = None
    # URL of a proxy.
    proxy: Url | None = None
    # Further fields of the request; null removes a field.
    request: dict[str, JsonValue] = Field(default_factory=dict)
    # Maximum number of prompts that are answered at the same time.
    concurrency: int = Field(default=16, ge=1)
    # Maximum number of further requests for a reply after one that failed.
    retries: int = Field(default=4, ge=0)
    # Deadline of one request, in seconds.
    timeout_s: float = Field(default=60.0, gt=0)
    # Deadline of one reply in seconds, with retries and pauses, and with the second request that a coach gets
    # for a malformed verdict.
    deadline_s: float = Field(default=180.0, gt=0)
    prices: PriceConfig = PriceConfig()
    budget: BudgetConfig = BudgetConfig()

    @model_validator(mode="after")
    def _check(self) -> RemoteConfig:
        lookup("provider", self.provider, PROVIDERS)
        if self.key_variable and self.key_file:
            raise ValueError("key_variable and key_file are both set; name one")
        has_prices = self.prices.prompt > 0 or self.prices.reply > 0
        if self.budget.money is not None and not has_prices:
            raise ValueError(
                "budget.money is set without prices; set prices.prompt and prices.reply"
            )
        if self.request.get("stream"):
            raise ValueError("request.stream is set; replies are read whole, so leave it out")
        if self.key_variable or self.key_file:
            check_private("url", self.url)
        return self
