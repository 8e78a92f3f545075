"""Environments of the package `verifiers`, which play their own episodes in worker processes.

`VerifiersEnv` reads the result of an episode, `run_episode` plays one with the models of a gateway,
and `list_tasks` returns the tasks of an environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import JsonValue, PositiveInt

from rollout.base.errors import EnvError
from rollout.base.event_loop import per_loop
from rollout.environments.protocol import Step
from rollout.environments.worker_process import Workers, last_line, worker_command
from rollout.records.trajectory import Task

# Import path of the program that plays the episodes, for the option `call` of the orchestra `program`.
PROGRAM = "rollout.orchestras.verifiers:play"


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

        Args:
            action: result that `run_episode` has returned; "" if the episode failed after an agent
                was asked, which gives the reward 0.

        Raises:
            EnvError: the action is neither, because another orchestra plays the environment.
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
    fields = json.loads(settings)
    owner = f"verifiers '{fields['id']}'"
    workers = per_loop(
        ("verifiers", settings), partial(Workers, owner, _command(fields), fields["workers"])
    )
    async with workers.use() as worker:
        reply = await worker.request(row=json.loads(row), url=url, key=key)
    if "error" in reply:
        raise EnvError(f"{owner}: {reply['error']}")
    return json.dumps({"reward": reply["reward"], "metrics": reply["metrics"]})


def list_tasks(
    id: str, python: str, args: Mapping[str, JsonValue], limit: int
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of an environment's data sets: `train` and, if there is one, `evaluation`.

    Args:
        id, python, args: options of `VerifiersEnv`.
        limit: largest number of rows that are read of each data set.

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
        error = reply.get("error") or last_line(completed.stderr)
        raise ValueError(f"verifiers: the tasks of '{id}' cannot be read: {error}")
    tasks: dict[str, list[dict[str, Any]]] = reply["tasks"]
    return tasks


def _command(settings: Mapping[str, Any]) -> list[str]:
    """Return the command of a worker."""
    python = settings["python"] or sys.executable
    handler_settings = {"id": settings["id"], "args": settings["args"]}
    return worker_command(python, "verifiers_worker.py", "VerifiersHandler", handler_settings)
