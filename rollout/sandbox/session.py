"""Execution in a jail: one program, or a session of cells that share variables and files."""

import asyncio
import json
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace

from rollout.sandbox.guest import wire
from rollout.sandbox.guest.program import OUT_OF_MEMORY
from rollout.sandbox.jail import Jail, until_readable
from rollout.sandbox.memory_files import memory_files, read_texts
from rollout.sandbox.records import (
    JobReport,
    Program,
    RunLimits,
    RunResult,
    SandboxError,
    Verdict,
)

_REPORT_S = 5.0  # within which a warden must report the end of a job
_MAX_DROPPED = 1000  # answers of earlier cells that are dropped while one cell runs
_INTERRUPT_S = 1.0  # within which a cell must react to an interrupt before its process is killed

# Verdicts on jobs that a warden has ended, by its reason (see `JobReport`). The other reasons stand
# for a time limit: "wall", and "asked" for a cell that does not react to an interrupt.
_KILL_VERDICTS = {
    "disk": Verdict.OLE,
    "memory": Verdict.MLE,
    "threads": Verdict.RE,
}


class Session:
    """Cells that run one after another in one jail; `Sandbox.session` opens it.

    Threads and processes that a cell has started are paused until the next cell. A cell that runs
    out of time is interrupted, and the variables that it has set are kept. If its process ends or
    has to be killed, the variables are lost and the files stay; the next cell starts a new process,
    and its result is `fresh`.
    """

    def __init__(
        self, jail: Jail, limits: RunLimits, slot: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        """Initialize a session.

        Args:
            jail: an open jail.
            limits: limits of the session.
            slot: returns a context that each cell enters, so that the sessions share the cores.
        """
        self._jail = jail
        self._limits = limits
        self._slot = slot
        self._cells: socket.socket | None = None  # channel to the process of the cells
        self._tokens: list[str] = []  # tokens of the cells that were sent to the process
        self._lock = asyncio.Lock()

    async def run(self, source: str, *, wall_s: float | None = None) -> RunResult:
        """Run one cell; print the value of a last expression, as a notebook does.

        A cancelled call ends the process.

        Args:
            source: Python code.
            wall_s: time limit of the cell; None: that of the session.

        Raises:
            SandboxError: the sandbox failed.
        """
        async with self._lock, self._slot():
            is_fresh = self._cells is None
            cells = self._cells or self._start_process()
            with memory_files(source, None, None) as files:
                try:
                    return await self._run_cell(
                        cells, files, wall_s=wall_s or self._limits.wall_s, is_fresh=is_fresh
                    )
                except BaseException:
                    self.end()
                    raise

    async def put(self, name: str, content: bytes) -> None:
        """Write a file of the box (see `Jail.put`)."""
        async with self._lock:
            await self._jail.put(name, content)

    async def get(self, name: str) -> bytes | None:
        """Return a file of the box, up to `file_mb`; None if there is no regular file."""
        async with self._lock:
            return await self._jail.get(name, self._limits.file_mb << 20)

    async def files(self) -> dict[str, int]:
        """Return the size in bytes of every regular file in the box, by path."""
        async with self._lock:
            return await self._jail.files()

    def end(self) -> None:
        """End the process; the files stay."""
        if self._cells is not None:
            self._cells.close()
            self._cells = None
            with suppress(SandboxError):  # without its warden the process has ended already
                self._jail.kill()

    def _start_process(self) -> socket.socket:
        self._cells, process_end = wire.pair()
        self._cells.setblocking(False)
        self._tokens.clear()
        with process_end:
            self._jail.start("cells", [process_end.fileno()])
        return self._cells

    async def _run_cell(
        self, cells: socket.socket, files: list[int], *, wall_s: float, is_fresh: bool
    ) -> RunResult:
        """Run the cell whose source, stdout and stderr are in `files`."""
        started_s = time.monotonic()
        is_late = False
        report: JobReport | None = None
        error: str | None = ""  # name of the exception that ended the cell
        try:
            if not is_fresh:
                self._jail.resume()
            token = secrets.token_hex(16)
            self._tokens.append(token)
            wire.send(cells, {"token": token}, files)
            error = await self._receive_error(cells, wall_s)
            if error is None:
                is_late = True
                self._jail.interrupt()
                error = await self._receive_error(cells, _INTERRUPT_S)
            if error is None:
                self._jail.kill()
                raise EOFError
            self._jail.pause()
        except (EOFError, OSError):
            # The process has ended, or has closed or filled its end of the channel, which the
            # program can do at any time.
            cells.close()
            self._cells = None
            report = await _end_unresponsive(self._jail)

        (stdout, stderr), is_complete = read_texts(files[1:], self._limits.output_kb << 10)
        if report is not None:
            verdict = job_verdict(report, self._limits, output_complete=is_complete)
            exit_code = report.exit_code
        else:
            verdict = _cell_verdict(error, output_complete=is_complete)
            exit_code = 1 if error else 0
        return RunResult(
            verdict=Verdict.TLE if is_late else verdict,
            stdout=stdout,
            stderr=stderr,
            exit_code=exit_code,
            wall_s=time.monotonic() - started_s,
            fresh=is_fresh,
        )

    async def _receive_error(self, cells: socket.socket, timeout_s: float) -> str | None:
        """Return the name of the exception that ended the last cell, or "" for none.

        The code of a cell can write answers into the channel, so each answer has the token of its
        cell. If a cell forges its own answer, its real answer comes later, and is dropped.

        Returns:
            The name, or None after the timeout.

        Raises:
            EOFError: the process has closed its channel, sent something else, or floods it.
        """
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(_MAX_DROPPED):
                    await until_readable(cells)
                    # recv, unlike recv_fds, drops descriptors that come with the message
                    answer = json.loads(cells.recv(wire.MAX_MESSAGE_BYTES))
                    if answer["token"] == self._tokens[-1]:
                        return str(answer["error"])
                    if answer["token"] not in self._tokens:
                        raise EOFError
        except TimeoutError:
            return None
        except (ValueError, LookupError, TypeError, RecursionError):
            raise EOFError from None
        raise EOFError


async def _end_unresponsive(jail: Jail) -> JobReport:
    """Return the report on a process that does not answer; kill it if it has not ended.

    The kill counts as the program's own failure and not as a limit that it has reached.
    """
    try:
        async with asyncio.timeout(_INTERRUPT_S):
            return await jail.wait()
    except TimeoutError:
        jail.kill()
    report = await _wait_for_report(jail, _REPORT_S)
    return replace(report, kill_reason="")


async def execute(jail: Jail, program: Program) -> RunResult:
    """Run a program in a jail that was just lent; raise SandboxError if the jail fails."""
    limits = program.limits
    jail.open(limits)
    for name, content in program.files.items():
        await jail.put(name, content)

    with memory_files(program.source, program.stdin, None, None) as files:
        started_s = time.monotonic()
        jail.start("program", files)
        report = await _wait_for_report(jail, limits.wall_s + _REPORT_S)
        wall_s = time.monotonic() - started_s
        (stdout, stderr), is_complete = read_texts(files[2:], limits.output_kb << 10)

    return RunResult(
        verdict=job_verdict(report, limits, output_complete=is_complete),
        stdout=stdout,
        stderr=stderr,
        exit_code=report.exit_code,
        wall_s=wall_s,
        cpu_s=report.cpu_s,
        memory_mb=report.memory_bytes / 2**20,
    )


async def _wait_for_report(jail: Jail, timeout_s: float) -> JobReport:
    try:
        async with asyncio.timeout(timeout_s):
            return await jail.wait()
    except TimeoutError:
        raise SandboxError(f"the warden of a job did not report within {timeout_s:g} s") from None


def job_verdict(report: JobReport, limits: RunLimits, *, output_complete: bool) -> Verdict:
    """Return the verdict on a job that has ended.

    Args:
        output_complete: False if the job has written more than `output_kb`.
    """
    exit_code = report.exit_code
    if not output_complete:
        return Verdict.OLE
    if report.kill_reason:
        return _KILL_VERDICTS.get(report.kill_reason, Verdict.TLE)
    if report.out_of_memory or exit_code == OUT_OF_MEMORY:
        return Verdict.MLE

    # A program that ignores SIGXCPU is killed one second of CPU time later.
    has_used_cpu_time = report.cpu_s >= limits.cpu_s
    if exit_code == -signal.SIGXCPU or (exit_code == -signal.SIGKILL and has_used_cpu_time):
        return Verdict.TLE
    return Verdict.OK if exit_code == 0 else Verdict.RE


def _cell_verdict(error: str | None, *, output_complete: bool) -> Verdict:
    """Return the verdict on a cell whose process goes on."""
    if not output_complete:
        return Verdict.OLE
    if not error:
        return Verdict.OK
    return Verdict.MLE if error == "MemoryError" else Verdict.RE
