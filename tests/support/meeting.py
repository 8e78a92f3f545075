"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def meeting(ranks: int) -> list[Callable[[Any], list[Any]]]:
    """The exchange of each of that many ranks, which are threads; one that waits for nobody fails."""
    place: list[Any] = [None] * ranks
    barrier = threading.Barrier(ranks, timeout=10)

    def exchange_of(rank: int) -> Callable[[Any], list[Any]]:
        def exchange(value: Any) -> list[Any]:
            place[rank] = value
            barrier.wait()
            found = list(place)
            barrier.wait()
            return found

        return exchange

    return [exchange_of(rank) for rank in range(ranks)]
