"""Early stop of training: the signals that ask for it, and the errors that end a run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from mcore_mas.rollout.base.task_group import cancel_tasks

_T = TypeVar("_T")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGURG)  # the latter can be sent to all of a job: others ignore it


class TrainingError(RuntimeError):
    """Training cannot go on: one line that says what, where, what to do."""


class Stopped(Exception):
    """Training ended early because it was told to, with all that was learned saved."""


class Abandoned(Exception):
    """What was under way is done again by the next start: the run was told to stop."""


class StopSignal:
    """SIGTERM or SIGURG: what can be done again is abandoned, all else is finished first."""

    def __init__(self, *, signals: bool = True) -> None:
        """Without `signals` only `tell` stops the run, and the process keeps its handlers."""
        self._told = asyncio.Event()
        self._signals = signals

    def tell(self) -> None:
        """Tell the run to stop."""
        self._told.set()

    def listen(self) -> None:
        """Take both signals in the running event loop, also one that was held back until now."""
        if not self._signals:
            return
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._told.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    @property
    def came(self) -> bool:
        """Whether the run was told to stop."""
        return self._told.is_set()

    async def unless(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What `work` comes to.

        Raises:
            Abandoned: the run was told to stop first, and `work` has been cancelled.
        """
        working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(self._told.wait())
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Abandoned
            return working.result()
        finally:
            await cancel_tasks([working, waiting])
