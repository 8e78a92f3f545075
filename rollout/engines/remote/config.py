"""The config section of a frozen model behind an API: provider, key, limits, prices and budget."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, JsonValue, model_validator

from rollout.base.http import check_url
from rollout.base.registry import lookup
from rollout.base.section import Section
from rollout.engines.remote import PROVIDERS


class PriceConfig(Section):
    """What a million tokens cost, in any currency."""

    prompt: float = Field(default=0.0, ge=0)
    reply: float = Field(default=0.0, ge=0)


class BudgetConfig(Section):
    """What may be spent in all, over every start of the run; None is no limit."""

    calls: int | None = Field(default=None, ge=0)  # requests sent, retries included
    tokens: int | None = Field(default=None, ge=0)  # of prompts and replies
    money: float | None = Field(default=None, ge=0)  # in the currency of the prices


class RemoteConfig(Section):
    """A frozen model behind an API."""

    provider: str = "openai"  # name in PROVIDERS
    model: str
    url: str | None = None  # None: the vendor's own
    key_variable: str | None = None  # name of the environment variable with the key ...
    key_file: Path | None = None  # ... or a file with nothing else in it, which only its owner may read
    proxy: str | None = None
    request: dict[str, JsonValue] = Field(default_factory=dict)  # further fields of the request; null takes one out
    concurrency: int = Field(default=16, ge=1)  # questions in flight at once
    retries: int = Field(default=4, ge=0)  # after the first call
    timeout_s: float = Field(default=60.0, gt=0)  # of one call
    deadline_s: float = Field(default=180.0, gt=0)  # of one question, with retries, pauses and a repair
    prices: PriceConfig = PriceConfig()
    budget: BudgetConfig = BudgetConfig()

    @model_validator(mode="after")
    def _usable(self) -> RemoteConfig:
        lookup("provider", self.provider, PROVIDERS)
        if self.key_variable and self.key_file:
            raise ValueError("key_variable and key_file are both set; name one")
        if self.budget.money is not None and not (self.prices.prompt or self.prices.reply):
            raise ValueError("budget.money is set without prices; set prices.prompt and prices.reply")
        if self.request.get("stream"):
            raise ValueError("request.stream is set; replies are read whole, so leave it out")
        for name, url in (("url", self.url), ("proxy", self.proxy)):
            check_url(name, url, secret=name == "url" and bool(self.key_variable or self.key_file))
        return self
