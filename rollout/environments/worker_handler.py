"""Handler of a worker process that plays environments of this project and its users.

It runs in the worker (see `worker_main.py`). `worker_env.py` sends the requests.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Any


class EnvHandler:
    """Handler that plays one environment for each trajectory of the run.

    Requests name an environment by the number that the run has given it.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Find the class of the environment.

        Args:
            settings: `name` and `options` of the environment in a config, and `path`, the module
                search path (`sys.path`) of the run's process, which the worker takes over.
        """
        sys.path[:] = settings["path"]
        from rollout.base.options import Registry
        from rollout.environments import ENVS, SUPPLIED

        registry = Registry(kind="env", registered=ENVS, takes=("task",), supplied=SUPPLIED)
        arguments = registry.arguments(settings["name"], settings["options"])
        self._make_env = partial(registry.find(settings["name"]), **arguments)
        self._envs: dict[int, Any] = {}

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make the call that a request names; return its value, or the kind and text of an error.

        If the environment has a method `state`, the reply also has its state after the call.
        """
        from rollout.base.error_location import describe_with_location
        from rollout.base.errors import EnvError, Unusable

        try:
            value = await self._call(request)
            state = getattr(self._envs.get(request["env"]), "state", None)
            if state is None:
                return {"value": value}
            return {"value": value, "state": state()}
        except (EnvError, Unusable) as error:
            return {"error": str(error), "kind": type(error).__name__}
        except (Exception, SystemExit) as error:
            return {"error": describe_with_location(error), "kind": "Defect"}

    async def _call(self, request: dict[str, Any]) -> Any:
        """Make the call that a request names; return its plain value."""
        from rollout.environments.protocol import is_resource_env

        number = request["env"]
        method = request["method"]
        if method == "open":
            return await self._open(number, request["task"])
        if method == "close":
            env = self._envs.pop(number, None)  # None if the environment could not be made
            if is_resource_env(env):
                await env.close()
            return None
        call = getattr(self._envs[number], method)
        return to_plain(await call(*request["arguments"]))

    async def _open(self, number: int, fields: dict[str, Any]) -> dict[str, Any]:
        """Make an environment and begin its task; return the problem and the names of its methods."""
        from rollout.base.errors import Unusable
        from rollout.environments.protocol import is_resource_env
        from rollout.records.trajectory import Task

        task = Task(**{**fields, "answers": tuple(fields["answers"])})
        env = self._make_env(task)
        self._envs[number] = env
        if is_resource_env(env):
            if "calls" in inspect.signature(env.open).parameters:
                raise Unusable(
                    f"env {task.env}: its `open` takes `calls`, the calls on record, which a worker "
                    "does not have; leave env.workers out"
                )
            await env.open(task)
        methods = [name for name in dir(type(env)) if not name.startswith("_")]
        return {"problem": env.reset(task), "methods": methods}


def to_plain(value: Any) -> Any:
    """Convert dataclasses to dictionaries, and numbers of NumPy and torch to Python's."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {name: to_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(part) for part in value]
    if hasattr(value, "item"):
        return value.item()
    return value
