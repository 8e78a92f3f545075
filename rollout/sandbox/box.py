"""The sandbox of this machine, which runs every program in a separate process, isolated by a tier."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager

from rollout.base.event_loop import per_loop
from rollout.base.restarts import Restarts
from rollout.sandbox import tiers
from rollout.sandbox.jail import Jail
from rollout.sandbox.pool import BOXES, JailPool
from rollout.sandbox.records import (
    Program,
    RunLimits,
    RunResult,
    SandboxError,
    SandboxUnavailable,
    Verdict,
)
from rollout.sandbox.runner import Runner
from rollout.sandbox.session import Session, execute

_RESTARTS_PER_HOUR = 20

# A program that tries to leave the sandbox. It runs at the start of each isolating tier.
_CANARY = """
import os, socket
for name, forbidden in (
    ("the network", lambda: socket.socket()),
    ("files outside", lambda: open("/etc/passwd")),
    ("writing outside", lambda: open("/usr/canary", "w")),
    ("truncating files outside", lambda: os.truncate(OUTSIDE, 0)),
    ("other processes", lambda: os.kill(os.getppid(), 0) if os.getppid() > 1 else open("/proc/1/environ")),
):
    try:
        forbidden()
    except (OSError, PermissionError):
        continue
    raise SystemExit(name + " can be reached")
"""


class Sandbox(Runner):
    """A pool of jails, each of which runs one program, or the cells of one session.

    Use it with `async with`, which starts and closes it. Otherwise it starts at the first run; call `close`
    at the end. When this process ends, even if it is killed, every program ends too.

    Attributes:
        tier: isolation in force, "" before the start.
        faults: number of runs that were repeated because the sandbox had failed.
        pool: jails, or None while the sandbox is not started.
        restarts: limit on the number of times that a dead pool is replaced.
    """

    def __init__(
        self, limits: RunLimits | None = None, *, slots: int | None = None, tier: str = "auto"
    ) -> None:
        """Initialize a sandbox without starting it.

        Args:
            limits: limits of runs for which none are given; None: the defaults.
            slots: number of programs that run at the same time; None: the number of usable cores.
            tier: isolation, one of `tiers.TIERS`; "auto": the best isolation that this machine
                allows. The tier "unisolated" is used only if it is named.

        Raises:
            ValueError: there is no such tier, or `slots` is below 1.
            SandboxUnavailable: this kind of machine has no tier that isolates.
        """
        super().__init__(limits, len(os.sched_getaffinity(0)) if slots is None else slots)
        self.tier = ""
        self.faults = 0
        self.pool: JailPool | None = None
        self.restarts = Restarts("sandbox", _RESTARTS_PER_HOUR)
        self._candidates = tiers.candidate_tiers(tier)

    @asynccontextmanager
    async def session(self, limits: RunLimits | None = None) -> AsyncIterator[Session]:
        """Yield a session whose cells share variables and files.

        Args:
            limits: `wall_s` holds for each cell; `cpu_s` does not apply.
        """
        limits = limits or self.limits
        await self.start()
        with self._lend_jail() as jail:
            jail.open(limits)
            yield Session(jail, limits, self._slot)

    async def start(self) -> None:
        """Start the pool, or replace a pool whose zygote has died.

        Raises:
            SandboxUnavailable: no tier isolates programs here, or the pool has died too often.
        """
        async with per_loop((self, "starting"), asyncio.Lock):  # concurrent runs start one pool
            if self.pool is not None and not self.pool.is_alive:
                if not self.restarts.take():
                    raise SandboxUnavailable(
                        f"the sandbox's zygote has died more than {_RESTARTS_PER_HOUR} times "
                        "within an hour; find out what kills it (dmesg names the OOM killer's "
                        "victims)"
                    )
                self.close()
            if self.pool is None:
                await self._start_best_tier()

    def close(self) -> None:
        """End every program and the pool. A later run starts a new pool."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    async def aclose(self) -> None:
        self.close()

    async def _start_best_tier(self) -> None:
        reasons = []
        for tier in self._candidates:
            try:
                await self._start_tier(tier)
                self.tier = tier
                return
            except (OSError, SandboxUnavailable) as error:
                self.close()
                reasons.append(f"{tier}: {error}")
        raise SandboxUnavailable(
            f"this machine cannot run programs isolated ({'; '.join(reasons)}); use a sandbox "
            "server (env.options.server), or for programs that you trust tier=unisolated"
        )

    async def _start_tier(self, tier: str) -> None:
        self.pool = JailPool(tier, warm=self.slots)
        await asyncio.to_thread(self.pool.wait)
        if tier in tiers.ISOLATED:
            await self._check_isolation()

    async def _check_isolation(self) -> None:
        """Raise SandboxUnavailable if a program can leave the sandbox."""
        try:
            with tempfile.NamedTemporaryFile(dir=BOXES, prefix="canary-") as outside:
                source = f"OUTSIDE = {outside.name!r}\n{_CANARY}"
                result = await self._attempt(Program(source=source, limits=RunLimits()))
        except SandboxError as error:
            raise SandboxUnavailable(str(error)) from error
        if result.verdict is not Verdict.OK:
            hole = result.stderr.strip() or result.verdict
            raise SandboxUnavailable(f"its isolation has a hole: {hole}")

    async def _run(self, program: Program) -> RunResult:
        """Run a program; if the sandbox fails, repair the sandbox and run the program once more."""
        try:
            return await self._attempt(program)
        except SandboxUnavailable:
            raise
        except SandboxError:
            self.faults += 1
            await self.start()
        return await self._attempt(program)

    async def _attempt(self, program: Program) -> RunResult:
        with self._lend_jail() as jail:
            return await execute(jail, program)

    def _lend_jail(self) -> AbstractContextManager[Jail]:
        if self.pool is None:
            raise SandboxError("the sandbox was closed")
        return self.pool.lend()
