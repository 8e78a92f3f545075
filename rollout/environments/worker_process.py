"""Worker processes that play environments, and the requests to them.

`Workers` are the processes of one handler (see `worker_main.py`), and `WorkerProcess` is one of them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from signal import SIGKILL
from tempfile import TemporaryFile
from typing import IO, Any

from rollout.base.errors import EnvError
from rollout.base.processes import die_with_parent

_MAX_REPLY_BYTES = 64 << 20
_MAX_ERROR_CHARS = 500
_STOP_S = 5.0  # seconds in which an idle worker may end by itself
_CANCEL_S = 30.0  # seconds in which a cancelled request must end, before its worker is killed

_MAIN = Path(__file__).with_name("worker_main.py")


def worker_command(
    python: str, file: str, class_name: str, settings: Mapping[str, Any]
) -> list[str]:
    """Return the command of a worker.

    -P keeps modules of this folder, such as math and code, out of its imports.

    Args:
        python: the Python that runs it.
        file: file of the handler in this folder.
        class_name: class of the handler.
        settings: settings of the handler, as plain values.
    """
    path = str(_MAIN.with_name(file))
    return [python, "-P", str(_MAIN), path, class_name, json.dumps(settings)]


def last_line(stderr: bytes) -> str:
    """Return the last line that a process printed to standard error, or a note that there is none.

    Of a long line, only the end is returned.
    """
    lines = stderr.decode("utf-8", "replace").strip().splitlines() or ["no error was printed"]
    return lines[-1][-_MAX_ERROR_CHARS:]


class Workers:
    """Worker processes of one command, which belong to the running event loop.

    A process starts when it is first needed, and serves until the event loop ends. One that has
    ended is replaced at the next use.
    """

    def __init__(self, owner: str, command: Iterable[str], number: int) -> None:
        """Configure the processes.

        Args:
            owner: name of the environment in errors.
            command: program and arguments of a process.
            number: largest number of processes.
        """
        self._owner = owner
        self._command = list(command)
        self._number = number
        self._workers: dict[int, WorkerProcess] = {}

    @asynccontextmanager
    async def use(self) -> AsyncIterator[WorkerProcess]:
        """Yield the process that has the fewest users; start one if needed."""
        index = min(range(self._number), key=self._users_of)
        worker = self._workers.get(index)
        if worker is None or worker.error:
            worker = WorkerProcess(self._owner, self._command)
            self._workers[index] = worker
            worker.serving.add_done_callback(partial(self._remove, index, worker))
        worker.users += 1
        try:
            yield worker
        finally:
            worker.users -= 1

    def _users_of(self, index: int) -> int:
        worker = self._workers.get(index)
        return worker.users if worker is not None else 0

    def _remove(self, index: int, worker: WorkerProcess, _: object) -> None:
        if self._workers.get(index) is worker:
            del self._workers[index]


class WorkerProcess:
    """A process that answers requests, until it ends or the event loop ends.

    Attributes:
        users: number of contexts that use it.
        error: how the process ended; "" while it runs.
        serving: task that starts the process, reads its replies and ends it.
    """

    def __init__(self, owner: str, command: list[str]) -> None:
        """Begin to start the process.

        Args:
            owner: name of the environment in errors.
            command: program and arguments.
        """
        self.users = 0
        self.error = ""
        self._owner = owner
        self._command = command
        self._numbers = count()
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        # Timers that kill the process, by the number of a cancelled request that it has not ended yet.
        self._kill_timers: dict[int, asyncio.TimerHandle] = {}
        self._started = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        # asyncio.run cancels this task when the event loop ends, which ends the process.
        self.serving = asyncio.create_task(self._serve())

    async def request(self, **message: Any) -> dict[str, Any]:
        """Send a request and return its reply; if this is cancelled, cancel the request.

        Raises:
            EnvError: the process cannot be started, or has ended.
        """
        await self._started.wait()
        if self._process is None or self.error:
            raise EnvError(f"{self._owner}: {self.error}")
        assert self._process.stdin is not None
        stdin = self._process.stdin
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        try:
            with suppress(ConnectionError):  # `_serve` reports that the process ended
                stdin.write(json.dumps({"number": number, **message}).encode() + b"\n")
                await stdin.drain()
            reply: dict[str, Any] = await future
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            del self._replies[number]
        if self.error:
            raise EnvError(f"{self._owner}: {self.error}")
        return reply

    def post(self, **message: Any) -> None:
        """Send a request whose reply nobody waits for, if the process runs."""
        if self._process is not None and self._process.stdin is not None and not self.error:
            line = json.dumps({"number": next(self._numbers), **message})
            self._process.stdin.write(line.encode() + b"\n")

    def _cancel(self, number: int) -> None:
        """Cancel a request in the process; kill the process if the request goes on nevertheless."""
        if self._process is None or self._process.stdin is None or self.error:
            return
        self._process.stdin.write(json.dumps({"cancel": number}).encode() + b"\n")
        loop = asyncio.get_running_loop()
        self._kill_timers[number] = loop.call_later(_CANCEL_S, self._end_stuck)

    def _end_stuck(self) -> None:
        """End the process, in which a cancelled request goes on."""
        self.error = (
            f"the worker process was ended, because a cancelled call went on for {_CANCEL_S:g} s"
        )
        self._kill()

    def _kill(self) -> None:
        """Kill the process, with the processes that its environments started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, SIGKILL)

    async def _serve(self) -> None:
        """Start the process and read its replies until it ends; end it if this is cancelled."""
        with TemporaryFile() as stderr_file:
            try:
                await self._start(stderr_file)
                self._started.set()
                await self._read_replies()
            except OSError as error:
                self.error = f"'{self._command[0]}' cannot be started: {error}"
            except ValueError as error:
                self.error = f"the worker process sent a reply that cannot be read: {error}"
            except asyncio.CancelledError:
                await self._stop()
                raise
            finally:
                self._kill()
                if self._process is not None:
                    await self._process.wait()
                stderr_file.seek(0)
                stderr = stderr_file.read()
                self.error = self.error or f"the worker process ended: {last_line(stderr)}"
                # If the start failed, the requests that wait for it raise the error.
                self._started.set()
                self._fail_requests()

    async def _start(self, stderr_file: IO[bytes]) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr_file,
            limit=_MAX_REPLY_BYTES,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, SIGKILL, os.getpid()),
        )

    async def _read_replies(self) -> None:
        """Hand each reply to the call that waits for it, until the process closes its output.

        Raises:
            ValueError: a reply is longer than `_MAX_REPLY_BYTES`, or is not JSON.
        """
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if not line.endswith(b"\n"):
                return  # the process ended within this reply
            reply = json.loads(line)
            timer = self._kill_timers.pop(reply["number"], None)
            if timer is not None:
                timer.cancel()
            future = self._replies.get(reply["number"])
            if future is not None and not future.done():
                future.set_result(reply)

    async def _stop(self) -> None:
        """Let a process without requests end by itself, so that environments free their resources."""
        if self._process is None or self._replies or self._kill_timers:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _STOP_S)

    def _fail_requests(self) -> None:
        """Wake the calls that wait for a reply; they raise the process's error."""
        for timer in self._kill_timers.values():
            timer.cancel()
        for future in self._replies.values():
            if not future.done():
                future.set_result({})
