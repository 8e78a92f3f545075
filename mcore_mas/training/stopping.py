"""Early stop: the signals that ask for it, from the first line of a process on, and the errors that end a run."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from mcore_mas.rollout.base.task_group import cancel_tasks

_T = TypeVar("_T")

# SIGURG can be sent to all of a job: others ignore it
STOP_SIGNALS = (signal.SIGTERM, signal.SIGURG, signal.SIGUSR1, signal.SIGINT)


class TrainingError(RuntimeError):
    """Training cannot go on: one line that says what, where, what to do."""


class Stopped(Exception):
    """A process ended early because it was told to, with all that was learned saved."""


def stop_at_start(*numbers: signal.Signals) -> None:
    """Have these signals, by default all of `STOP_SIGNALS`, raise `Stopped` until a `StopSignal` listens to them.

    Only the main thread hears signals; called from another one this does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        for number in numbers or STOP_SIGNALS:
            signal.signal(number, _stop)


_early: list[int] = []  # signals that came before anybody listened


def _stop(number: int, _: object) -> None:
    _early.append(number)  # what is raised in a finaliser goes no further
    raise Stopped(f"stopped by {signal.Signals(number).name}; the same command goes on from what is saved")


class Abandoned(Exception):
    """What was under way is done again by the next start: the run was told to stop."""


class StopSignal:
    """One of `STOP_SIGNALS`: what can be done again is abandoned, all else is finished first.

    A second Ctrl-C ends the process where it stands.
    """

    def __init__(self, *, signals: bool = True) -> None:
        """Without `signals` only `tell` stops the run, and the process keeps its handlers."""
        self._told = asyncio.Event()
        self._signals = signals
        self.by = "its caller"  # who told it

    def tell(self, number: int | None = None) -> None:
        """Tell the run to stop, by the signal of this number or without one."""
        if number == signal.SIGINT and self._told.is_set():
            raise KeyboardInterrupt
        self.by = signal.Signals(number).name if number else self.by
        self._told.set()

    def listen(self) -> None:
        """Take all signals in the running event loop, also one that was held back until now."""
        if not self._signals:
            return
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self.tell, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if _early:
            self.tell(_early.pop())

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
