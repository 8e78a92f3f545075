"""Engines and trainers that only record when they sleep and wake."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout.base.errors import EngineError


class Sleeper:
    """Engine or trainer that appends lines such as "critic sleeps" to a log.

    A call takes a moment, so that calls which should wait for others are out of order if they do
    not.
    """

    def __init__(self, name: str, log: list[str], *, is_busy: bool = False) -> None:
        """Initialize a sleeper.

        Args:
            name: name in the log.
            log: log of all sleepers of a test.
            is_busy: `sleep` raises an error after its work, as an engine with running requests
                does.
        """
        self._name = name
        self._log = log
        self._is_busy = is_busy

    async def sleep(self, tags: tuple[str, ...] = ()) -> int:
        await self._record("sleeps", tags)
        if self._is_busy:
            raise EngineError("requests are running")
        return 0

    async def wake(self, tags: tuple[str, ...] = ()) -> None:
        await self._record("wakes", tags)

    @asynccontextmanager
    async def offloaded(self) -> AsyncIterator[None]:
        await self.sleep()
        yield
        await self.wake()

    async def _record(self, verb: str, tags: tuple[str, ...]) -> None:
        await asyncio.sleep(0)
        self._log.append(" ".join([self._name, verb, "+".join(tags)]).rstrip())
