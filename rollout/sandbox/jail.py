"""Host side of a jail (one isolated job), and the in-memory files that both sides exchange."""

import asyncio
import fcntl
import json
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any

from rollout.base.async_tasks import set_outcome
from rollout.sandbox.cgroup import Cgroup
from rollout.sandbox.guest import wire
from rollout.sandbox.records import RunLimits, SandboxError

_LISTING_BYTES = 64 << 20  # 2048 names of the greatest length, each byte written as six
_ASK_S = 60.0  # for a warden to hand a file over


class Cores:
    """The cores that this process may use, of which a job is given those with the fewest jobs."""

    def __init__(self) -> None:
        own = sorted(os.sched_getaffinity(0))
        first = os.getpid() % len(own)  # another process' jobs begin with another core
        self._jobs = dict.fromkeys([*own[first:], *own[:first]], 0)

    def take(self, count: int) -> list[int]:
        """Give a job so many of them, or all where there are fewer."""
        taken = sorted(self._jobs, key=lambda core: self._jobs[core])[:count]
        for core in taken:
            self._jobs[core] += 1
        return taken

    def give_back(self, cores: Sequence[int]) -> None:
        """Those of a job that has ended."""
        for core in cores:
            self._jobs[core] -= 1


class Jail:
    """A job and all that it starts; closing it ends them."""

    def __init__(self, channel: socket.socket, group: Cgroup | None, cores: Cores) -> None:
        """`channel` leads to the warden, which is in `group`, if there is one; it takes some of `cores`."""
        channel.setblocking(False)
        self.group = group
        self._cores, self._own = cores, list[int]()
        self._channel = channel
        self._jobs = 0  # started so far
        self._ended: dict[str, Any] | None = (
            None  # report on the last one, if it came before it was waited for
        )

    def open(self, limits: RunLimits) -> None:
        """Furnish the box, the first thing to ask for; SandboxError if the warden or its group is gone."""
        if self.group is not None:
            try:
                self.group.limit((limits.memory_mb + limits.disk_mb) << 20, limits.processes)
            except OSError as error:
                raise SandboxError(f"a job's group cannot be limited ({error.strerror})") from error
        self._own = self._cores.take(limits.cores)
        self._tell({"do": "open", "limits": asdict(limits), "cores": self._own})

    def start(self, kind: str, files: Sequence[int]) -> None:
        """Start a `program` (source, stdin, stdout, stderr) or `cells` (their channel)."""
        self._jobs += 1
        self._ended = None
        self._tell({"do": "start", "kind": kind, "job": self._jobs}, files)

    def interrupt(self) -> None:
        """Send the job what Ctrl-C sends."""
        self._tell({"do": "interrupt"})

    def rest(self, rests: bool) -> None:
        """Stop the job with all that it has started, or let it go on."""
        self._tell({"do": "rest", "rests": rests})

    def kill(self) -> None:
        """End the job; the box stays."""
        self._tell({"do": "kill"})

    async def ended(self) -> dict[str, Any]:
        """Wait until the job has ended and nothing that it started lives.

        Returns:
            `exit` (status, negative for a signal), `killed` (why the warden ended it, or ""), `cpu_s`, `memory_bytes`
            and `ran_out` (the kernel killed one of its processes for memory).

        Raises:
            SandboxError: the warden is gone or could not set the job up.
        """
        try:
            while self._ended is None:
                self._keep(await self._receive())
        except SandboxError:
            if self.group is None or not self.group.ran_out():
                raise
            return {
                "exit": -9,
                "killed": "",
                "cpu_s": 0.0,
                "memory_bytes": 0,
                "ran_out": True,
            }  # it took the warden
        ran_out = self.group is not None and self._ended["exit"] != 0 and self.group.ran_out()
        return self._ended | {"ran_out": ran_out}

    async def put(self, name: str, content: bytes) -> None:
        """Write a file of the box, with its folders; one of that name is replaced.

        Raises:
            OSError: it does not fit, or a link is in the way.
            ValueError: `name` leads out of the box.
        """
        check_name(name)
        with opened_files(content) as files:
            answer, _ = await self._ask({"do": "put", "name": name}, files)
        if "refused" in answer:
            raise OSError(f"cannot write {name} into the box: {answer['refused']}")

    async def get(self, name: str, limit: int) -> bytes | None:
        """Up to `limit` bytes of a file of the box; None without a regular file of that name.

        Raises:
            ValueError: `name` leads out of the box.
        """
        check_name(name)
        _, files = await self._ask({"do": "get", "name": name})
        return _take(files, limit) if files else None

    async def files(self) -> dict[str, int]:
        """Size in bytes of every regular file in the box, by path."""
        _, files = await self._ask({"do": "list"})
        return dict(json.loads(_take(files, _LISTING_BYTES)))

    def close(self) -> None:
        """End the job, if it runs, and the warden."""
        self._channel.close()
        self._cores.give_back(self._own)
        self._own = []

    def _tell(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        try:
            wire.send(self._channel, message, files)
        except OSError as error:
            raise SandboxError(f"a job's warden is gone ({error.strerror})") from error

    async def _ask(
        self, message: dict[str, Any], files: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        self._tell(message, files)
        try:
            async with asyncio.timeout(_ASK_S):
                while "exit" in (answer := await self._receive())[0]:
                    self._keep(answer)
                return answer
        except TimeoutError:
            raise SandboxError(f"a job's warden did not answer within {_ASK_S:g} s") from None

    def _keep(self, answer: tuple[dict[str, Any], list[int]]) -> None:
        if (
            answer[0].get("job") == self._jobs
        ):  # not the late report on a job that nobody waited for
            self._ended = answer[0]

    async def _receive(self) -> tuple[dict[str, Any], list[int]]:
        await until_readable(self._channel)
        try:
            answer, files = wire.receive(self._channel)
        except (EOFError, ConnectionError) as error:
            raise SandboxError("a job's warden died") from error
        if "fault" in answer:
            raise SandboxError(f"a job could not be set up: {answer['fault']}")
        return answer, files


async def until_readable(channel: socket.socket) -> None:
    """Wait until something can be received."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(channel, set_outcome, ready, None)
    try:
        await ready
    finally:
        loop.remove_reader(channel)


def check_name(name: str) -> None:
    """Refuse a path that is not a plain relative one.

    Raises:
        ValueError: it is empty, absolute, has a part such as `..`, or cannot be written in bytes.
    """
    path = PurePosixPath(name)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        raise ValueError(f"{name!r} is no path in a box: it has half a character") from None
    if (
        not path.parts
        or path.is_absolute()
        or path.as_posix() != name
        or ".." in path.parts
        or "\0" in name
    ):
        raise ValueError(
            f"{name!r} is no path in a box; expected a relative one without `.`, `..` or doubled slashes"
        )


def _take(files: list[int], limit: int) -> bytes:
    try:
        return take_bytes(files[0], limit) if stat.S_ISREG(os.fstat(files[0]).st_mode) else b""
    finally:
        for file in files:
            os.close(file)


@contextmanager
def opened_files(*contents: str | bytes | None) -> Iterator[list[int]]:
    """Descriptors of `as_file` for the block."""
    with ExitStack() as opened:
        files = []
        for content in contents:
            files.append(as_file(content))
            opened.callback(os.close, files[-1])
        yield files


def as_file(content: str | bytes | None) -> int:
    """A descriptor of a file with `content` that nobody can change, at its start; None is an empty one to write to."""
    file = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if content is not None:
        view = memoryview(
            content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        )
        while view:
            view = view[os.pwrite(file, view, os.fstat(file).st_size) :]
        fcntl.fcntl(
            file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
        )
    return file


def take_bytes(file: int, limit: int) -> bytes:
    """Up to `limit` bytes from the start of an open file."""
    parts: list[bytes] = []
    while limit > 0 and (part := os.pread(file, limit, sum(map(len, parts)))):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)


def take_texts(files: Sequence[int], limit: int) -> tuple[list[str], bool]:
    """Up to `limit` bytes from the start of each open file, as text with U+FFFD for the rest; whether that is all."""
    texts = [take_bytes(file, limit).decode("utf-8", "replace") for file in files]
    return texts, all(os.fstat(file).st_size <= limit for file in files)
