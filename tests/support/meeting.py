"""All-gather between ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def meeting(ranks: int) -> list[Callable[[Any], list[Any]]]:
    """Return the all-gather function of each rank.

    A call fails after 60 s if another rank does not call its function.
    """
    values: list[Any] = [None] * ranks
    barrier = threading.Barrier(ranks, timeout=60)

    def exchange_of(rank: int) -> Callable[[Any], list[Any]]:
        def exchange(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            gathered = list(values)
            barrier.wait()
            return gathered

        return exchange

    return [exchange_of(rank) for rank in range(ranks)]
