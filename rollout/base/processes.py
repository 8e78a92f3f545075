"""Child processes that do not outlive their parent; and how often one that is lost may be started again."""

import asyncio
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TextIO

import psutil

from rollout.base.async_tasks import cancel_tasks
from rollout.base.text import escape_line

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_HELD_S = 1.0  # for which a pipe is read that a process outside the command's group holds open when it has ended


def die_with_parent(number: int = signal.SIGTERM, parent: int = 0) -> None:
    """Have the kernel send this process the signal `number` when the thread that started it ends, however it ends.

    Args:
        parent: the pid that the parent had; if it has ended already, this process does so too. 0: not known.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent and os.getppid() != parent:
        sys.exit("the parent process ended before this one started")


_OPEN_FILES = 65_536


def allow_open_files() -> None:
    """Raise how many files this process and its children may have open, as far as it may be raised.

    A login has 1024, and thousands of trajectories side by side have a connection or a program each.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _OPEN_FILES)), hard))


def start_group(
    command: Sequence[str],
    *,
    log: Path | None = None,
    death: int = signal.SIGKILL,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of a process group that ends with the thread that called this.

    Args:
        log: file that its output is appended to; None: it has this process's.
        death: the signal that it gets when this process dies.
        env: its environment; None: this process's.
    """
    tie = partial(die_with_parent, death, os.getpid())
    settings: Any = {"env": env, "cwd": cwd, "start_new_session": True, "preexec_fn": tie}
    if log is None:
        return subprocess.Popen(command, **settings)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, **settings
        )


async def run_command(
    command: Sequence[str],
    given: bytes,
    *,
    env: Mapping[str, str],
    most_bytes: int,
    confine: Callable[[], None] = lambda: None,
) -> subprocess.CompletedProcess[bytes]:
    """Run `command` to its end with `given` on its standard input; then, or when cancelled, its whole group is killed.

    The new process calls `confine` before it executes the command. Of what it says on its standard error the end is
    kept.

    Raises:
        OSError, ValueError: it cannot be started.
        subprocess.SubprocessError: `confine` has failed, or it printed more than `most_bytes`.
    """

    def begin(parent: int = os.getpid()) -> None:
        die_with_parent(signal.SIGKILL, parent)
        confine()

    loop = asyncio.get_running_loop()
    exited: asyncio.Future[None] = loop.create_future()
    with tempfile.TemporaryFile() as stdin:
        stdin.write(given)
        stdin.seek(0)
        child = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
            preexec_fn=begin,
        )
    async with AsyncExitStack() as ending:
        ending.callback(_kill, child)
        watch = os.pidfd_open(child.pid)
        ending.callback(os.close, watch)
        loop.add_reader(watch, lambda: None if exited.done() else exited.set_result(None))
        ending.callback(loop.remove_reader, watch)
        output, errors = bytearray(), bytearray()
        reading = asyncio.gather(
            _read_pipe(child.stdout, output, most_bytes, refuse=True),
            _read_pipe(child.stderr, errors, most_bytes, refuse=False),
        )
        ending.push_async_callback(cancel_tasks, [reading])
        first: set[asyncio.Future[Any]] = {reading, exited}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not exited.done():
            await reading  # it has closed its outputs, or printed too much
        await exited
        _kill(child)  # what it has left behind, and with that their ends of its outputs
        await asyncio.wait([reading], timeout=_HELD_S)
        if reading.done():
            reading.result()
        return subprocess.CompletedProcess(command, child.wait(), bytes(output), bytes(errors))


def _kill(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


async def _read_pipe(pipe: IO[bytes] | None, into: bytearray, most: int, *, refuse: bool) -> None:
    """Read a pipe to its end; of what is over `most` bytes the end is kept, unless that is refused."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while part := await reader.read(1 << 16):
            into += part
            if len(into) > most:
                if refuse:
                    raise subprocess.SubprocessError(f"it printed more than {most} bytes")
                del into[: -most // 2]
    finally:
        transport.close()


def stop_group(child: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """End `child`, which leads a process group, and everything else in its group: politely, then not."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    try:
        with suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    finally:
        with suppress(ProcessLookupError):  # members that outlived their leader
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def interface_of(address: str) -> str:
    """The name of this machine's network interface with the IP `address`; LookupError if it has none."""
    for name, given in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in given):
            return str(name)
    raise LookupError(f"no network interface of this machine has the address {address}")


def say(line: str, file: TextIO | None = None, end: str = "\n") -> None:
    """Print `line` where the progress of a run goes, and nothing in it that commands a terminal.

    A log on a full disk, or a terminal that is gone, ends no run.
    """
    with suppress(OSError):
        print(escape_line(line), file=file or sys.stderr, flush=True, end=end)


def end_at_second_interrupt(line: str) -> None:
    """Have a first Ctrl-C raise KeyboardInterrupt as ever, and a second say `line` and end this process at once."""

    def second(*_: object) -> None:
        say(line)
        os._exit(130)

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, second)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, first)


_HOUR_S = 3600.0
_counted: Counter[str] = Counter()  # restarts in this process, by part


class ProcessLost(Exception):
    """Processes of a run are gone, or hang, and can be started again: one line that names them."""


class Restarts:
    """How often one part of a run may be started again: `per_hour` times in any hour."""

    def __init__(
        self, part: str, per_hour: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """None so far of `part`, which is what metrics call it."""
        self._part, self._per_hour, self._clock = part, per_hour, clock
        self._times: deque[float] = deque()

    @property
    def left(self) -> int:
        """How many there are now."""
        while self._times and self._clock() - self._times[0] >= _HOUR_S:
            self._times.popleft()
        return self._per_hour - len(self._times)

    def take(self) -> bool:
        """Count one; False, and not counted, where none is left."""
        if self.left <= 0:
            return False
        self._times.append(self._clock())
        _counted[self._part] += 1
        return True


def forget_restarts() -> None:
    """A run begins, of which there may be several in a process, one after the other."""
    _counted.clear()


def restart_metrics() -> dict[str, float]:
    """`restarts/<part>` of each part that this process has started again, since `forget_restarts`."""
    return {f"restarts/{part}": float(count) for part, count in _counted.items()}
