"""Host side of a jail, in which one job after another runs isolated."""

import asyncio
import json
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from rollout.base.async_tasks import set_outcome
from rollout.sandbox.cgroup import Cgroup
from rollout.sandbox.guest import wire
from rollout.sandbox.memory_files import memory_files, read_bytes
from rollout.sandbox.records import JobReport, RunLimits, SandboxError

_LISTING_BYTES = 64 << 20  # enough for 2048 names of the maximum length, six characters per byte
_ANSWER_S = 60.0  # within which a warden must hand a file over


class Cores:
    """Cores of this process; a job gets those with the fewest jobs."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        first = os.getpid() % len(cores)  # so that processes begin with different cores
        self._jobs = dict.fromkeys([*cores[first:], *cores[:first]], 0)  # number of jobs by core

    def take(self, count: int) -> list[int]:
        """Return `count` cores for a job, or all cores if there are fewer."""
        cores = sorted(self._jobs, key=lambda core: self._jobs[core])[:count]
        for core in cores:
            self._jobs[core] += 1
        return cores

    def give_back(self, cores: Sequence[int]) -> None:
        """Accept the cores of a job that has ended."""
        for core in cores:
            self._jobs[core] -= 1


@dataclass(frozen=True, slots=True)
class _Answer:
    """A message of a warden, and the files that it hands over."""

    message: dict[str, Any]
    files: list[int]


class Jail:
    """A warden process, and the job that it runs with all of the job's children.

    Closing the jail ends all of them.
    """

    def __init__(self, channel: socket.socket, group: Cgroup | None, cores: Cores) -> None:
        """Control a warden that was just cloned.

        Args:
            channel: leads to the warden.
            group: control group of the warden, if there is one.
            cores: cores from which the job takes some.
        """
        channel.setblocking(False)
        self.group = group
        self._all_cores = cores
        self._job_cores: list[int] = []
        self._channel = channel
        self._jobs_started = 0
        # message about the latest job's end; None until it has arrived, in `wait` or in an earlier request
        self._end_message: dict[str, Any] | None = None

    def open(self, limits: RunLimits) -> None:
        """Set the limits and prepare the working folder; call this before any other method.

        Raises:
            SandboxError: the warden or its control group is gone.
        """
        if self.group is not None:
            try:
                self.group.limit((limits.memory_mb + limits.disk_mb) << 20, limits.processes)
            except OSError as error:
                raise SandboxError(
                    f"the control group of a job cannot be limited ({error.strerror})"
                ) from error
        self._job_cores = self._all_cores.take(limits.cores)
        self._send({"do": "open", "limits": asdict(limits), "cores": self._job_cores})

    def start(self, kind: str, files: Sequence[int]) -> None:
        """Start a job.

        Args:
            kind: "program" or "cells".
            files: descriptors: source, stdin, stdout and stderr of a program, or the channel of cells.
        """
        self._jobs_started += 1
        self._end_message = None
        self._send({"do": "start", "kind": kind, "job": self._jobs_started}, files)

    def interrupt(self) -> None:
        """Send the job SIGINT, as Ctrl-C does."""
        self._send({"do": "interrupt"})

    def pause(self) -> None:
        """Stop the job and all processes that it has started."""
        self._send({"do": "pause"})

    def resume(self) -> None:
        """Let a paused job continue."""
        self._send({"do": "resume"})

    def kill(self) -> None:
        """Kill the job; its files stay."""
        self._send({"do": "kill"})

    async def wait(self) -> JobReport:
        """Wait until the job and all processes that it has started have ended.

        Raises:
            SandboxError: the warden is gone or could not set the job up.
        """
        try:
            while self._end_message is None:
                answer = await self._receive()
                self._store_end_message(answer.message)
        except SandboxError:
            if self.group is None or not self.group.has_new_oom_kills():
                raise
            # the kernel has killed the warden too, because it is in the job's control group
            return JobReport(
                exit_code=-9, kill_reason="", cpu_s=0.0, memory_bytes=0, out_of_memory=True
            )

        message = self._end_message
        has_failed = message["exit"] != 0
        return JobReport(
            exit_code=message["exit"],
            kill_reason=message["killed"],
            cpu_s=message["cpu_s"],
            memory_bytes=message["memory_bytes"],
            out_of_memory=(
                self.group is not None and has_failed and self.group.has_new_oom_kills()
            ),
        )

    async def put(self, name: str, content: bytes) -> None:
        """Write a file of the box and create its folders; replace a file of this name.

        Raises:
            OSError: the file does not fit, or a symbolic link is in the way.
            SandboxError: the warden is gone, or this machine has no room for the file.
            ValueError: `name` leads out of the box.
        """
        check_box_path(name)
        with memory_files(content) as files:
            answer = await self._request({"do": "put", "name": name}, files)
        if "refused" in answer.message:
            raise OSError(f"cannot write {name} into the box: {answer.message['refused']}")

    async def get(self, name: str, max_bytes: int) -> bytes | None:
        """Return up to `max_bytes` bytes of a file of the box; None if it is not a regular file.

        Raises:
            ValueError: `name` leads out of the box.
        """
        check_box_path(name)
        answer = await self._request({"do": "get", "name": name})
        return _read_and_close(answer.files, max_bytes) if answer.files else None

    async def files(self) -> dict[str, int]:
        """Return the size in bytes of every regular file in the box, by path."""
        answer = await self._request({"do": "list"})
        sizes: dict[str, int] = json.loads(_read_and_close(answer.files, _LISTING_BYTES))
        return sizes

    def close(self) -> None:
        """End the warden, and the job if it runs."""
        self._channel.close()
        self._all_cores.give_back(self._job_cores)
        self._job_cores = []

    def _send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        try:
            wire.send(self._channel, message, files)
        except OSError as error:
            raise SandboxError(f"the warden of a job is gone ({error.strerror})") from error

    async def _request(self, message: dict[str, Any], files: Sequence[int] = ()) -> _Answer:
        """Send a request and return its answer; store the message about the job's end if it comes first."""
        self._send(message, files)
        try:
            async with asyncio.timeout(_ANSWER_S):
                while True:
                    answer = await self._receive()
                    if "exit" not in answer.message:
                        return answer
                    self._store_end_message(answer.message)
        except TimeoutError:
            raise SandboxError(
                f"the warden of a job did not answer within {_ANSWER_S:g} s"
            ) from None

    def _store_end_message(self, message: dict[str, Any]) -> None:
        """Store the message about the latest job; ignore messages about earlier jobs."""
        if message.get("job") == self._jobs_started:
            self._end_message = message

    async def _receive(self) -> _Answer:
        await until_readable(self._channel)
        try:
            message, files = wire.receive(self._channel)
        except (EOFError, ConnectionError) as error:
            raise SandboxError("the warden of a job has died") from error
        if "fault" in message:
            raise SandboxError(f"a job could not be set up: {message['fault']}")
        return _Answer(message, files)


async def until_readable(channel: socket.socket) -> None:
    """Wait until a socket has something to receive."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(channel, set_outcome, readable, None)
    try:
        await readable
    finally:
        loop.remove_reader(channel)


def check_box_path(path: str) -> None:
    """Raise ValueError unless a text is a normal relative path; no file is looked up.

    The path must be encodable in bytes, and without parts such as `..`.
    """
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise ValueError(f"{path!r} is no path in a box: it cannot be encoded") from None

    parsed = PurePosixPath(path)
    is_normal = bool(parsed.parts) and parsed.as_posix() == path and "\0" not in path
    if not is_normal or parsed.is_absolute() or ".." in parsed.parts:
        raise ValueError(
            f"{path!r} is no path in a box; expected a relative path without `.`, `..`, doubled "
            "slashes or NUL"
        )


def _read_and_close(files: list[int], max_bytes: int) -> bytes:
    """Read the first file, if it is a regular one, and close all files."""
    try:
        is_regular = stat.S_ISREG(os.fstat(files[0]).st_mode)
        return read_bytes(files[0], max_bytes) if is_regular else b""
    finally:
        for file in files:
            os.close(file)
