"""The config section of a frozen model behind an API: provider, key, limits, prices and budget."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from rollout.base.registry import lookup
from rollout.base.section import Section
from rollout.engines.remote import PROVIDERS


class PriceConfig(Section):
    """What a million tokens cost, in any currency."""

    prompt: float = Field(0.0, ge=0)
    reply: float = Field(0.0, ge=0)


class BudgetConfig(Section):
    """What may be spent in all, over every start of the run; None is no limit."""

    calls: int | None = Field(None, ge=0)  # requests sent, retries included
    tokens: int | None = Field(None, ge=0)  # of prompts and replies
    money: float | None = Field(None, ge=0)  # in the currency of the prices


class RemoteConfig(Section):
    """A frozen model behind an API."""

    provider: str = "openai"  # name in PROVIDERS
    model: str
    url: str | None = None  # None: the vendor's own
    key_variable: str | None = None  # name of the environment variable with the key ...
    key_file: Path | None = None  # ... or a file with nothing else in it, which only its owner may read
    proxy: str | None = None
    request: dict[str, Any] = Field(default_factory=dict)  # further fields of the request; null takes one out
    concurrency: int = Field(16, ge=1)  # questions in flight at once
    retries: int = Field(4, ge=0)  # after the first call
    timeout_s: float = Field(60.0, gt=0)  # of one call
    deadline_s: float = Field(180.0, gt=0)  # of one question, with retries, pauses and a repair
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
            _check_url(name, url, secret=name == "url" and bool(self.key_variable or self.key_file))
        return self


def _check_url(name: str, url: str | None, *, secret: bool) -> None:
    """Refuse a URL that carries credentials, or over which a key would travel in the clear."""
    if url is None:
        return
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{name}: expected http(s)://host/path")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"{name}: may hold no user, password or query; keys go into key_variable or key_file")
    if secret and parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise ValueError(f"{name}: http would show the key to the network; use https")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
