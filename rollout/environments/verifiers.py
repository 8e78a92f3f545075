"""Environments of the package `verifiers`, which play their own episodes in a worker process.

`VerifiersEnv` reads the result of an episode, `run_episode` plays one with the models of a gateway,
and `list_tasks` returns the tasks of an environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from signal import SIGKILL
from tempfile import TemporaryFile
from typing import IO, Any

from pydantic import JsonValue, PositiveInt

from rollout.base.async_tasks import cancel_tasks
from rollout.base.errors import EnvError
from rollout.base.event_loop import per_loop
from rollout.base.processes import die_with_parent
from rollout.environments.protocol import Step
from rollout.records.trajectory import Task

PROGRAM = "rollout.orchestras.verifiers:play"
_WORKER = Path(__file__).with_name("verifiers_worker.py")
_MAX_REPLY_BYTES = 64 << 20
_MAX_ERROR_CHARS = 500
_STOP_S = 5.0


class VerifiersEnv:
    """Environment of the package `verifiers`, with its rubric as reward.

    The environment plays the whole episode: it asks the team's agents through the gateway, runs its
    tools, and scores the episode. The orchestra is therefore `program` with
    `call: rollout.orchestras.verifiers:play`. The first of a task's `answers` is the row of the
    environment's data set as JSON, as the task generator `verifiers` writes it.

    Args:
        id: name of the environment, as `verifiers` loads it.
        python: Python in whose environment `verifiers` and the environment are installed; "": the
            Python of this run.
        args: arguments of the environment's `load_environment` or, since verifiers 0.4, its
            configuration.
        workers: number of processes that play episodes, each with an environment of its own.
    """

    def __init__(
        self,
        task: Task,
        *,
        id: str,
        python: str = "",
        args: Mapping[str, JsonValue] | None = None,
        workers: PositiveInt = 1,
    ) -> None:
        self._settings = {
            "id": id,
            "python": python,
            "args": dict(args or {}),
            "workers": workers,
        }

    def reset(self, task: Task) -> str:
        """Return the settings as JSON, with which `run_episode` plays the task."""
        return json.dumps(self._settings)

    async def step(self, action: str) -> Step:
        """Return the reward and the metrics of an episode that `run_episode` has played.

        The text "" is that of an episode that failed after an agent was asked, and has reward 0.
        """
        if not action:
            return Step(done=True)
        try:
            result = json.loads(action)
            reward = float(result["reward"])
        except (ValueError, TypeError, LookupError):
            raise EnvError(
                "env verifiers plays its episodes itself; it needs "
                f"orchestra={{name: program, options: {{call: '{PROGRAM}'}}}}"
            ) from None
        metrics = {
            name: float(value)
            for name, value in result["metrics"].items()
            if isinstance(value, int | float)
        }
        return Step(reward=reward, done=True, metrics=metrics)


async def run_episode(settings: str, row: str, *, url: str, key: str) -> str:
    """Play an episode; return its reward and metrics as JSON.

    Args:
        settings: settings of the environment, as `VerifiersEnv.reset` returns them.
        row: row of the environment's data set, as JSON.
        url: base URL of the models, for OpenAI's clients.
        key: API key of the models.

    Raises:
        EnvError: the environment cannot be loaded, or its episode failed.
    """
    # Episodes take turns, so that one that blocks its process delays only every n-th.
    turn = next(per_loop(("verifiers turns", settings), count))
    number = turn % json.loads(settings)["workers"]
    worker = per_loop(("verifiers", settings, number), partial(_Worker, settings))
    async with worker.running():
        reply = await worker.request(row=json.loads(row), url=url, key=key)
    return json.dumps({"reward": reply["reward"], "metrics": reply["metrics"]})


def list_tasks(
    id: str, python: str, args: Mapping[str, JsonValue], limit: int
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of an environment's data sets: `train` and, if there are any, `evaluation`.

    Raises:
        ValueError: the environment cannot be loaded.
    """
    request = json.dumps({"number": 0, "limit": limit})
    completed = subprocess.run(
        _command({"id": id, "python": python, "args": dict(args)}),
        input=request.encode(),
        capture_output=True,
        check=False,
    )
    reply = json.loads(completed.stdout) if completed.stdout else {}
    if "tasks" not in reply:
        error = reply.get("error") or _last_line(completed.stderr)
        raise ValueError(f"verifiers: the tasks of '{id}' cannot be read: {error}")
    tasks: dict[str, list[dict[str, Any]]] = reply["tasks"]
    return tasks


def _command(settings: Mapping[str, Any]) -> list[str]:
    """Return the command of a worker; -P keeps this folder's modules out of its imports."""
    python = settings["python"] or sys.executable
    return [python, "-P", str(_WORKER), settings["id"], json.dumps(settings["args"])]


def _last_line(output: bytes) -> str:
    lines = output.decode("utf-8", "replace").strip().splitlines() or ["no error was printed"]
    return lines[-1][-_MAX_ERROR_CHARS:]


class _Worker:
    """A process that plays episodes of one environment while trajectories use it."""

    def __init__(self, settings: str) -> None:
        self._settings = json.loads(settings)
        self._users = 0
        self._lock = asyncio.Lock()
        self._numbers = count()
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._errors: IO[bytes] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Return a context in which the process runs; the last one that ends stops it."""
        self._users += 1
        try:
            async with self._lock:
                if self._process is None:
                    await self._start()
            yield
        finally:
            self._users -= 1
            async with self._lock:
                if not self._users and self._process is not None:
                    await self._stop()

    async def request(self, **message: Any) -> dict[str, Any]:
        """Send a request and return its reply; if this is cancelled, cancel the episode.

        Raises:
            EnvError: the reply is an error, or the process ended.
        """
        assert self._process is not None and self._process.stdin is not None
        stdin = self._process.stdin
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        try:
            with suppress(ConnectionError):  # the reader reports that the process ended
                stdin.write(json.dumps({"number": number, **message}).encode() + b"\n")
                await stdin.drain()
            if self._reader is None or self._reader.done():
                self._fail_requests()
            reply: dict[str, Any] = await future
        except asyncio.CancelledError:
            if not stdin.is_closing():
                stdin.write(json.dumps({"cancel": number}).encode() + b"\n")
            raise
        finally:
            del self._replies[number]
        if "error" in reply:
            raise EnvError(f"verifiers '{self._settings['id']}': {reply['error']}")
        return reply

    async def _start(self) -> None:
        self._errors = TemporaryFile()  # noqa: SIM115 -- closed when the process has ended
        command = _command(self._settings)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._errors,
                limit=_MAX_REPLY_BYTES,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, SIGKILL, os.getpid()),
            )
        except OSError as error:
            self._errors.close()
            raise EnvError(f"verifiers: '{command[0]}' cannot be started: {error}") from error
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            reply = json.loads(line)
            future = self._replies.get(reply["number"])
            if future is not None and not future.done():
                future.set_result(reply)
        self._fail_requests()

    def _fail_requests(self) -> None:
        """Fail all requests, because the process has ended."""
        assert self._errors is not None
        self._errors.seek(0)
        message = f"the worker process ended: {_last_line(self._errors.read())}"
        for future in self._replies.values():
            if not future.done():
                future.set_result({"error": message})

    async def _stop(self) -> None:
        assert self._process is not None and self._reader is not None
        assert self._process.stdin is not None and self._errors is not None
        self._process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        # Processes of the environment's tools are in the group of the worker.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, SIGKILL)
        await self._process.wait()
        await cancel_tasks([self._reader])
        self._errors.close()
        self._process = None
