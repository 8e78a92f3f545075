"""Requests to the embedded engine, and its reports about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rollout.base.errors import EngineError
from rollout.records.trajectory import Completion, Sampling, TokenCandidates

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request for one completion.

    Attributes:
        id: chosen by the client, unique among its open requests.
        adapter: number of the adapter to compute with; 0 for none.
        notify_every: number of new tokens after which they are reported; 0 for never.
    """

    id: int
    prompt_ids: Sequence[int]
    sampling: Sampling
    adapter: int = 0
    notify_every: int = 0


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Further tokens of a completion that is being sampled.

    Attributes:
        position: position of the first of these tokens in the completion.
    """

    position: int
    token_ids: list[int]


Outcome = Completion | EngineError  # end of a request
Report = tuple[int, Outcome | NewTokens]  # the request's id, and its outcome or new tokens


@dataclass(slots=True, kw_only=True)
class Generation:
    """State of a request in the engine, waiting or running.

    Attributes:
        prompt: token ids [P], int64.
        versions: (weights version, position of its first completion token), in order.
        cached_tokens: number of prompt tokens whose keys were reused.
        reported: number of completion tokens that were reported as `NewTokens`.
        candidates: likeliest tokens at each position of the completion, if the sampling asks for
            them.
        matcher: state of the grammar behind the sampled tokens; None if all tokens are allowed.
    """

    id: int
    prompt: np.ndarray
    sampling: Sampling
    adapter: int = 0
    notify_every: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)
    cached_tokens: int = 0
    reported: int = 0
    candidates: list[TokenCandidates] = field(default_factory=list)
    matcher: LLMatcher | None = None

    def failure(self) -> EngineError:
        """Return the error of a request whose sampled token has no finite log-probability."""
        if self.matcher is not None and self.matcher.is_error():
            return EngineError(f"the grammar of the reply: {self.matcher.get_error()}")
        version = self.versions[-1][0]
        return EngineError(f"weights version {version} give logits that are not finite")
