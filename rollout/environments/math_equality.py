"""Verifier of math answers (is one equal to another?), in child processes within limits of time and memory.

An answer such as 3!!! or an integral keeps a computer-algebra system busy for ever, inside C code that no signal
handler interrupts. A child gives itself a limit of CPU seconds before each comparison and is started again when it dies
of it. CPU seconds, not the clock's: a busy machine changes no verdict. This file is also the child's program, so it
imports nothing of ours.
"""

import enum
import json
import math
import queue
import re
import select
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

_MEMORY_BYTES = 2 << 30
_WORKERS = 2
_PATIENCE = (
    20  # times the limit of CPU seconds, on the clock: for a child that is stopped, not busy
)


class AnswerComparison(enum.StrEnum):
    """What is known of two answers."""

    EQUAL = "equal"
    DIFFERENT = "different"  # also when one of them is no mathematics
    UNDECIDED = "undecided"  # the comparison went over a limit or broke down


_REPLIES = {f"{verdict}\n": verdict for verdict in AnswerComparison}


class ComparerError(RuntimeError):
    """The child process cannot be started."""


class Comparer:
    """A few children, each started when it is first needed; a question waits only when all are busy."""

    def __init__(self, *, limit_s: int = 5) -> None:
        """`limit_s` CPU seconds for one comparison."""
        self._idle: queue.LifoQueue[_Child] = (
            queue.LifoQueue()
        )  # the last one used goes first: it is running
        for _ in range(_WORKERS):
            self._idle.put(_Child(limit_s))

    def compare(self, given: str, truth: str) -> AnswerComparison:
        """Whether two LaTeX answers are equal. The order matters: `x=5` is 5 when 5 is the truth.

        Raises:
            ComparerError: a child cannot be started, with what to do.
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
        return _REPLIES.get(reply, AnswerComparison.UNDECIDED)

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
        raise ComparerError(
            "math-verify cannot be loaded in a child process; try: pip install math-verify==0.9.0"
        )
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
            guess, gold = (
                parse(_in_dollars(text), parsing_timeout=None) for text in (given, truth)
            )
            digits = (
                6 if "." in truth else 15
            )  # a decimal is an exact truth only if so many of its digits are
            options = {
                "float_rounding": digits,
                "allow_set_relation_comp": True,
                "timeout_seconds": None,
            }
            equal = bool(guess and gold) and verify(gold, guess, **options)
            verdict = AnswerComparison.EQUAL if equal else AnswerComparison.DIFFERENT
        except Exception:  # sympy raises anything at all on text that is no mathematics, and then it equals nothing
            verdict = AnswerComparison.DIFFERENT
        if verdict is AnswerComparison.DIFFERENT and _peak_bytes() > _MEMORY_BYTES // 2:
            raise MemoryError  # the library hides its own; what grows by doubling fails above half of what there is
        print(verdict.value, file=replies, flush=True)


def _in_dollars(text: str) -> str:
    number = text.removesuffix("%").removesuffix("\\") if text.endswith("%") else text
    return (
        f"${number}${text[len(number) :]}"  # a percent sign inside the dollars would be overlooked
    )


def _peak_bytes() -> int:
    status = Path(
        "/proc/self/status"
    ).read_text()  # ru_maxrss would be the parent's, if that was larger
    return int(status.partition("VmPeak:")[2].split()[0]) * 1024


MAX_CHARS = 400
MAX_DEPTH = 30  # of brackets in each other
MAX_DIGITS = 100  # of one number
MAX_COMMAS = 100  # of one list
MAX_OPERAND = 10_000  # an exponent, what a factorial is taken of, what a binomial chooses from

_BEYOND = MAX_OPERAND + 1
_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1},}}")
_BINOMIAL = re.compile(r"binom\{*(\d+)")
_TOKEN = re.compile(
    r"(?P<number>\d+(?P<decimals>\.\d*)?)|(?P<open>[(\[{])|(?P<power>\^)|(?P<rest>.)", re.DOTALL
)
_EXPONENT = re.compile(r"[-+]?\d+|.", re.DOTALL)
_STEP = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def is_refused(text: str) -> bool:
    """Whether an answer, without spaces and `\\left`, asks for more than any right one would, and is not read.

    It is empty, or too long, nested or numerous, or has too large operands. Powers and factorials of written numbers
    are followed through towers: 2^{3^{2}} has the exponent 9. This estimates what a system would be made to compute;
    what slips through meets the limits of its process.
    """
    if not 0 < len(text) <= MAX_CHARS or text.count(",") > MAX_COMMAS or _LONG_NUMBER.search(text):
        return True
    if max(accumulate(_STEP.get(character, 0) for character in text)) > MAX_DEPTH:
        return True
    try:
        for match in _BINOMIAL.finditer(text):
            _operand(int(match[1]))
        _size(text)
    except OverflowError:
        return True
    return False


def _size(text: str) -> int:
    """About how large an expression is, at most `_BEYOND`: a sum of products, in which a letter counts 1."""
    total, product, factor, at = 0, 1, 1, 0
    while token := _TOKEN.match(text, at):
        at = token.end()
        if token["number"]:
            product, factor = (
                product * factor,
                int(token["number"].split(".")[0]) + bool(token["decimals"]),
            )
        elif token["open"]:
            end = _closing(text, token.start())
            product, factor, at = product * factor, _size(text[at:end]), end + 1
        elif token["power"]:
            end = _exponent_end(text, at)
            factor, at = _power(max(factor, 2), _operand(_size(text[at:end]))), end
        elif token["rest"] == "!":
            factor = min(math.factorial(min(_operand(factor), 8)), _BEYOND)  # 8! is beyond
        elif token["rest"] in "+-":
            total, product, factor = min(total + product * factor, _BEYOND), 1, 1
        else:
            product, factor = product * factor, 1
        product = min(max(product, 1), _BEYOND)
    return min(total + product * factor, _BEYOND)


def _operand(size: int) -> int:
    if size > MAX_OPERAND:
        raise OverflowError
    return size


def _exponent_end(text: str, start: int) -> int:
    """Where an exponent ends that starts there: a bracket, a number with its sign, or one character; and its powers."""
    base = _EXPONENT.match(text, start)
    end = base.end() if base else start
    if base and base[0] in _STEP:
        end = _closing(text, start) + 1
    return _exponent_end(text, end + 1) if text.startswith("^", end) else end


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens there is closed; the text's end if it is not."""
    depth = 0
    for at in range(start, len(text)):
        depth += _STEP.get(text[at], 0)
        if depth <= 0:
            return at
    return len(text)


def _power(base: int, exponent: int) -> int:
    if exponent * (base.bit_length() - 1) > MAX_OPERAND.bit_length():
        return _BEYOND
    value: int = base**exponent
    return min(value, _BEYOND)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
