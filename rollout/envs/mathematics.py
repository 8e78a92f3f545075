"""A child process that says whether two answers are mathematically equal, within limits of time and memory.

An answer such as 10000000! or 9^{9^{9^9}} keeps a computer-algebra system busy for ever, inside C code that no signal
interrupts. The child gives itself a limit of CPU seconds before each comparison and is started again when it dies of
it. This file is also the child's program, so it imports nothing of ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

_MEMORY_BYTES = 4 << 30


class ComparerError(RuntimeError):
    """The child process cannot be started."""


class Comparer:
    """The child, started at the first question; questions of several threads wait for each other."""

    def __init__(self, *, limit_s: int = 5) -> None:
        """`limit_s` CPU seconds for one comparison."""
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def equal(self, given: str, truth: str) -> bool:
        """Whether two LaTeX answers are equal; False when they cannot be understood or not within the limits.

        Raises:
            ComparerError: the child cannot be started, with what to do.
        """
        with self._lock:
            child = self._child = self._child or _start(self._limit_s)
            try:
                print(json.dumps([given, truth]), file=child.stdin, flush=True)
                reply = child.stdout.readline() if child.stdout else ""
            except BrokenPipeError:
                reply = ""
            if not reply:  # the comparison went over a limit
                self._stop()
            return reply == "equal\n"

    def close(self) -> None:
        """End the child; a later question starts another."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._child:
            self._child.kill()
            self._child.communicate()
            self._child = None


def _start(limit_s: int) -> subprocess.Popen[str]:
    # -P keeps this folder, whose math.py would hide the standard library's, off the child's import path.
    command = [sys.executable, "-P", str(Path(__file__).resolve()), str(limit_s)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True)
    if child.stdout is None or child.stdout.readline() != "ready\n":
        child.kill()
        child.communicate()
        raise ComparerError("math-verify cannot be loaded in a child process; try: pip install math-verify==0.9.0")
    return child


def _serve(limit_s: int) -> None:
    import resource
    import time

    from math_verify import parse, verify

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    print("ready", flush=True)
    for line in sys.stdin:
        end_s = int(time.process_time()) + 1 + limit_s
        resource.setrlimit(resource.RLIMIT_CPU, (end_s, resource.RLIM_INFINITY))
        given, truth = json.loads(line)
        try:
            guess, gold = (parse(f"${text}$", parsing_timeout=None) for text in (given, truth))
            equal = bool(guess and gold) and verify(gold, guess, timeout_seconds=None)
        except Exception:  # sympy raises anything at all on text that is no mathematics, and then it equals nothing
            equal = False
        print("equal" if equal else "different", flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
