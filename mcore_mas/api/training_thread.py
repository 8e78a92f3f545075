"""A training in a thread of its own, from which a program takes one step after the other."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Mapping
from pathlib import Path

from rollout.base.processes import say

StepRow = dict[str, float]  # metrics of a step by name, with the number of the step


class TrainingThread:
    """A training that waits after each step until the next one is requested."""

    def __init__(self, config: Path) -> None:
        """Start the training of the run with this resolved config."""
        from mcore_mas.runtime.stop_signal import StopSignal

        self._folder = config.parent
        self._stop = StopSignal(signals=False)
        # Rows of metrics; then the error that ended the training, or None if there was none.
        self._rows: queue.Queue[StepRow | BaseException | None] = queue.Queue()
        # For each row: True to take another step, False to stop.
        self._continue: queue.Queue[bool] = queue.Queue()
        self._awaits_answer = False  # True while the training waits for the answer to a row
        # A daemon, so that a second Ctrl-C ends the program without waiting for it.
        self._thread = threading.Thread(
            target=self._train, args=(config,), name="training", daemon=True
        )
        self._interrupted = False  # True once Ctrl-C has ended the wait for the thread
        self._thread.start()
        # A program may end in the middle of its loop. Then the checkpoint must be saved before
        # asyncio's executors shut down; callbacks of `atexit` would run after that.
        threading._register_atexit(self.close)  # type: ignore[attr-defined]

    def next(self) -> StepRow | None:
        """Return the metrics of the next step, or None after the last one.

        Raises:
            BaseException: the error that ended the training.
        """
        if self._awaits_answer:
            self._continue.put(True)
        self._awaits_answer = False
        row = self._rows.get()
        if isinstance(row, BaseException):
            raise row.with_traceback(None)  # the frames of the thread say nothing to its caller
        self._awaits_answer = row is not None
        return row

    def close(self) -> None:
        """Stop the training and wait until it has saved a checkpoint.

        A rollout under way is cancelled, and an update is finished. Ctrl-C ends the wait, and the
        program then ends without the checkpoint. An error that kept it from saving is printed.
        """
        from mcore_mas.runtime.joblog import describe_error

        if self._interrupted:
            return
        self._stop.request_threadsafe()
        self._continue.put(False)  # the answer to the last row, or to that of a step under way
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self._interrupted = True
            raise
        while not self._rows.empty():
            row = self._rows.get()
            if isinstance(row, BaseException):
                say(f"{self._folder}: {describe_error(row)}")

    def _train(self, config: Path) -> None:
        from mcore_mas.runtime.stop_signal import Stopped
        from mcore_mas.training.train import train

        async def after_step(number: int, metrics: Mapping[str, float]) -> bool:
            self._rows.put({"step": number, **metrics})
            return await asyncio.to_thread(self._continue.get)

        try:
            train(config, after_step=after_step, stop=self._stop)
        except BaseException as error:
            cause: BaseException | None = error
            if "at interpreter shutdown" in str(error):
                # From Python 3.12 on, asyncio fails to end its threads while the interpreter shuts down. That
                # error hides the one that ended the training, which is its context.
                cause = error.__context__
            if isinstance(cause, Stopped):
                say(f"{self._folder}: {cause}")
                self._rows.put(None)
            else:
                self._rows.put(error)
        else:
            self._rows.put(None)
