"""Interface of objects that run programs: the local sandbox and the client of a server."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Self

from rollout.base.event_loop import per_loop
from rollout.sandbox.jail import check_box_path
from rollout.sandbox.records import Program, RunLimits, RunResult


class Runner(ABC):
    """Base class of objects that run programs, several at the same time.

    A runner may be used in one event loop after another, but not in two at the same time.
    """

    def __init__(self, limits: RunLimits | None, slots: int) -> None:
        """Initialize the runner.

        Args:
            limits: limits of runs for which none are given; None: the defaults.
            slots: number of programs that run at the same time.
        """
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
        """Run a program to its end; a cancelled call kills a program that runs on this machine.

        Args:
            source: Python code.
            stdin: standard input.
            limits: limits of this run, instead of the runner's.
            files: files of the working folder, by relative path.

        Raises:
            SandboxError: the sandbox failed, and so did any repetition of the run; nothing is known
                about the program.
            ValueError: the path of a file leads out of the folder.
        """
        program = Program(
            source=source, stdin=stdin, limits=limits or self.limits, files=files or {}
        )
        for name in program.files:
            check_box_path(name)
        async with self._slot():
            return await self._run(program)

    async def start(self) -> None:
        """Prepare for runs; without this call, the first run does it.

        Raises:
            SandboxUnavailable: this machine cannot isolate programs; the message has the reasons.
        """
        return

    @abstractmethod
    async def aclose(self) -> None:
        """End all programs and release all resources."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Return a context that holds one of the runner's slots."""
        await self.start()
        async with per_loop((self, "slots"), partial(asyncio.Semaphore, self.slots)):
            yield

    @abstractmethod
    async def _run(self, program: Program) -> RunResult: ...
