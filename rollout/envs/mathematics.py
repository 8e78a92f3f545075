"""Child processes that say whether two answers are mathematically equal, within limits of time and memory.

An answer such as 3!!! or an integral keeps a computer-algebra system busy for ever, inside C code that no signal
handler interrupts. A child gives itself a limit of CPU seconds before each comparison and is started again when it dies
of it. CPU seconds, not the clock's: a busy machine changes no verdict. This file is also the child's program, so it
imports nothing of ours.
"""

from __future__ import annotations

import enum
import json
import queue
import select
import subprocess
import sys
from pathlib import Path

_MEMORY_BYTES = 2 << 30
_WORKERS = 2
_PATIENCE = 20  # times the limit of CPU seconds, on the clock: for a child that is stopped, not busy


class Comparison(enum.StrEnum):
    """What is known of two answers."""

    EQUAL = "equal"
    DIFFERENT = "different"  # also when one of them is no mathematics
    UNDECIDED = "undecided"  # the comparison went over a limit or broke down


_REPLIES = {f"{verdict}\n": verdict for verdict in Comparison}


class ComparerError(RuntimeError):
    """The child process cannot be started."""


class Comparer:
    """A few children, each started when it is first needed; a question waits only when all are busy."""

    def __init__(self, *, limit_s: int = 5, workers: int = _WORKERS) -> None:
        """`limit_s` CPU seconds for one comparison."""
        self._children = [_Child(limit_s) for _ in range(workers)]
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()  # the last one used goes first: it is running
        for child in self._children:
            self._idle.put(child)

    def compare(self, given: str, truth: str) -> Comparison:
        """Whether two LaTeX answers are equal. The order matters: `x=5` is 5 when 5 is the truth.

        Raises:
            ComparerError: a child cannot be started, with what to do.
        """
        child = self._idle.get()
        try:
            return child.ask(given, truth)
        finally:
            self._idle.put(child)

    def close(self) -> None:
        """End the children, after what they are at; a later question starts them again."""
        idle = [self._idle.get() for _ in self._children]
        for child in idle:
            child.stop()
            self._idle.put(child)


class _Child:
    """One child process, used by one thread at a time."""

    def __init__(self, limit_s: int) -> None:
        self._limit_s = limit_s
        self._process: subprocess.Popen[str] | None = None

    def ask(self, given: str, truth: str) -> Comparison:
        process = self._process = self._process or _start(self._limit_s)
        assert process.stdout is not None
        try:
            print(json.dumps([given, truth]), file=process.stdin, flush=True)
            there, _, _ = select.select([process.stdout], [], [], _PATIENCE * self._limit_s)
            reply = process.stdout.readline() if there else ""
        except BrokenPipeError:
            reply = ""
        if reply not in _REPLIES:
            self.stop()
        return _REPLIES.get(reply, Comparison.UNDECIDED)

    def stop(self) -> None:
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _start(limit_s: int) -> subprocess.Popen[str]:
    # -P keeps this folder, whose math.py would hide the standard library's, off the child's import path.
    command = [sys.executable, "-P", str(Path(__file__).resolve()), str(limit_s)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True)
    if process.stdout is None or process.stdout.readline() != "ready\n":
        process.kill()
        process.communicate()
        raise ComparerError("math-verify cannot be loaded in a child process; try: pip install math-verify==0.9.0")
    return process


def _serve(limit_s: int) -> None:
    import resource
    import time

    from math_verify import parse, verify

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    replies, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no reply
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        end_s = int(time.process_time()) + 1 + limit_s
        resource.setrlimit(resource.RLIMIT_CPU, (end_s, resource.RLIM_INFINITY))
        given, truth = json.loads(line)
        try:
            guess, gold = (parse(_in_dollars(text), parsing_timeout=None) for text in (given, truth))
            equal = bool(guess and gold) and verify(gold, guess, allow_set_relation_comp=True, timeout_seconds=None)
            verdict = Comparison.EQUAL if equal else Comparison.DIFFERENT
        except Exception:  # sympy raises anything at all on text that is no mathematics, and then it equals nothing
            verdict = Comparison.DIFFERENT
        if verdict is Comparison.DIFFERENT and _peak_bytes() > _MEMORY_BYTES // 2:
            raise MemoryError  # the library hides its own; what grows by doubling fails above half of what there is
        print(verdict.value, file=replies, flush=True)


def _in_dollars(text: str) -> str:
    number = text.removesuffix("%").removesuffix("\\") if text.endswith("%") else text
    return f"${number}${text[len(number) :]}"  # a percent sign inside the dollars would be overlooked


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()  # ru_maxrss would be the parent's, if that was larger
    return int(status.partition("VmPeak:")[2].split()[0]) * 1024


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
