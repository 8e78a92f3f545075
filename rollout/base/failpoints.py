"""Failpoints: named points in the code at which a test kills, stops, slows or fails this process.

A test can also have the points listed that a process passes. By default they do nothing.
"""

import errno
import os
import signal
import time
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

# Environment variable: `POINT=ACTION` or `POINT=ACTION@N`, several separated by `;`, or `@FILE` with
# such a text.
FAILPOINTS = "MCORE_MAS_FAILPOINTS"

_passes: Counter[str] = Counter()  # of this process, by order


def failpoint(point: str) -> None:
    """Run the action that the environment variable `FAILPOINTS` orders at this point.

    The name of the point in an order may have wildcards. With `@N` the action runs only at the N-th
    pass of this process. Actions:

    - `kill`, `stop`: send SIGKILL or SIGSTOP to this process;
    - `full`: fail as on a full disk;
    - `sleep:SECONDS`: wait;
    - `list:FILE`: append the name of the point to a file.

    Raises:
        OSError: ENOSPC, as ordered.
        ValueError: the order has an unknown action.
    """
    orders = os.environ.get(FAILPOINTS)
    if not orders:
        return
    if orders.startswith("@"):  # a file that a test may change while this process runs
        orders = Path(orders[1:]).read_text(encoding="utf-8").strip()

    for order in orders.split(";"):
        pattern, _, action = order.partition("=")
        if not order or not fnmatchcase(point, pattern):
            continue
        action, _, number = action.partition("@")
        _passes[order] += 1
        if not number or _passes[order] == int(number):
            name, _, argument = action.partition(":")
            _run_action(point, name, argument)


def _run_action(point: str, action: str, argument: str) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), point)
        case "sleep":
            time.sleep(float(argument))
        case "list":
            with Path(argument).open("a", encoding="utf-8") as file:
                file.write(f"{point}\n")
        case _:
            raise ValueError(
                f"{FAILPOINTS}: unknown action {action!r}; known: kill, stop, full, sleep, list"
            )
