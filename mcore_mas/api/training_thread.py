"""A training in a thread of its own, from which a program takes one step after the other."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from mcore_mas.runtime.stop_signal import ENDING_S, Stopped, StopSignal, call_before_end
from rollout.base.terminal import say

StepRow = dict[str, float]  # metrics of a step by name, with the number of the step

_POLL_S = 0.2
# Seconds without a turn of the event loop after which Ctrl-C does not wait for the training.
_BLOCKED_S = 2.0


class TrainingThread:
    """A training that waits after each step until the next one is requested."""

    def __init__(self, config: Path) -> None:
        """Start the training of the run with this resolved config."""
        self._folder = config.parent
        self._stop = StopSignal(signals=False)
        # Rows of metrics; then the error that ended the training, or None if there was none.
        self._rows: queue.Queue[StepRow | BaseException | None] = queue.Queue()
        # Answers for which the training waits after each row: True to take another step, False to stop.
        self._continue: queue.Queue[bool] = queue.Queue()
        self._awaits_answer = False  # True if the row that `next` returned last has no answer yet
        # A daemon, so that a second Ctrl-C ends the program without waiting for it.
        self._thread = threading.Thread(
            target=self._train, args=(config,), name="training", daemon=True
        )
        self._interrupted = False  # True once Ctrl-C was pressed: `close` does not wait then
        self._has_reported_stop = False
        self._thread.start()
        # A program may end in the middle of its loop. Then the checkpoint must be saved before
        # asyncio's executors shut down; callbacks of `atexit` would run after that.
        threading._register_atexit(self.close)  # type: ignore[attr-defined]

    def next(self) -> StepRow | None:
        """Return the metrics of the next step, or None after the last one or once the training is closed.

        Do not call this method again after it has returned None.

        Raises:
            BaseException: the error that ended the training.
        """
        if self._awaits_answer:
            self._continue.put(True)
        self._awaits_answer = False
        item = self._rows.get()
        if isinstance(item, BaseException):
            raise item.with_traceback(None)  # the frames of the thread say nothing to its caller
        self._awaits_answer = item is not None
        return item

    def close(self) -> None:
        """Stop the training and wait until it has saved a checkpoint.

        A rollout under way is cancelled, and an update is finished. Ctrl-C ends the wait, and the
        program then ends without the checkpoint. An error that kept the training from saving it is
        printed.
        """
        if self._interrupted:
            return
        self._stop.request_threadsafe()
        self._continue.put(False)  # so that the training does not wait for an answer
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self._interrupted = True
            raise
        self._print_errors()

    def interrupt(self) -> None:
        """Stop the training at Ctrl-C, and wait until it has saved a checkpoint.

        An update that takes long is broken off. If code of the team blocks the training, the wait ends
        without a checkpoint, while that code goes on in the thread. Another Ctrl-C also ends the wait.
        """
        self._interrupted = True
        self._stop.request_threadsafe(urgent=True)
        self._continue.put(False)
        blocking = wait_for_stop(self._thread, self._stop)
        if self._stop.last_line:
            self._report_stop(self._stop.last_line)
        if blocking:
            say(
                f"{self._folder}: stopped without a checkpoint, because code of the team blocks the "
                f"training at {blocking}; the same program continues from what is saved"
            )
        self._print_errors()

    def join(self) -> None:
        """Wait for the end of the thread, also if `close` or `interrupt` has stopped waiting for it."""
        self._thread.join()

    def _report_stop(self, last_line: str) -> None:
        """Print the last line of the training, "stopped by ... after step N", unless it was printed before."""
        if not self._has_reported_stop:
            self._has_reported_stop = True
            say(f"{self._folder}: {last_line}")

    def _print_errors(self) -> None:
        """Print the errors that `next` has not raised; the following call of `next` returns None."""
        from mcore_mas.runtime.error_description import describe_error

        while not self._rows.empty():
            item = self._rows.get()
            if isinstance(item, BaseException):
                say(f"{self._folder}: {describe_error(item)}")
        self._rows.put(None)

    def _train(self, config: Path) -> None:
        """Train, and put the metrics of each step into the queue, then the error, or None."""
        from mcore_mas.runtime.joblog import logged_cause
        from mcore_mas.training.train import train

        async def after_step(number: int, metrics: Mapping[str, float]) -> bool:
            self._rows.put({"step": number, **metrics})
            return await asyncio.to_thread(self._continue.get)

        try:
            with logged_cause(self._folder):
                try:
                    train(config, after_step=after_step, stop=self._stop)
                except RuntimeError as error:
                    # From Python 3.12 on, asyncio fails to end its threads while the interpreter shuts down. The
                    # error that ended the training is then the `__context__` of that error.
                    hidden_error = error.__context__
                    if hidden_error is None or "at interpreter shutdown" not in str(error):
                        raise
                    raise hidden_error from None
        except Stopped as stopped:
            self._report_stop(str(stopped))
            self._rows.put(None)
        except BaseException as error:
            self._rows.put(error)
        else:
            self._rows.put(None)


def wait_for_stop(thread: threading.Thread, stop: StopSignal) -> str:
    """Wait for a thread with an event loop that was told to stop, but not for code that blocks the loop.

    Returns:
        The line at which the loop is blocked; "" if the run has stopped and saved its state. Its thread may
        still be shutting down trackers and Ray, for which this waits ENDING_S at most.
    """
    blocking_line = ""
    while thread.is_alive() and not stop.is_settled.is_set() and not blocking_line:
        thread.join(_POLL_S)
        responds = stop.responds(_BLOCKED_S)
        # If the run stopped during this check, trackers and Ray block its loop, not code of the team.
        if not responds and not stop.is_settled.is_set():
            blocking_line = _location_of(thread)
    if not blocking_line:
        thread.join(ENDING_S)  # trackers and Ray
    if thread.is_alive():
        # The program may end before this thread does, and ray_cleanup's helper process would then report
        # that the run was killed. Tell it now that the run was stopped.
        call_before_end()
    return blocking_line


def _location_of(thread: threading.Thread) -> str:
    """Return the line that a thread is at, as "file:line (function)", or "its end" if it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "its end"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
