"""Embedded engines made of others: replicas in several Ray actors."""

import asyncio
import functools
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout.base.errors import EngineError
from rollout.base.processes import Restarts, say
from rollout.engines.embedded.engine import ActorDied, HostedEngine
from rollout.engines.protocol import StreamingEngine, Tag, TokenCallback, TrainedEngine
from rollout.records.trajectory import Completion, Sampling
from rollout.sync.transport import SyncRoute, WeightUpdate

Place = Mapping[str, Any]  # options of an actor
_LOOK_S = 5.0  # between looks for actors that have died while nobody asked them anything


class ReplicatedEngine(StreamingEngine, TrainedEngine):
    """Actors of one policy on any nodes, which take their weights from a folder that all of them see.

    A call goes to the actor that has the fewest, or to one that is asked the same prompt, which it then computes once,
    if that has few more. One that dies leaves, and what it was asked the others are asked; the last one is started
    again, `restarts` times an hour. After each update of the weights actors join, where there are fewer than there may
    be and `take` has a place for one.
    """

    transport = "disk"

    def __init__(
        self,
        folder: Path | str,
        *,
        places: Sequence[Place],
        weights_folder: Path | str,
        joining: int = 0,
        berths: tuple[Callable[[], Place | None], Callable[[Place], None]] | None = None,
        restarts: int = 2,
        tell: Callable[[str], None] = say,
        **settings: Any,
    ) -> None:
        """Start an actor in each of `places` on the Hugging Face model in `folder`.

        Args:
            joining: how many more there may be.
            berths: gives one more place, or None where nothing is free; and takes one back. None: none are to be had.
            restarts: of the last one.
            tell: called with one line when one joins or leaves.
            settings: further fields of `HostedSettings`.
        """
        self.version, self.pause_s, self.starts = 0, 0.0, 0
        self._folder, self._weights_folder, self._source = (
            str(folder),
            Path(weights_folder),
            str(folder),
        )
        self._take, self._give = berths or (lambda: None, lambda place: None)
        self._most, self._restarts, self._tell = (
            len(places) + joining,
            Restarts("engine", restarts),
            tell,
        )
        settings |= {
            "far": True,
            "transport": self.transport,
            "weights_folder": weights_folder,
            "restarts": 0,
        }
        self._make = functools.partial(HostedEngine, folder, **settings)
        self._actors: dict[HostedEngine, Place] = {}
        self._watch: asyncio.Task[None] | None = None
        for place in places:
            self._add(place)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_tokens: TokenCallback | None
    ) -> Completion:
        """Sample one completion (see `StreamingEngine`), by whichever actor is left."""
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look())
        while True:
            actor = min(self._actors, key=lambda actor: actor.burden(prompt_ids))
            try:
                return await actor.stream(prompt_ids, sampling, on_tokens)
            except ActorDied as error:
                self._leave(actor, error)

    async def begin_update(self) -> SyncRoute:
        """A folder below that of the weights, once all actors have answered or left."""
        await self._each(lambda actor: actor.stats())
        return SyncRoute(
            transport=self.transport,
            target=str(self._weights_folder),
            model=self._folder,
            checksums=True,
        )

    async def commit_update(self, update: WeightUpdate) -> None:
        """Have every actor compute from the weights of `update`, and others join."""
        began, self.version, self._source = time.perf_counter(), update.version, update.location
        await self._each(lambda actor: actor.commit_update(update))
        self.pause_s = time.perf_counter() - began
        while (
            len(self._actors) < self._most
            and (place := await asyncio.to_thread(self._take)) is not None
        ):
            self._add(place)
            self._tell(
                f"an actor of the engine joined with version {self.version}; there are {len(self._actors)}"
            )

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        await self._each(lambda actor: actor.sleep(tags))

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        await self._each(lambda actor: actor.wake(tags))

    def close(self) -> None:
        """End the actors and remove what was handed over."""
        for actor in self._actors:
            actor.end()
        shutil.rmtree(self._weights_folder, ignore_errors=True)

    async def _look(self) -> None:
        """Have actors leave whose nodes are gone: as long as one stays, Ray keeps a place elsewhere for it."""
        with suppress(
            EngineError
        ):  # the last one has died, which the next call says; or all are closed
            while True:
                await self._each(lambda actor: actor.stats())
                await asyncio.sleep(_LOOK_S)

    def _add(self, place: Place) -> None:
        self.starts += 1
        self._actors[self._make(version=self.version, source=self._source, place=place)] = place

    async def _each(self, call: Callable[[HostedEngine], Awaitable[Any]]) -> None:
        """Call every actor; those that die of it leave."""

        async def one(actor: HostedEngine) -> None:
            try:
                await call(actor)
            except ActorDied as error:
                self._leave(actor, error)

        await asyncio.gather(*map(one, list(self._actors)))

    def _leave(self, actor: HostedEngine, error: ActorDied) -> None:
        """Go on without an actor; without the last one with another in its place."""
        if actor not in self._actors:
            return
        if len(self._actors) > 1:
            self._tell(f"an actor of the engine left, there are {len(self._actors) - 1}: {error}")
            self._give(self._actors[actor])
        elif error.at_start or not self._restarts.take():
            raise error
        else:
            self._tell(
                f"{error}; started again with version {self.version}, {self._restarts.left} starts left"
            )
            self._add(self._actors[actor])
        del self._actors[actor]
        actor.end()
