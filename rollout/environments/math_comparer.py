"""Comparison of math answers in child processes with limits of time and memory.

An answer such as 3!!! or an integral can keep a computer-algebra system busy forever, in C code
that no signal handler interrupts. Each child process (`math_comparer_main.py`) therefore sets a limit
of CPU seconds before a comparison, and `Comparer` starts it again if the limit kills it. CPU seconds
are used instead of wall time, so that a busy machine changes no verdict.
"""

import json
import queue
import select
import subprocess
import sys
from pathlib import Path

from rollout.environments.math_equality import AnswerComparison

_MAIN = Path(__file__).with_name("math_comparer_main.py")
_WORKERS = 2
# Wall seconds to wait for each CPU second of the limit, because a child may have to wait for a CPU.
_CLOCK_FACTOR = 20

_REPLIES = {f"{verdict}\n": verdict for verdict in AnswerComparison}


class ComparerError(RuntimeError):
    """A child process cannot be started."""


class Comparer:
    """A few child processes that compare answers; a comparison waits only while all are busy."""

    def __init__(self, *, limit_s: int = 5) -> None:
        """Prepare the children. Each of them starts at its first comparison.

        Args:
            limit_s: limit of the CPU seconds of one comparison.
        """
        # Last in, first out, because the child that was used last is already running.
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        for _ in range(_WORKERS):
            self._idle.put(_Child(limit_s))

    def compare(self, given: str, truth: str) -> AnswerComparison:
        """Compare two normalized LaTeX answers.

        A number equals an equation that names it: `5` equals `x=5`.

        Raises:
            ComparerError: a child cannot be started; the message says what to do.
        """
        child = self._idle.get()
        try:
            return child.ask(given, truth)
        finally:
            self._idle.put(child)


class _Child:
    """One child process, used by one thread at a time."""

    def __init__(self, limit_s: int) -> None:
        self._limit_s = limit_s
        self._process: subprocess.Popen[str] | None = None

    def ask(self, given: str, truth: str) -> AnswerComparison:
        """Send two answers and return the verdict; UNDECIDED if none comes within the limits."""
        if self._process is None:
            self._process = _start(self._limit_s)
        process = self._process
        assert process.stdout is not None
        try:
            print(json.dumps([given, truth]), file=process.stdin, flush=True)
            deadline_s = _CLOCK_FACTOR * self._limit_s
            readable, _, _ = select.select([process.stdout], [], [], deadline_s)
            reply = process.stdout.readline() if readable else ""
        except BrokenPipeError:
            reply = ""
        if reply not in _REPLIES:
            self.stop()
        return _REPLIES.get(reply, AnswerComparison.UNDECIDED)

    def stop(self) -> None:
        """Kill the child, if it runs; the next comparison starts another one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _start(limit_s: int) -> subprocess.Popen[str]:
    """Start a child and wait until it has loaded math-verify.

    Raises:
        ComparerError: the child ended, because it could not load math-verify.
    """
    # With -P this folder, whose math.py shadows the standard library's, is not on the import path.
    command = [sys.executable, "-P", str(_MAIN.resolve()), str(limit_s)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if process.stdout is None or process.stdout.readline() != "ready\n":
        process.kill()
        process.communicate()
        raise ComparerError(
            "math-verify cannot be loaded in a child process; try: pip install math-verify==0.9.0"
        )
    return process
