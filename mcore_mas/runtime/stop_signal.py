"""Stop signals: handled from process start; training state is saved before the process exits.

The first Ctrl-C is urgent: within about `GRACE_S` the run gives up what it is doing, then saves its
state, and the process ends `ENDING_S` later at the latest. The second one ends the process at once.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn, TypeVar

from mcore_mas.runtime.user_terminal import user_terminal
from rollout.base.async_tasks import CLEANUP_S, cancel_tasks
from rollout.base.text import escape_line

_T = TypeVar("_T")

# Seconds after Ctrl-C: for the update under way, for cancelled tasks, and for code that blocks the event loop.
GRACE_S = 1.0
# Seconds from the saved state to the end of the process: for trackers, Ray, and threads of a team's code.
ENDING_S = 2.0
# Seconds between two interruptions of code that blocks the event loop.
_AGAIN_S = 0.25

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


@dataclass(slots=True)
class _Ending:
    """The way in which this process ends at once, without unwinding its stack."""

    prefix: str = ""  # beginning of the last line that it prints
    status: int = 143  # exit status after its state is saved
    callbacks: list[Callable[[], None]] = field(default_factory=list)  # called before the end


_ending = _Ending()


def set_ending(prefix: str, status: int) -> None:
    """Set the beginning of this process's last line, and its exit status if it is stopped."""
    _ending.prefix = prefix
    _ending.status = status


@contextmanager
def called_before_end(callback: Callable[[], None]) -> Iterator[None]:
    """Have a function called if this process ends at once during the block."""
    _ending.callbacks.append(callback)
    try:
        yield
    finally:
        _ending.callbacks.remove(callback)


def call_before_end() -> None:
    """Call the functions of `called_before_end`, because their blocks are not waited for."""
    for callback in list(_ending.callbacks):
        callback()


def _end_process(line: str, status: int) -> NoReturn:
    """End this process with a last line, without waiting for its tasks and threads."""
    call_before_end()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # this may interrupt a write to the stream
            stream.flush()
    _write_line(2, f"{_ending.prefix}{line}")
    os._exit(status)


def _end_at_second_interrupt() -> NoReturn:
    _end_process("ended by a second Ctrl-C; the same command continues from what is saved", 130)


def _write_line(descriptor: int, line: str) -> None:
    """Write a line from a signal handler, which may interrupt a write to a stream of Python."""
    with suppress(OSError):
        os.write(descriptor, f"{escape_line(line)}\n".encode())


def raise_on_stop_signals(*signals: signal.Signals) -> None:
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


