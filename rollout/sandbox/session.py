"""Running code in a jail: one program to its end, or a session of cells that share variables and files."""

import asyncio
import json
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

from rollout.sandbox.guest import wire
from rollout.sandbox.guest.program import OUT_OF_MEMORY
from rollout.sandbox.jail import Jail, opened_files, take_texts, until_readable
from rollout.sandbox.records import Program, RunLimits, RunResult, SandboxError, Verdict

_GRACE_S = 5.0  # for a warden to report, beyond the job's wall time
_INTERRUPT_S = 1.0  # for a cell to give in to an interrupt before its process is killed


class Session:
    """Cells in one jail, one at a time; made by `Sandbox.session`.

    Between cells all that they have started rests: threads and processes go on with the next one.
    A cell that runs out of time is interrupted and leaves what it had reached. If its process has to be killed, or
    ends by itself, variables are gone and files stay; the next cell starts a new process, and its result is `fresh`.
    """

    def __init__(
        self, jail: Jail, limits: RunLimits, slot: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        """`slot` is entered for every cell, so that sessions share the processors with everybody."""
        self._jail = jail
        self._limits = limits
        self._slot = slot
        self._cells: socket.socket | None = None
        self._turn = asyncio.Lock()

    async def run(self, source: str, *, wall_s: float | None = None) -> RunResult:
        """Run one cell; the value of a last expression is shown as in a notebook.

        A call that is cancelled ends the process.

        Raises:
            SandboxError: the sandbox failed.
        """
        async with self._turn, self._slot():
            fresh = self._cells is None
            cells = self._cells or self._start()
            with opened_files(source, None, None) as handles:
                try:
                    return await self._run(cells, handles, wall_s or self._limits.wall_s, fresh)
                except BaseException:
                    self.end()
                    raise

    async def put(self, name: str, content: bytes) -> None:
        async with self._turn:
            await self._jail.put(name, content)

    async def get(self, name: str) -> bytes | None:
        """A file of the box, up to `file_mb`; None if there is no regular file of that name."""
        async with self._turn:
            return await self._jail.get(name, self._limits.file_mb << 20)

    async def files(self) -> dict[str, int]:
        async with self._turn:
            return await self._jail.files()

    def end(self) -> None:
        """End the process; files stay."""
        if self._cells is not None:
            self._cells.close()
            self._cells = None
            with suppress(SandboxError):  # its warden is gone, and it with that
                self._jail.kill()

    def _start(self) -> socket.socket:
        self._cells, theirs = wire.pair()
        self._cells.setblocking(False)
        with theirs:
            self._jail.start("cells", [theirs.fileno()])
        return self._cells

    async def _run(
        self, cells: socket.socket, handles: list[int], wall_s: float, fresh: bool
    ) -> RunResult:
        began = time.monotonic()
        late = False
        ended: dict[str, Any] = {}
        try:
            if not fresh:
                self._jail.rest(False)
            wire.send(cells, {}, handles)
            error = await _answer(cells, wall_s)
            if error is None:
                late = True
                self._jail.interrupt()
                error = await _answer(cells, _INTERRUPT_S)
            if error is None:
                self._jail.kill()
                raise EOFError
            self._jail.rest(True)
        except (
            EOFError,
            OSError,
        ):  # it has ended, or closed or filled its channel: the program holds it, so it may
            cells.close()
            self._cells = None
            ended = await _ended_soon(self._jail)
            error = ""
        (stdout, stderr), complete = take_texts(handles[1:], self._limits.output_kb << 10)
        if ended:
            verdict = judge_end(ended, self._limits, complete)
        elif not complete:
            verdict = Verdict.OLE
        else:
            verdict = {"": Verdict.OK, "MemoryError": Verdict.MLE}.get(error, Verdict.RE)
        return RunResult(
            verdict=Verdict.TLE if late else verdict,
            stdout=stdout,
            stderr=stderr,
            exit_code=ended.get("exit", int(bool(error))),
            wall_s=time.monotonic() - began,
            fresh=fresh,
        )


async def _answer(cells: socket.socket, patience_s: float) -> str | None:
    """The name of the exception that ended a cell, "" for none; None if it is late; EOFError where nobody answers."""
    try:
        async with asyncio.timeout(patience_s):
            await until_readable(cells)
    except TimeoutError:
        return None
    body = cells.recv(wire.MAX_BYTES)  # the kernel drops descriptors that are not asked for
    try:
        return str(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise EOFError from None


async def _ended_soon(jail: Jail) -> dict[str, Any]:
    """How a process ended that answers no more; one that lives on is killed, which is its own failure."""
    try:
        async with asyncio.timeout(_INTERRUPT_S):
            return await jail.ended()
    except TimeoutError:
        jail.kill()
    return {**await _end(jail, _GRACE_S), "killed": ""}


async def execute(jail: Jail, program: Program) -> RunResult:
    """Run a program in a jail that was just lent; SandboxError if the jail failed."""
    limits = program.limits
    jail.open(limits)
    for name, content in program.files.items():
        await jail.put(name, content)
    with opened_files(program.source, program.stdin, None, None) as handles:
        began = time.monotonic()
        jail.start("program", handles)
        ended = await _end(jail, limits.wall_s + _GRACE_S)
        wall_s = time.monotonic() - began
        (stdout, stderr), complete = take_texts(handles[2:], limits.output_kb << 10)
    return RunResult(
        verdict=judge_end(ended, limits, complete),
        stdout=stdout,
        stderr=stderr,
        exit_code=ended["exit"],
        wall_s=wall_s,
        cpu_s=ended["cpu_s"],
        memory_mb=ended["memory_bytes"] / 2**20,
    )


async def _end(jail: Jail, patience_s: float) -> dict[str, Any]:
    try:
        async with asyncio.timeout(patience_s):
            return await jail.ended()
    except TimeoutError:
        raise SandboxError(f"a job's warden did not report within {patience_s:g} s") from None


_KILLED = {
    "disk": Verdict.OLE,
    "memory": Verdict.MLE,
    "threads": Verdict.RE,
}  # why a warden ended a job


def judge_end(ended: dict[str, Any], limits: RunLimits, output_complete: bool) -> Verdict:
    """The verdict on a job from its warden's report, in which `ran_out` says that the kernel killed for memory."""
    code = ended["exit"]
    if not output_complete:
        return Verdict.OLE
    if ended["killed"]:
        return _KILLED.get(ended["killed"], Verdict.TLE)
    if ended.get("ran_out") or code == OUT_OF_MEMORY:
        return Verdict.MLE
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and ended["cpu_s"] >= limits.cpu_s):
        return Verdict.TLE
    return Verdict.OK if code == 0 else Verdict.RE
