"""The user's terminal: lines on standard error, typed lines, and Ctrl-C."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

from rollout.base.text import escape_line


def say(line: str, file: TextIO | None = None, end: str = "\n") -> None:
    """Print a line on standard error (or to `file`), with terminal commands in it escaped.

    Errors of the output are ignored, so that a full disk or a closed terminal does not end the run.
    """
    with suppress(OSError):
        print(escape_line(line), file=file or sys.stderr, flush=True, end=end)


def typed_lines(prompt: str) -> Iterator[str]:
    """Yield lines from the standard input, each after the prompt, until one is empty or Ctrl-D ends the input."""
    with suppress(EOFError):
        yield from iter(lambda: input(prompt).strip(), "")


def end_at_second_interrupt(line: str) -> None:
    """Let the first Ctrl-C raise KeyboardInterrupt, and the second print `line` and end this process at once."""

    def exit_at_once(*_: object) -> None:
        say(line)
        os._exit(130)

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, exit_at_once)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
