"""Sandboxes: they run model-written Python in isolated processes of this machine, or on a SandboxFusion server."""

from __future__ import annotations

import asyncio
import base64
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from rollout.base.event_loop import per_loop
from rollout.base.http import HttpClient, Refused, Unanswered, retry
from rollout.base.processes import Restarts
from rollout.sandbox import pool as tiers
from rollout.sandbox.jail import Jail, check_name
from rollout.sandbox.pool import JailPool
from rollout.sandbox.records import (
    Program,
    RunLimits,
    RunResult,
    SandboxError,
    SandboxUnavailable,
    Verdict,
)
from rollout.sandbox.session import Session, execute


class Runner(ABC):
    """Whatever runs programs, some at once; in one event loop after another, never in two at once."""

    def __init__(self, limits: RunLimits | None, slots: int) -> None:
        """`limits` of runs that bring none of their own; `slots` programs at once."""
        if slots < 1:
            raise ValueError(f"the sandbox has {slots} slots; expected at least 1")
        self.limits = limits or RunLimits()
        self.slots = slots

    async def run(
        self,
        source: str,
        *,
        stdin: str | bytes = b"",
        limits: RunLimits | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> RunResult:
        """Run a program to its end; cancelling the call kills it where it runs on this machine.

        Args:
            stdin: what it reads.
            limits: instead of the sandbox's own.
            files: put into its working folder first, by relative path.

        Raises:
            SandboxError: the sandbox failed, also when tried again; nothing is known about the program.
            ValueError: a path leads out of the folder.
        """
        program = Program(
            source=source, stdin=stdin, limits=limits or self.limits, files=files or {}
        )
        for name in program.files:
            check_name(name)
        async with self._slot():
            return await self._run(program)

    async def start(self) -> None:
        """Get ready for runs; otherwise the first one does that.

        Raises:
            SandboxUnavailable: this machine cannot isolate programs, with the reason for each tier.
        """
        return

    @abstractmethod
    async def aclose(self) -> None:
        """End what runs, and give back what was taken for it."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        await self.start()
        async with per_loop((self, "slots"), partial(asyncio.Semaphore, self.slots)):
            yield

    @abstractmethod
    async def _run(self, program: Program) -> RunResult: ...


_RESTARTS = 20  # of a sandbox, in an hour
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
    """A pool of jails, each for one program; use it with `async with`, or call `close` at the end.

    It starts at the first run. When this process ends, however it ends, every program ends with it.
    """

    def __init__(
        self, limits: RunLimits | None = None, *, slots: int | None = None, tier: str = "auto"
    ) -> None:
        """A sandbox that has not started.

        Args:
            limits: of runs that bring none of their own.
            slots: programs at once; the number of usable cores if None.
            tier: how programs are kept in, a name of `tiers.TIERS`; `auto` is the best isolation this machine allows.
                Without any it refuses, unless `unisolated` is asked for by name.

        Raises:
            ValueError: no such tier, or not one slot.
        """
        super().__init__(limits, len(os.sched_getaffinity(0)) if slots is None else slots)
        self.tier = ""  # the one in force, once started
        self.faults = 0  # runs in which the sandbox failed and that were tried again
        self._wanted = tiers.candidates(tier)
        self._pool: JailPool | None = None
        self._restarts = Restarts("sandbox", _RESTARTS)

    @asynccontextmanager
    async def session(self, limits: RunLimits | None = None) -> AsyncIterator[Session]:
        """A process that keeps its variables and files from one cell to the next, until the block ends.

        `wall_s` is each cell's; `cpu_s` does not apply.
        """
        limits = limits or self.limits
        await self.start()
        with self._jail() as jail:
            jail.open(limits)
            yield Session(jail, limits, self._slot)

    async def start(self) -> None:
        async with per_loop(
            (self, "starting"), asyncio.Lock
        ):  # of many that find the zygote gone, one starts another
            if self._pool is not None and not self._pool.alive:
                if not self._restarts.take():
                    raise SandboxUnavailable(
                        f"the sandbox has ended {_RESTARTS} times within an hour; see who ends it"
                    )
                self.close()
            if self._pool is None:
                await self._start()

    def close(self) -> None:
        """End every program and the pool. A later run starts it again."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    async def aclose(self) -> None:
        self.close()

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
        self._pool = JailPool(tier, warm=self.slots)
        await asyncio.to_thread(self._pool.wait)
        if tier in tiers.ISOLATED:
            try:
                with tempfile.NamedTemporaryFile(dir=tiers.BOXES, prefix="canary-") as outside:
                    source = f"OUTSIDE = {outside.name!r}\n{_CANARY}"
                    result = await self._attempt(Program(source=source, limits=RunLimits()))
            except SandboxError as error:
                raise SandboxUnavailable(str(error)) from error
            if result.verdict is not Verdict.OK:
                raise SandboxUnavailable(
                    f"its walls have a hole: {result.stderr.strip() or result.verdict}"
                )

    async def _run(self, program: Program) -> RunResult:
        try:
            return await self._attempt(program)
        except SandboxUnavailable:
            raise
        except SandboxError:  # once more
            self.faults += 1
            await self.start()
        return await self._attempt(program)

    async def _attempt(self, program: Program) -> RunResult:
        with self._jail() as jail:
            return await execute(jail, program)

    def _jail(self) -> AbstractContextManager[Jail]:
        if self._pool is None:
            raise SandboxError("the sandbox was closed")
        return self._pool.lent()


_ROOM_S = 10.0  # for the server's own work, beyond a program's wall time
_REPLY_BYTES = 64 << 20


class SandboxFusion(Runner):
    """The client of a server that speaks SandboxFusion's `/run_code`.

    Isolation is the server's, and so are limits that it has no field for.
    """

    def __init__(
        self,
        url: str,
        limits: RunLimits | None = None,
        *,
        slots: int = 16,
        retries: int = 4,
        token_file: Path | None = None,
    ) -> None:
        """`slots` requests at once; `token_file` holds the server's bearer token, if it wants one."""
        super().__init__(limits, slots)
        self._retries = retries
        token = token_file.read_text().strip() if token_file else None
        self._http = HttpClient(url, token=token, max_reply_bytes=_REPLY_BYTES)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _run(self, program: Program) -> RunResult:
        body = {
            "code": program.source,
            "language": "python",
            "stdin": program.stdin
            if isinstance(program.stdin, str)
            else program.stdin.decode("utf-8", "replace"),
            "compile_timeout": program.limits.wall_s,
            "run_timeout": program.limits.wall_s,
            "memory_limit_MB": program.limits.memory_mb,
            "files": {
                name: base64.b64encode(content).decode() for name, content in program.files.items()
            },
        }

        async def attempt() -> RunResult:
            timeout_s = 2 * program.limits.wall_s + _ROOM_S
            reply = (
                await self._http.send("POST", "/run_code", body, timeout_s=timeout_s)
            ).raise_for_status()
            try:
                answer = reply.json()
                if answer["status"] != "SandboxError":
                    return _read(answer, program.limits)
            except (KeyError, TypeError, ValueError) as error:
                raise Unanswered(f"malformed reply ({type(error).__name__}: {error})") from None
            raise Unanswered(f"its sandbox failed: {str(answer.get('message'))[:200]}")

        url = self._http.url
        try:
            # whatever it says but a verdict is tried again, except for a refusal
            return await retry(attempt, retries=self._retries)
        except Refused as refusal:
            raise SandboxError(f"{url}/run_code refused the request, {refusal}") from None
        except Unanswered as trouble:
            raise SandboxError(
                f"the sandbox server {url} gives no verdict ({trouble}); is it running, and SandboxFusion?"
            ) from None


def _read(answer: dict[str, Any], limits: RunLimits) -> RunResult:
    """The result in an answer; KeyError, TypeError or ValueError where it has not the fields it should have."""
    run = answer["run_result"] or answer["compile_result"]
    stdout, stderr = str(run["stdout"] or ""), str(run["stderr"] or "")
    code = run["return_code"]
    return RunResult(
        verdict=_verdict(run["status"], code, max(len(stdout), len(stderr)), limits, stderr),
        stdout=stdout[: limits.output_kb << 10],
        stderr=stderr[: limits.output_kb << 10],
        exit_code=-9 if code is None else int(code),
        wall_s=float(run["execution_time"] or 0.0),
    )


def _verdict(status: str, code: int | None, length: int, limits: RunLimits, stderr: str) -> Verdict:
    if length > limits.output_kb << 10:
        return Verdict.OLE
    if status == "TimeLimitExceeded":
        return Verdict.TLE
    if status != "Finished":
        raise ValueError(f"status {status}")
    if code == 0:
        return Verdict.OK
    return (
        Verdict.MLE if stderr.rstrip().rpartition("\n")[2].startswith("MemoryError") else Verdict.RE
    )
