"""Child processes that do not outlive their parent.

`start_group` starts a process group and `stop_group` ends it; `run_command` runs a command to its end.
"""

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from rollout.base.async_tasks import cancel_tasks

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Time for which the output of a finished command is read, if a process outside its group keeps the
# pipe open.
_OPEN_PIPE_S = 1.0


def die_with_parent(number: int = signal.SIGTERM, parent: int = 0) -> None:
    """Make the kernel send a signal to this process when the thread that started it ends, for any reason.

    Args:
        number: the signal.
        parent: process id of the parent; this process exits if the parent has ended already. 0 skips
            that check.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent and os.getppid() != parent:
        sys.exit("the parent process ended before this one started")


_MAX_OPEN_FILES = 65_536


def raise_open_file_limit() -> None:
    """Raise the limit on open files of this process and its children, as far as the hard limit allows.

    The usual limit of a login is 1024, and each of thousands of concurrent trajectories has a
    connection or a program.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MAX_OPEN_FILES)), hard))


def start_group(
    command: Sequence[str],
    *,
    log: Path | None = None,
    death: int = signal.SIGKILL,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command as the leader of a new process group, in a session of its own.

    Args:
        command: program and arguments.
        log: file to which the output is appended; None: the output of this process.
        death: signal that the kernel sends to the command when the calling thread ends.
        env: environment; None: the environment of this process.
        cwd: working directory; None: that of this process.
    """
    settings: Any = {
        "env": env,
        "cwd": cwd,
        "start_new_session": True,
        "preexec_fn": partial(die_with_parent, death, os.getpid()),
    }
    if log is None:
        return subprocess.Popen(command, **settings)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, **settings
        )


async def run_command(
    command: Sequence[str],
    input_bytes: bytes,
    *,
    env: Mapping[str, str],
    max_output_bytes: int,
    confine: Callable[[], None] = lambda: None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end; then, or when cancelled, kill its whole process group.

    Args:
        command: program and arguments.
        input_bytes: standard input.
        env: environment.
        max_output_bytes: limit of the standard output. A longer standard error loses its beginning.
        confine: called in the new process before it executes the command.

    Raises:
        OSError, ValueError: the command cannot be started.
        subprocess.SubprocessError: `confine` raised, or the standard output exceeds its limit.
    """

    parent = os.getpid()

    def begin() -> None:
        die_with_parent(signal.SIGKILL, parent)
        confine()

    loop = asyncio.get_running_loop()
    exited: asyncio.Future[None] = loop.create_future()
    with tempfile.TemporaryFile() as stdin:
        stdin.write(input_bytes)
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

    def set_exited() -> None:
        if not exited.done():
            exited.set_result(None)

    async with AsyncExitStack() as cleanup:
        cleanup.callback(_kill_group, child)
        pidfd = os.pidfd_open(child.pid)
        cleanup.callback(os.close, pidfd)
        loop.add_reader(pidfd, set_exited)
        cleanup.callback(loop.remove_reader, pidfd)

        output = bytearray()
        errors = bytearray()
        reading = asyncio.gather(
            _read_pipe(child.stdout, output, max_output_bytes, refuse=True),
            _read_pipe(child.stderr, errors, max_output_bytes, refuse=False),
        )
        cleanup.push_async_callback(cancel_tasks, [reading])
        futures: set[asyncio.Future[Any]] = {reading, exited}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not exited.done():
            # The command closed its outputs, or printed too much, in which case this raises.
            await reading
        await exited

        # Kill the processes that the command left running, which closes their ends of its outputs.
        _kill_group(child)
        await asyncio.wait([reading], timeout=_OPEN_PIPE_S)
        if reading.done():
            reading.result()
        return subprocess.CompletedProcess(command, child.wait(), bytes(output), bytes(errors))


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


async def _read_pipe(
    pipe: IO[bytes] | None, buffer: bytearray, max_bytes: int, *, refuse: bool
) -> None:
    """Read a pipe to its end into a buffer.

    Args:
        pipe: the pipe.
        buffer: receives the content.
        max_bytes: limit of the content.
        refuse: True: raise SubprocessError above the limit; False: drop the oldest bytes, so
            that half of `max_bytes` is left.
    """
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while part := await reader.read(1 << 16):
            buffer += part
            if len(buffer) > max_bytes:
                if refuse:
                    raise subprocess.SubprocessError(f"it printed more than {max_bytes} bytes")
                retained_bytes = (max_bytes + 1) // 2
                del buffer[:-retained_bytes]
    finally:
        transport.close()


def stop_group(child: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """End the process group of a child: SIGTERM to all, then SIGKILL once the child ended or `grace_s` passed."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    try:
        with suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
