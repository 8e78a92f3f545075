"""What every rollout engine promises."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from rollout.transports.handover import Handover, Route

Tag = Literal["weights", "kv_cache"]  # what an engine can do without while it sleeps


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
    seed: int = 0  # 64-bit; equal seed, prompt and weights give equal tokens, where the engine can promise it
    session: str = field(default="", compare=False)  # requests of one session find each other's cached prefixes


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


class TrainedEngine(Engine, Protocol):
    """An engine whose weights another process trains."""

    version: int  # of the weights it holds
    pause_s: float  # that the last update kept it from decoding
    starts: int  # of its processes so far
    resend: Callable[[], Awaitable[None]] | None  # has the trainer send its weights again, after a death that lost them

    async def route(self) -> Route:
        """Where the next weights should be written, and how."""

    async def load_weights_from(self, handover: Handover) -> None:
        """Take the weights that lie where `route` said, and compare their checksums.

        Raises:
            EngineError: they are not the trainer's; what the engine computes with is then not to be relied on.
        """

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Give memory back until `wake`; an idle engine only. Who sleeps without weights wakes without them."""

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Take memory again."""

    def close(self) -> None:
        """End the processes of the engine; what still waits gets an EngineError."""
