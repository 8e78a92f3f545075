"""Restarts of lost processes: the error that asks for one, and a limit on their number."""

import time
from collections import Counter, deque
from collections.abc import Callable

_HOUR_S = 3600.0
_restarts: Counter[str] = Counter()  # restarts in this process, by part of a run


class ProcessLost(Exception):
    """Processes of a run ended or hang, and can be restarted; the message names them in one line."""


class Restarts:
    """Limit on the restarts of one part of a run: `per_hour` in any hour."""

    def __init__(
        self, part: str, per_hour: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin without restarts.

        Args:
            part: name of the part in the metrics.
            per_hour: largest number of restarts in an hour.
            clock: returns the time in seconds.
        """
        self._part = part
        self._per_hour = per_hour
        self._clock = clock
        self._times: deque[float] = deque()

    @property
    def remaining(self) -> int:
        """Number of restarts that are allowed now."""
        while self._times and self._clock() - self._times[0] >= _HOUR_S:
            self._times.popleft()
        return self._per_hour - len(self._times)

    def take(self) -> bool:
        """Count a restart and return True, or return False if none is allowed now."""
        if self.remaining <= 0:
            return False
        self._times.append(self._clock())
        _restarts[self._part] += 1
        return True


def forget_restarts() -> None:
    """Set the counts of restarts to 0, when a run begins in a process that may have had others."""
    _restarts.clear()


def restart_metrics() -> dict[str, float]:
    """Return the metric `restarts/<part>`, a count, of each part restarted since `forget_restarts`."""
    return {f"restarts/{part}": float(count) for part, count in _restarts.items()}
