"""A thread that says when the event loop itself stands still, and in which code: no timer of its own could."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

_FRAMES = 4  # of the code that blocks, the innermost last


class Pulse:
    """Watches the thread that made it, until `end`.

    After `quiet_s` without a `beat` one line goes to `say`, again after twice the time, four times, and so on.
    """

    def __init__(self, quiet_s: float, say: Callable[[str], None]) -> None:
        self._quiet_s = quiet_s
        self._say = say
        self._watched = threading.get_ident()
        self._last = time.monotonic()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="pulse", daemon=True).start()

    def beat(self) -> None:
        """The event loop is alive."""
        self._last = time.monotonic()

    def end(self) -> None:
        """Watch no more."""
        self._ended.set()

    def _watch(self) -> None:
        patience = self._quiet_s
        while not self._ended.wait(self._quiet_s / 4):
            quiet = time.monotonic() - self._last
            if quiet < self._quiet_s:
                patience = self._quiet_s
            elif quiet >= patience:
                patience = 2 * quiet
                self._say(
                    f"the event loop has been blocked for {quiet:.0f} s, so that no deadline holds and nobody goes on, "
                    f"in {_where(self._watched)}"
                )


def _where(thread: int) -> str:
    frames = traceback.extract_stack(sys._current_frames().get(thread))[-_FRAMES:]
    return " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
