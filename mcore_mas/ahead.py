"""The experience of every step, collected ahead of its training by no more than the allowed staleness.

A step's collection may begin as soon as no policy's weights can be handed over more often than its staleness before
that step is trained: no turn can be further behind when it trains. Replies that are under way when new weights arrive
go on with them, and say which tokens are whose (`Turn.versions`).

Nothing of this is saved. A run that stops has trained some number of steps, and goes on with the next: what was being
collected for it, or waited to be trained, is collected again, by the weights that the run goes on with.
"""

from __future__ import annotations

import asyncio
from itertools import takewhile
from types import TracebackType

from mcore_mas.experience import Experience, gather
from mcore_mas.run import Run
from rollout.together import stop


class Ahead:
    """Collections under way, ended with the block that they are for."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._under_way: dict[int, asyncio.Task[Experience]] = {}  # by step

    async def take(self, step: int) -> Experience:
        """The experience of `step`, which is about to be trained. Later steps' begins as far as staleness allows.

        Raises:
            TrainingError, CreditError: as `gather`, when the step it happened in is taken.
        """
        config = self._run.config
        for later in takewhile(lambda later: config.may_collect(later, step), range(step, config.trainer.steps)):
            if later not in self._under_way:
                self._under_way[later] = asyncio.create_task(gather(self._run, later))
        experience = await self._under_way[step]
        del self._under_way[step]
        return experience

    async def __aenter__(self) -> Ahead:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await stop(self._under_way.values())
