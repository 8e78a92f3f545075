"""Environments that are played in worker processes, so that their steps do not hold up the run's process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import Any

from rollout.base import errors
from rollout.base.errors import Defect, EnvError
from rollout.base.event_loop import per_loop
from rollout.environments.protocol import Decision, PlayedEnv, Step, ToolCall
from rollout.environments.worker_process import WorkerProcess, Workers, worker_command
from rollout.records.trajectory import Task

_ENV_NUMBERS = count()  # by which the workers tell the environments of trajectories apart


class WorkerEnv:
    """Client of an environment that a worker process plays, for one trajectory.

    It offers the optional methods that this environment has, which are known after `open`. The
    trajectory keeps its worker; if the worker ends, the trajectories that it plays fail.
    """

    def __init__(self, task: Task, *, name: str, options: Mapping[str, Any], workers: int) -> None:
        """Configure the environment.

        Args:
            name: name of the environment in a config.
            options: its options, as plain values.
            workers: number of processes that the trajectories share.
        """
        self._name = name
        self._settings = {"name": name, "options": dict(options), "path": sys.path}
        self._workers = workers
        self._number = next(_ENV_NUMBERS)
        self._resources = AsyncExitStack()  # closing it ends this environment's use of the worker
        self._worker: WorkerProcess | None = None
        self._problem: str | None = None  # from `open` until `reset` returns it
        self._state = ""  # after the last call
        self._is_cancelled = False  # True if a call was cancelled
        self._methods: frozenset[str] = frozenset()

    async def open(self, task: Task) -> None:
        """Make the environment in the worker with the fewest trajectories, and begin the task there."""
        command = worker_command(sys.executable, "worker_handler.py", "EnvHandler", self._settings)
        workers = per_loop(
            ("env workers", *command, self._workers),
            partial(Workers, f"env {self._name}", command, self._workers),
        )
        self._worker = await self._resources.enter_async_context(workers.use())
        opened = await self._request("open", task=asdict(task))
        self._methods = frozenset(opened["methods"])
        self._problem = opened["problem"]

    async def close(self) -> None:
        worker = self._worker
        try:
            if worker is None or worker.error:
                return
            if self._is_cancelled:  # the worker may still be busy with the cancelled call
                worker.post(env=self._number, method="close")
            else:
                await self._request("close")
        finally:
            self._worker = None
            await self._resources.aclose()

    def reset(self, task: Task) -> str:
        """Return the problem; the worker has begun the task already.

        Raises:
            EnvError: it is called before `open`, or a second time.
        """
        problem = self._problem
        if problem is None:
            raise EnvError(
                f"env {self._name}: an environment in a worker is reset once, after it is opened"
            )
        self._problem = None
        return problem

    async def step(self, action: str) -> Step:
        return _step_of(await self._call("step", action))

    def __getattr__(self, name: str) -> Any:
        """Return an optional method of the environment.

        Raises:
            AttributeError: the environment does not have it.
        """
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(name)
        if name == "state":
            return lambda: self._state
        if name not in _RESULTS:
            raise AttributeError(name)
        return partial(self._call_optional, name)

    async def _call_optional(self, method: str, *arguments: Any) -> Any:
        return _RESULTS[method](await self._call(method, *arguments))

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._request(method, arguments=arguments)

    async def _request(self, method: str, **message: Any) -> Any:
        """Make a call in the worker and return its plain value.

        Raises:
            EnvError, Unusable: the call raised it, the worker ended, or `open` was not called.
            Defect: the call raised any other error.
        """
        if self._worker is None:
            raise EnvError(f"env {self._name}: it is used before open")
        try:
            reply = await self._worker.request(env=self._number, method=method, **message)
        except asyncio.CancelledError:
            self._is_cancelled = True
            raise
        if "error" not in reply:
            self._state = reply.get("state", "")
            return reply["value"]
        kind = reply.get("kind", Defect.__name__)
        if kind == Defect.__name__:
            raise Defect(f"{self._name}.{method}: {reply['error']}")
        raise getattr(errors, kind, EnvError)(reply["error"])


def _step_of(fields: Mapping[str, Any]) -> Step:
    tools = tuple(ToolCall(**call) for call in fields["tools"])
    return Step(**{**fields, "tools": tools, "passages": tuple(fields["passages"])})


# Optional methods of environments, and how their values are made of plain ones.
_RESULTS: dict[str, Callable[[Any], Any]] = {
    PlayedEnv.preview.__name__: _step_of,
    PlayedEnv.same.__name__: bool,
    PlayedEnv.run.__name__: lambda fields: ToolCall(**fields),
    PlayedEnv.files.__name__: dict,
    PlayedEnv.forget.__name__: lambda _: None,
    PlayedEnv.check.__name__: _step_of,
    PlayedEnv.decision.__name__: lambda fields: Decision(**fields),
    PlayedEnv.agreement.__name__: lambda share: share,
}
