"""Detection of gradient spikes."""

import math
import statistics
from collections import deque
from collections.abc import Iterable


class SpikeMonitor:
    """Detector of spikes among gradient norms, by the running median of earlier norms.

    A spike is a norm that is not finite, or more than `factor` times the median of the last
    `window` finite norms. Spikes enter the window too: if norms stay high, the median follows, and
    they are no longer spikes.
    """

    def __init__(
        self, factor: float = 10.0, window: int = 100, warmup: int = 5, norms: Iterable[float] = ()
    ) -> None:
        """Start with earlier norms, if there are any.

        Args:
            factor: times the median that makes a norm a spike.
            window: number of norms whose median counts.
            warmup: number of norms before which no finite norm is a spike.
            norms: earlier norms, oldest first.
        """
        self.factor = factor
        self.warmup = warmup
        self.norms = deque(norms, maxlen=window)

    def observe(self, norm: float) -> bool:
        """Return True if `norm` is a spike; add it to the window if it is finite."""
        if not math.isfinite(norm):
            return True
        is_warm = len(self.norms) >= max(1, self.warmup)
        is_spike = is_warm and norm > self.factor * statistics.median(self.norms)
        self.norms.append(norm)
        return is_spike
