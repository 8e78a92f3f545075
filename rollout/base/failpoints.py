"""Failpoints: named places at which a test kills, stops, slows or fails this process; by default they do nothing."""

import errno
import os
import signal
import time
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

FAILPOINTS = "MCORE_MAS_FAILPOINTS"  # variable: `PLACE=ACTION` or `PLACE=ACTION@N`, several separated by `;`, or @FILE

_passes: Counter[str] = Counter()  # of this process, by order


def failpoint(place: str) -> None:
    """Pass `place`: do what the variable `FAILPOINTS` orders there, nothing where it is not set.

    PLACE may have wildcards; with `@N` the action happens at the N-th pass of this process alone. Actions are `kill`
    and `stop` (of this process, by SIGKILL and SIGSTOP), `full` (the disk is), `sleep:SECONDS`, and `list:FILE`, which
    appends the place to a file.

    Raises:
        OSError: ENOSPC, as ordered.
        ValueError: an order that is none.
    """
    if orders := os.environ.get(FAILPOINTS):
        if orders.startswith("@"):  # a file that a test may change while this process runs
            orders = Path(orders[1:]).read_text(encoding="utf-8").strip()
        for order in filter(None, orders.split(";")):
            pattern, _, action = order.partition("=")
            if fnmatchcase(place, pattern):
                action, _, number = action.partition("@")
                _passes[order] += 1
                if not number or _passes[order] == int(number):
                    _act(place, *action.split(":", 1))


def _act(place: str, action: str, argument: str = "") -> None:
    match action:
        case "kill" | "stop":
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)
        case "sleep":
            time.sleep(float(argument))
        case "list":
            with Path(argument).open("a", encoding="utf-8") as file:
                file.write(f"{place}\n")
        case _:
            raise ValueError(
                f"{FAILPOINTS}: unknown action {action!r}; known: kill, stop, full, sleep, list"
            )
