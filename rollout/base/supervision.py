"""Supervision: what of a run is started again when it is lost, each part so often in an hour and no more."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

_HOUR_S = 3600.0
_counted: Counter[str] = Counter()  # restarts in this process, by part


class ProcessLost(Exception):
    """Processes of a run are gone, or hang, and can be started again: one line that names them."""


class Restarts:
    """How often one part of a run may be started again: `per_hour` times in any hour."""

    def __init__(self, part: str, per_hour: int, clock: Callable[[], float] = time.monotonic) -> None:
        """None so far of `part`, which is what metrics call it."""
        self._part, self._per_hour, self._clock = part, per_hour, clock
        self._times: deque[float] = deque()

    @property
    def left(self) -> int:
        """How many there are now."""
        while self._times and self._clock() - self._times[0] >= _HOUR_S:
            self._times.popleft()
        return self._per_hour - len(self._times)

    def take(self) -> bool:
        """Count one; False, and not counted, where none is left."""
        if self.left <= 0:
            return False
        self._times.append(self._clock())
        _counted[self._part] += 1
        return True


def restart_metrics() -> dict[str, float]:
    """`restarts/<part>` of each part that this process has started again."""
    return {f"restarts/{part}": float(count) for part, count in _counted.items()}
