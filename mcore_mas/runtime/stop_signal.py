"""Stop signals: handled from process start; training state is saved before the process exits."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from mcore_mas.runtime.user_terminal import user_terminal
from rollout.base.async_tasks import cancel_tasks
from rollout.base.processes import say

_T = TypeVar("_T")

# SIGURG can be sent to every process of a Slurm job, because processes without a handler ignore it.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGURG, signal.SIGUSR1, signal.SIGINT)

_early_signals: list[int] = []  # received before a `StopSignal` listened


class Stopped(BaseException):
    """Early end of a process that was told to stop; the same command continues from its saved state.

    A signal raises it anywhere, also in libraries. It is no `Exception`, so that no code that
    handles errors takes it for an error.
    """


class Abandoned(Exception):
    """Cancellation of work by a request to stop; the next start does the work again."""


def stop_at_start(*signals: signal.Signals) -> None:
    """Let signals, by default all of `STOP_SIGNALS`, raise `Stopped` until a `StopSignal` listens to them.

    Python drops an exception that is raised within a finaliser or a callback of a weak reference, which every import
    has. The signal is then sent again.

    Only the main thread receives signals; called from another thread this does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        sys.unraisablehook = _send_dropped_signal_again
        for number in signals or STOP_SIGNALS:
            signal.signal(number, _raise_stopped)


def ignore_stop_signals() -> None:
    """Ignore `STOP_SIGNALS` from now on, because the process ends and its exit status is decided.

    A handler would be dropped before the interpreter has ended, and the signal would end the process.
    """
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def sigterm_handler_kept() -> Iterator[None]:
    """Keep the handler of SIGTERM over a block that calls `ray.init`.

    Ray replaces the handler by one that ends the process with status 15 and without a word. If
    SIGTERM comes meanwhile, the kept handler is called after the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Ray leaves the handler alone
        return

    handler = signal.getsignal(signal.SIGTERM)
    try:
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, handler)
    except SystemExit as exit_request:
        if exit_request.code == signal.SIGTERM:  # Ray's handler was called
            signal.raise_signal(signal.SIGTERM)
        raise


def _raise_stopped(number: int, _frame: object) -> None:
    _early_signals.append(number)  # a library may catch the exception and continue
    raise Stopped(
        f"stopped by {signal.Signals(number).name}; the same command continues from what is saved"
    )


def _send_dropped_signal_again(dropped: "sys.UnraisableHookArgs") -> None:
    if not isinstance(dropped.exc_value, Stopped):
        sys.__unraisablehook__(dropped)
        return
    # A thread sends it, because the main thread would handle it here, where exceptions are dropped.
    timer = threading.Timer(0.01, _send_early_signal_again)
    timer.daemon = True
    timer.start()


def _send_early_signal_again() -> None:
    if _early_signals:  # no `StopSignal` has handled it meanwhile
        os.kill(os.getpid(), _early_signals.pop())


class StopSignal:
    """A request to stop a run, by one of `STOP_SIGNALS` or by a call.

    The run abandons work that can be done again, and finishes and saves everything else. A Ctrl-C after an
    earlier request to stop ends the process where it stands.
    """

    def __init__(self, *, signals: bool = True) -> None:
        """Listen to nothing yet.

        Args:
            signals: False: only `request` stops the run, and the process keeps its signal handlers.
        """
        self.sender = "its caller"  # or the name of the signal
        self._event = asyncio.Event()
        self._signals = signals
        self._loop: asyncio.AbstractEventLoop | None = None  # in which it listens

    @property
    def requested(self) -> bool:
        """True once the run was told to stop."""
        return self._event.is_set()

    def listen(self) -> None:
        """Handle all stop signals in the running event loop, also one that was blocked or came before."""
        self._loop = asyncio.get_running_loop()
        if not self._signals:
            return
        for number in STOP_SIGNALS:
            self._loop.add_signal_handler(number, self.request, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if _early_signals:
            early_signal = _early_signals[0]
            _early_signals.clear()
            self.request(early_signal)

    def request(self, number: int | None = None) -> None:
        """Tell the run to stop.

        Args:
            number: the signal that asks for it; None: the caller does.

        Raises:
            KeyboardInterrupt: this is Ctrl-C, and the run was told to stop before.
        """
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        if number is not None:
            self.sender = signal.Signals(number).name
            if not self.requested:
                self._announce()
        self._event.set()

    def request_threadsafe(self) -> None:
        """Tell the run to stop, from another thread than that of its event loop."""
        if self._loop is None:
            self.request()
            return
        with suppress(RuntimeError):  # the loop is closed, so the run has ended
            self._loop.call_soon_threadsafe(self.request)

    def finish(self) -> None:
        """Stop listening in the event loop, because the run has ended or is about to.

        From now on a signal is only noted, because the process is about to end. Only a Ctrl-C after an earlier stop
        ends the process at once.
        """
        if self._loop is None or not self._signals:
            return
        for number in STOP_SIGNALS:
            self._loop.remove_signal_handler(number)  # sets the default, which ends the process
            signal.signal(number, self._note_late_signal)

    def _note_late_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self._event.set()

    async def run_until_stopped(self, work: Coroutine[Any, Any, _T], message: str = "") -> _T:
        """Return the result of `work`, or cancel it when the run is told to stop.

        Args:
            work: a coroutine that may be cancelled at any time.
            message: end of the last line of the process, after "stopped by SIGTERM"; "" if the process continues.

        Raises:
            Abandoned: the run was told to stop, and there is no message.
            Stopped: the run was told to stop, and there is one.
        """
        working = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if message:
                raise Stopped(f"stopped by {self.sender}{message}")
            raise Abandoned
        finally:
            await cancel_tasks([working, waiting])

    def _announce(self) -> None:
        """Print that the run stops, to its log and to the terminal."""
        line = (
            f"{self.sender}: stopping after the state of the run is saved; "
            "a Ctrl-C from now on ends it at once"
        )
        for stream in {sys.stderr, user_terminal()} - {None}:
            say(line, stream)
