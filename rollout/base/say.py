"""One line to whoever watches a run."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Print `line` where progress goes."""
    print(line, file=sys.stderr, flush=True)