def undo_raise_on_stop_signals() -> None:
    """Give the signals of `raise_on_stop_signals` the handlers that Python sets at its start."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _raise_stopped:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


@contextmanager
def preserved_sigterm_handler() -> Iterator[None]:
    """Keep the handler of SIGTERM over a block that calls `ray.init`.

    Ray replaces the handler by one that ends the process with status 15 and without a word. If
    SIGTERM comes meanwhile, the preserved handler is called after the block.
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
    if number == signal.SIGINT and _early_signals:
        _end_at_second_interrupt()
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

    The run abandons work that can be done again, and finishes and saves everything else. After
    Ctrl-C, the only urgent request, it also breaks off an update that takes longer than `GRACE_S`. A
    Ctrl-C after an earlier request to stop ends the process where it stands.

    Attributes:
        sender: who has asked to stop: the name of the signal, such as "SIGINT"; "Ctrl-C" if the program
            that calls the run was interrupted; otherwise "its caller".
        is_urgent: True if Ctrl-C has asked to stop, here or in the program that calls the run.
        is_settled: set when the run has stopped, and its state is saved if it can be.
        last_line: the run's last line, which says where it has stopped; "" until then.
    """

    def __init__(self, *, signals: bool = True) -> None:
        """Create a request that listens to no signal before `listen` is called.

        Args:
            signals: False: only `request` stops the run, and the process keeps its signal handlers.
        """
        self.sender = "its caller"
        self.is_urgent = False
        self.is_settled = threading.Event()
        self.last_line = ""
        self._event = asyncio.Event()
        self._signals = signals
        self._has_signal = False  # True once a signal has asked to stop
        self._is_finished = False
        self._loop: asyncio.AbstractEventLoop | None = None  # in which it listens
        self._listener: asyncio.Task[Any] | None = None  # the task that called `listen`
        self._working: asyncio.Future[Any] | None = None  # work that may be cancelled
        # True if `_interrupt_while_blocked` has sent a SIGURG that is not handled yet.
        self._sent_interruption = False
        # True once `_interrupt` has cancelled work, whose result is not used.
        self._has_interrupted = False

    @property
    def requested(self) -> bool:
        """True once the run was told to stop."""
        return self._event.is_set()

    @property
    def patience_s(self) -> float:
        """Seconds to wait for tasks that were cancelled."""
        return GRACE_S if self.is_urgent else CLEANUP_S

    def listen(self) -> None:
        """Handle all stop signals in the running event loop, also one that was blocked or came before."""
        self._loop = asyncio.get_running_loop()
        self._listener = asyncio.current_task()
        if not self._signals:
            return
        for number in STOP_SIGNALS:
            self._loop.add_signal_handler(number, self._event.set)
            # This handler takes the place of the loop's own, and also runs while code blocks the
            # loop. The loop still calls `_event.set`: it reads the signals' numbers from a socket.
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if _early_signals:
            early_signal = _early_signals[0]
            _early_signals.clear()
            self._handle(early_signal, None)
            self._event.set()

    def request(self, *, urgent: bool = False) -> None:
        """Tell the run to stop.

        Args:
            urgent: break off an update under way, because the caller was interrupted by Ctrl-C.
        """
        if urgent:
            self.sender = "Ctrl-C"
        self.is_urgent = self.is_urgent or urgent
        self._event.set()

    def request_threadsafe(self, *, urgent: bool = False) -> None:
        """Tell the run to stop, from another thread than that of its event loop; see `request`."""
        if self._loop is None:
            self.request(urgent=urgent)
            return
        with suppress(RuntimeError):  # the loop is closed, so the run has ended
            self._loop.call_soon_threadsafe(lambda: self.request(urgent=urgent))

    def responds(self, patience_s: float) -> bool:
        """Return False if the run's event loop is blocked for `patience_s`; called from another thread."""
        answered = threading.Event()
        if self._loop is None:
            return True
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # the loop is closed
            return True
        return answered.wait(patience_s)

    def end_soon(self, stopped: Stopped) -> None:
        """Note that the run has stopped; after an urgent signal, bound the time until the process ends.

        Tasks that ignore their cancellation, threads and trackers would keep a process alive.
        """
        self.last_line = str(stopped)
        self.is_settled.set()
        if self.is_urgent and self._signals:
            timer = threading.Timer(ENDING_S, _end_process, (self.last_line, _ending.status))
            timer.daemon = True
            timer.start()

    def finish(self) -> None:
        """Stop listening in the event loop, because the run has ended or is about to.

        From now on a signal is only noted, because the process is about to end. Only a Ctrl-C after an earlier stop
        ends the process at once.
        """
        self._is_finished = True
        if self._loop is None or not self._signals:
            return
        for number in STOP_SIGNALS:
            self._loop.remove_signal_handler(number)  # sets the default, which ends the process
            signal.signal(number, self._note_late_signal)

    def _note_late_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT and self.requested:
            _end_at_second_interrupt()
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
        try:
            return await self._run_until(self._event.wait(), work)
        except Abandoned:
            if message:
                raise Stopped(f"stopped by {self.sender}{message}") from None
            raise

    async def run_until_urgent(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of `work`, or cancel it if it takes longer than `GRACE_S` after an urgent request.

        Raises:
            Abandoned: it was cancelled.
        """

        async def wait_for_deadline() -> None:
            await self._event.wait()
            if not self.is_urgent:
                await asyncio.Event().wait()
            await asyncio.sleep(GRACE_S)

        return await self._run_until(wait_for_deadline(), work)

    async def _run_until(
        self, deadline: Coroutine[Any, Any, object], work: Coroutine[Any, Any, _T]
    ) -> _T:
        """Return the result of `work`; cancel it and raise Abandoned if `deadline` ends first."""
        working = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(deadline)
        outer_work = self._working
        self._working = working
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            # Interrupted code may catch the interruption and return anything, so its result is not used.
            if working.done() and not self._has_interrupted:
                return working.result()
            raise Abandoned
        finally:
            self._working = outer_work
            await cancel_tasks([working, waiting], self.patience_s)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a stop signal, or an interruption, in the middle of whatever the main thread does."""
        # A SIGURG of `_interrupt_while_blocked`; one from outside is a stop signal.
        if number == signal.SIGURG and self._sent_interruption:
            self._sent_interruption = False
            self._interrupt(frame)
            return
        if self._has_signal or self.requested:
            if number == signal.SIGINT:
                _end_at_second_interrupt()
            return
        self._has_signal = True
        self.sender = signal.Signals(number).name
        self.is_urgent = number == signal.SIGINT
        self._announce(
            f"{self.sender}: stopping after the state of the run is saved; "
            "a Ctrl-C from now on ends it at once"
        )
        if self.is_urgent:
            threading.Thread(target=self._interrupt_while_blocked, daemon=True).start()

    def _interrupt_while_blocked(self) -> None:
        """Interrupt the main thread as long as code in it, such as a user's, blocks the event loop."""
        patience_s = GRACE_S
        while not (self._is_finished or self.is_settled.is_set()):
            if self._loop is None or self._loop.is_closed():
                return
            if self.responds(patience_s):
                self.is_settled.wait(_AGAIN_S)
                continue
            self._sent_interruption = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
            patience_s = _AGAIN_S

    def _interrupt(self, frame: FrameType | None) -> None:
        """Cancel the work under way from within the task that blocks the event loop.

        The task that called `listen` is not interrupted: it runs code of this project only, and it
        saves the state.
        """
        task = asyncio.current_task(self._loop)
        if task is None or task is self._listener:
            return
        if frame is not None and not self._has_interrupted:
            code = frame.f_code
            line = f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
            self._announce(f"{self.sender}: interrupted {line}, which blocks the event loop")
        self._has_interrupted = True
        if self._working is not None:
            self._working.cancel()  # also the tasks that it waits for, before they run again
        raise asyncio.CancelledError

    def _announce(self, line: str) -> None:
        """Print a line to the log of the run, and then to the terminal if that is another file.

        The user may answer the line at the terminal with a second Ctrl-C, which ends the process here.
        """
        terminal = user_terminal()
        streams = [sys.stderr]
        if terminal is not None and terminal is not sys.stderr:
            streams.append(terminal)
        for stream in streams:
            with suppress(OSError, ValueError):  # a stream without a file
                _write_line(stream.fileno(), line)
