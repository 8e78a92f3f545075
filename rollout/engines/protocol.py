"""Protocols of engines: sampling, streaming, and updates of the weights."""

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

# Parts of an engine's memory that it can free while it sleeps.
Tag = Literal["weights", "kv_cache"]


class Engine(Protocol):
    """Sampler of a policy's tokens."""

    @abstractmethod
    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion for `prompt_ids` [P].

        Raises:
            EngineError: the request cannot be served (too long, bad token ids or sampling), or the
                engine is broken.
        """

    async def load_weights(self, tensors: WeightStream, version: int) -> None:
        """Replace all weights by a stream of (Hugging Face name, tensor or its blocks of rows).

        Raises:
            EngineError: a tensor is missing, unknown or of another shape.
        """


@dataclass(frozen=True, slots=True)
class TokenCallback:
    """Callback for the tokens of a reply while it is sampled.

    Attributes:
        call: called with the position of the first new token, and the new tokens. The position is 0
            again if the engine had to sample the reply from the start. If it returns False, the
            engine ends the reply with the tokens so far and the finish reason `abort`.
        every: number of new tokens that the engine collects before it calls again.
    """

    call: Callable[[int, Sequence[int]], bool]
    every: int = 1

    def __call__(self, position: int, token_ids: Sequence[int]) -> bool:
        return self.call(position, token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredReply:
    """Reply of another model whose tokens an engine scores.

    Attributes:
        prompt_ids: token ids of the prompt [P].
        completion_ids: token ids of the reply [C].
        temperature: temperature that divides the logits; above 0.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    temperature: float = 1.0


class ScoringEngine(Protocol):
    """Engine that computes the log-probabilities of given replies."""

    @abstractmethod
    async def score(self, replies: Sequence[ScoredReply]) -> list[list[float]]:
        """Return the log-probabilities [C] of each reply's tokens, in nats and after its temperature.

        Raises:
            EngineError: a reply cannot be scored (too long, bad token ids), or the engine is broken.
        """


class StreamingEngine(Protocol):
    """Engine that reports the tokens of a reply while it is sampled."""

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
    """Engine whose weights another process trains.

    Attributes:
        version: version of its weights.
        pause_s: seconds in which the last update kept the engine from decoding.
        starts: number that grows with every start of one of its processes.
    """

    version: int
    pause_s: float
    starts: int

    async def load_weights(self, tensors: WeightStream, version: int) -> None:
        """Replace all weights through the engine's transport; see `Engine`."""
        route = await self.begin_update()
        sender = make_sender(route)
        update = await asyncio.to_thread(sender.send, tensors, version, route.half)
        await asyncio.to_thread(sender.close)
        await self.commit_update(update)

    @abstractmethod
    async def begin_update(self) -> SyncRoute:
        """Return the route along which the next weights must be sent.

        Processes that have died are started again.
        """

    @abstractmethod
    async def commit_update(self, update: WeightUpdate) -> None:
        """Use the weights that were written to the route, after comparing their checksums.

        Raises:
            EngineError: the weights differ from the trainer's. Replies of the engine are not
                reliable until another update has succeeded.
        """

    def abort_update(self, error: Exception) -> None:
        """Fail the calls that wait for new weights with `error`, because no weights will come.

        By default no call waits.
        """
        return

    async def weights_lost(self) -> None:
        """Wait until a call needs weights that were lost with a process of the engine.

        The trainer must then send the present version again. By default no weights are lost.
        """
        await asyncio.Event().wait()

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Free memory until `wake`. An engine that frees its weights may need an update afterwards.

        Raises:
            EngineError: requests are running.
        """

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Allocate memory again that `sleep` has freed."""

    def close(self) -> None:
        """End the processes of the engine; open requests get an EngineError."""
