"""The sandbox of this machine: runs model-written Python in a warm pool of isolated processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType

from rollout.sandbox import pool as tiers
from rollout.sandbox.jail import check_name
from rollout.sandbox.pool import JailPool
from rollout.sandbox.records import RunLimits, RunResult, SandboxError, SandboxUnavailable, Verdict
from rollout.sandbox.session import Session, execute

_CANARY = """
import os, socket
for name, forbidden in (
    ("the network", lambda: socket.socket()),
    ("files outside", lambda: open("/etc/passwd")),
    ("writing outside", lambda: open("/usr/canary", "w")),
    ("other processes", lambda: os.kill(os.getppid(), 0) if os.getppid() > 1 else open("/proc/1/environ")),
):
    try:
        forbidden()
    except (OSError, PermissionError):
        continue
    raise SystemExit(name + " can be reached")
"""
_ATTEMPTS = 2  # of a run whose sandbox fails


class Sandbox:
    """A pool of jails, each for one program; use it with `async with`, or call `close` at the end.

    It starts at the first run. It may be used from one event loop after another, never from two at once. When this
    process ends, however it ends, every program ends with it.
    """

    def __init__(
        self,
        limits: RunLimits | None = None,
        *,
        slots: int | None = None,
        tier: str = "auto",
        preload: Sequence[str] = (),
        libraries: bool = True,
    ) -> None:
        """A sandbox that has not started.

        Args:
            limits: of runs that bring none of their own.
            slots: programs at once; the number of usable cores if None.
            tier: how programs are kept in, a name of `tiers.TIERS`; `auto` is the best isolation this machine allows.
                Without any it refuses, unless `unisolated` is asked for by name.
            preload: modules that programs find imported, which saves them the time; they make every start heavier.
            libraries: programs may import the packages installed beside this one.

        Raises:
            ValueError: no such tier, or not one slot.
        """
        self.limits = limits or RunLimits()
        self.slots = len(os.sched_getaffinity(0)) if slots is None else slots
        self.tier = ""  # the one in force, once started
        self.faults = 0  # runs in which the sandbox failed and that were tried again
        if self.slots < 1:
            raise ValueError(f"the sandbox has {self.slots} slots; expected at least 1")
        self._wanted = tiers.candidates(tier)
        self._preload = tuple(preload)
        self._libraries = libraries
        self._pool: JailPool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(
        self,
        source: str,
        *,
        stdin: str | bytes = b"",
        limits: RunLimits | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
    ) -> RunResult:
        """Run a program to its end; cancelling the call kills it.

        Args:
            stdin: what it reads.
            limits: instead of the sandbox's own.
            files: put into its working folder first, by relative path.
            fetch: files to bring back from there; what it did not leave behind is left out.

        Raises:
            SandboxError: the sandbox failed, twice; nothing is known about the program.
            ValueError: a path leads out of the folder.
        """
        limits, files = limits or self.limits, files or {}
        for name in (*files, *fetch):
            check_name(name)
        async with self._slot():
            for _ in range(_ATTEMPTS - 1):
                try:
                    return await self._run(source, stdin, limits, files, fetch)
                except SandboxUnavailable:
                    raise
                except SandboxError:
                    self.faults += 1
                    await self._revive()
            return await self._run(source, stdin, limits, files, fetch)

    @asynccontextmanager
    async def session(self, limits: RunLimits | None = None) -> AsyncIterator[Session]:
        """A process that keeps its variables and files from one cell to the next, until the block ends.

        `wall_s` is each cell's; `cpu_s` does not apply.
        """
        limits = limits or self.limits
        await self.start()
        await self._revive()
        assert self._pool is not None
        pool = self._pool
        jail = pool.lend()
        try:
            jail.open(limits)
            yield Session(jail, limits, self._slot)
        finally:
            pool.take_back(jail)

    async def start(self) -> None:
        """Start the pool, if it is not started: otherwise the first run does.

        Raises:
            SandboxUnavailable: this machine cannot isolate programs, with the reason for each tier.
        """
        self._enter_loop()
        async with self._starting:
            if self._pool is None:
                await self._start()

    def close(self) -> None:
        """End every program and the pool. A later run starts it again."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    async def __aenter__(self) -> Sandbox:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._free = asyncio.Semaphore(self.slots)
            self._starting = asyncio.Lock()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        await self.start()
        async with self._free:
            yield

    async def _start(self) -> None:
        reasons = []
        for tier in self._wanted:
            try:
                await self._start_tier(tier)
                self.tier = tier
                return
            except SandboxUnavailable as error:
                self.close()
                reasons.append(f"{tier}: {error}")
        raise SandboxUnavailable(
            f"this machine cannot run programs isolated ({'; '.join(reasons)}); use a sandbox server "
            "(env.options.server), or for programs that you trust tier=unisolated"
        )

    async def _start_tier(self, tier: str) -> None:
        self._pool = JailPool(tier, warm=self.slots, preload=self._preload, libraries=self._libraries)
        await self._pool.ready()
        if tier in tiers.ISOLATED:
            try:
                result = await self._run(_CANARY, b"", RunLimits(), {}, ())
            except SandboxError as error:
                raise SandboxUnavailable(str(error)) from error
            if result.verdict is not Verdict.OK:
                raise SandboxUnavailable(f"its walls have a hole: {result.stderr.strip() or result.verdict}")

    async def _revive(self) -> None:
        """Start the pool again if its zygote is gone; of many that find it so, one does."""
        async with self._starting:
            if self._pool is None or not self._pool.zygote.alive:
                self.close()
                await self._start()

    async def _run(
        self, source: str, stdin: str | bytes, limits: RunLimits, files: Mapping[str, bytes], fetch: Sequence[str]
    ) -> RunResult:
        if self._pool is None:
            raise SandboxError("the sandbox was closed")
        pool = self._pool
        jail = pool.lend()
        try:
            return await execute(jail, source, stdin, limits, files, fetch)
        finally:
            pool.take_back(jail)
