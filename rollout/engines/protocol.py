"""Protocols of engines: sampling, streaming, and taking a trainer's weights."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from rollout.records.trajectory import Completion, Sampling
from rollout.sync.transport import SyncRoute, WeightUpdate, make_sender

if TYPE_CHECKING:
    from rollout.models.tensors import WeightStream

Tag = Literal["weights", "kv_cache"]  # what an engine can do without while it sleeps


class Engine(Protocol):
    """A policy's rollout side. Transports stay inside an engine's file."""

    @abstractmethod
    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion for `prompt_ids` [P].

        Raises:
            EngineError: the request cannot be served (too long, bad token ids or sampling), or the engine is broken.
        """

    async def load_weights(self, tensors: WeightStream, version: int) -> None:
        """Replace all weights by a stream of (Hugging Face name, full tensor or its blocks of rows).

        Raises:
            EngineError: a tensor is missing, unknown or of another shape; the old weights stay.
        """


@dataclass(frozen=True, slots=True)
class TokenCallback:
    """Callback for the tokens of a reply while it is sampled.

    The engine passes the position of the first new token and the new tokens. The position is 0 again if the engine had
    to sample the reply from the start. If the callback returns False, the engine ends the reply with the tokens so far
    and the finish reason `abort`.
    """

    call: Callable[[int, Sequence[int]], bool]
    every: int = 1  # new tokens that the engine collects before it calls again

    def __call__(self, position: int, token_ids: Sequence[int]) -> bool:
        return self.call(position, token_ids)


class StreamingEngine(Protocol):
    """An engine that passes tokens on while a reply is sampled."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion; see `Engine`."""
        return await self.stream(prompt_ids, sampling, None)

    @abstractmethod
    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_tokens: TokenCallback | None
    ) -> Completion:
        """Sample one completion, and call `on_tokens` while it is sampled."""
        raise NotImplementedError


class TrainedEngine(Engine, Protocol):
    """An engine whose weights another process trains."""

    version: int  # of the weights it holds
    pause_s: float  # that the last update kept it from decoding
    starts: int  # of its processes so far

    async def load_weights(self, tensors: WeightStream, version: int) -> None:
        """As `Engine`, over the engine's own transport."""
        route = await self.begin_update()
        sender = make_sender(route)
        update = await asyncio.to_thread(sender.send, tensors, version, route.half)
        await self.commit_update(update)

    @abstractmethod
    async def begin_update(self) -> SyncRoute:
        """Where the next weights should be written, and how; starts again what has died."""

    @abstractmethod
    async def commit_update(self, update: WeightUpdate) -> None:
        """Take the weights that lie where `begin_update` said, and compare their checksums.

        Raises:
            EngineError: they are not the trainer's; what the engine computes with is then not to be relied on.
        """

    def abort_update(self, error: Exception) -> None:
        """The weights that were to come will not: calls that wait for them fail with `error`; by default none does."""
        return

    async def weights_lost(self) -> None:
        """Wait until a call needs weights that were lost in a death; the present version must then come again.

        By default they never are.
        """
        await asyncio.Event().wait()

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Give memory back until `wake`. Who sleeps without weights wakes without them.

        Raises:
            EngineError: requests are running.
        """

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Take memory again."""

    def close(self) -> None:
        """End the processes of the engine; what still waits gets an EngineError."""
