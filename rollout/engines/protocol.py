"""What every rollout engine promises."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class EngineError(RuntimeError):
    """A generation or a weight update failed; the engine keeps its old weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is sampled."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    max_tokens: int = 512  # completion tokens, the stop token included
    stop: tuple[int, ...] = ()  # token ids that end a completion
    seed: int = 0  # 64-bit; equal seed, prompt and weights give equal tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Completion tokens [start, end) that were sampled by one version of the weights."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine returns for one prompt."""

    token_ids: tuple[int, ...]  # [C], the stop token included
    logprobs: tuple[float, ...]  # [C] natural log of the full distribution after temperature
    finish_reason: str  # stop | length | abort
    versions: tuple[VersionSpan, ...]
    cached_tokens: int = 0  # prompt tokens whose keys and values were reused


class Engine(Protocol):
    """A policy's rollout side. Transports stay inside an engine's file."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion for `prompt_ids` [P]."""

    async def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by a stream of (Hugging Face name, full tensor).

        Raises:
            EngineError: a tensor is missing, unknown or of another shape; the old weights stay.
        """
