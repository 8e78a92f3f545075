"""Handler of a worker process that plays environments of the package `verifiers`.

The versions 0.1.14 (`load_environment`) and 0.4 or later (tasksets) are supported.

It runs in the Python environment that `verifiers` is installed in (see `worker_main.py`), so it
imports nothing of this project.
"""

import importlib
import itertools
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MAX_ERROR_CHARS = 2000
# Model that an environment calls if its configuration names none. The gateway gives the call to the
# team's agent of this name or, if there is none, to the agent that the orchestra's option `models` names.
_DEFAULT_MODEL = "agent"


class LegacyEnvironment:
    """An environment of verifiers 0.1, which a module's `load_environment` makes."""

    def __init__(self, env_id: str, options: Mapping[str, Any]) -> None:
        """Load the environment.

        Args:
            env_id: name of the environment.
            options: arguments of its `load_environment`.

        Raises:
            ValueError: the environment scores the rollouts of a group together.
        """
        verifiers = importlib.import_module("verifiers")
        self.env = verifiers.load_environment(env_id, **options)
        if self.env.requires_group_rollouts:
            raise ValueError(
                f"verifiers: '{env_id}' scores the rollouts of a group together, and here every "
                "trajectory has its own reward"
            )

    def tasks(self, limit: int) -> dict[str, list[Any]]:
        """Return tasks to train on and, if the environment has them, tasks to evaluate on.

        Args:
            limit: maximum number of tasks of each kind.
        """
        tasks = {"train": list(self.env.get_dataset(limit))}
        # Without an evaluation set, get_eval_dataset would return the training set.
        if self.env.build_eval_dataset() is not None:
            tasks["evaluation"] = list(self.env.get_eval_dataset(limit))
        return tasks

    async def play(self, row: dict[str, Any], url: str, key_variable: str) -> dict[str, Any]:
        """Play an episode and return its reward and metrics.

        Args:
            row: row of the environment's data set.
            url: base URL of the models.
            key_variable: environment variable that holds the API key of the models.

        Raises:
            RuntimeError: the episode failed.
        """
        types = importlib.import_module("verifiers.types")
        client = types.ClientConfig(api_base_url=url, api_key_var=key_variable, max_retries=0)
        output = await self.env.run_rollout(
            input=row,
            client=client,
            model=_DEFAULT_MODEL,
            sampling_args={},  # the gateway samples with the parameters of the agent's configuration
        )
        if output["error"] is not None:
            raise RuntimeError(f"the rollout failed: {output['error']}")
        return {"reward": output["reward"], "metrics": output["metrics"]}


class TasksetEnvironment:
    """An environment of verifiers 0.4 or later: a taskset and the agents that play it.

    An agent's harness, the program that calls the model, runs as a process of this machine. If the
    taskset has no harness, it is `null`, which has no tools of its own, instead of `bash`, the default
    of `verifiers`.
    """

    def __init__(self, env_id: str, options: Mapping[str, Any]) -> None:
        """Load the environment.

        Args:
            env_id: id of the taskset.
            options: the environment's configuration, to which the taskset's id and defaults of the
                agents are added.
        """
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        agents = importlib.import_module("verifiers.v1.configs.agent")
        config = dict(options)
        config["taskset"] = {"id": env_id, **config.get("taskset", {})}
        config_type = loaders.env_config_type(env_id, config.get("id", ""))
        defaults: dict[str, Any] = {"runtime": {"type": "subprocess"}}
        if loaders.default_harness_id(env_id) == "bash":
            defaults["harness"] = {"id": "null"}
        for name, field in config_type.model_fields.items():
            if isinstance(field.default, agents.AgentConfig):
                # The gateway finds the team's agent by the model's name.
                config[name] = {**defaults, "model": name, **config.get(name, {})}
        self.env = loaders.load_environment(loaders.resolve_env_config(config))
        self.task_type = type(self.env.taskset).task_type()

    def tasks(self, limit: int) -> dict[str, list[Any]]:
        """Return tasks; a taskset has no tasks that are for evaluation only.

        Args:
            limit: maximum number of tasks.
        """
        tasks = itertools.islice(self.env.taskset, limit)
        return {"train": [task.data.model_dump(mode="json") for task in tasks]}

    async def play(self, row: dict[str, Any], url: str, key_variable: str) -> dict[str, Any]:
        """Play an episode and return its reward and metrics.

        Args:
            row: row of the environment's data set.
            url: base URL of the models.
            key_variable: environment variable that holds the API key of the models.

        Raises:
            RuntimeError: the episode failed.
            ValueError: no trained agent took part, or the trained agents have different rewards.
        """
        v1 = importlib.import_module("verifiers.v1")
        clients = importlib.import_module("verifiers.v1.clients")
        data = self.task_type.data_type().model_validate(row)
        task = self.task_type(data, self.env.config.taskset.task)
        client = v1.EvalClientConfig(base_url=url, api_key_var=key_variable)
        context = clients.ModelContext(
            model=_DEFAULT_MODEL, client=client, sampling=v1.SamplingConfig()
        )
        async with self.env.serving():
            [slot] = self.env.slots(task)
            episode = await self.env.run_slot(slot, context)
        errors = list(episode.errors)
        for trace in episode.traces:
            errors += trace.errors
        if errors:
            raise RuntimeError(f"the episode failed: {errors[0].type}: {errors[0].message}")

        return team_result([trace for trace in episode.traces if trace.agent.trainable])


def team_result(traces: list[Any]) -> dict[str, Any]:
    """Return the reward and the metrics of a team's episode.

    Of metrics with the same name, that of the last agent is returned.

    Args:
        traces: traces of the trained agents.

    Raises:
        ValueError: there are no traces, or their rewards differ.
    """
    if not traces:
        raise ValueError(
            "verifiers: no trained agent took part in an episode; here the team's reward is that of "
            "the trained agents"
        )
    team_rewards = {trace.reward for trace in traces}
    if len(team_rewards) != 1:
        raise ValueError(
            "verifiers: the trained agents of an episode have different rewards "
            f"({', '.join(f'{trace.agent.name}: {trace.reward:g}' for trace in traces)}); "
            "here a team has one reward"
        )
    metrics: dict[str, Any] = {}
    for trace in traces:
        for name, reward in trace.rewards.items():
            if reward is not None:  # None: it was not scored
                metrics[name] = reward.score
        metrics |= trace.metrics
    return {"reward": team_rewards.pop(), "metrics": metrics}


def load_environment(env_id: str, options: Mapping[str, Any]) -> Any:
    """Return the environment of this id, as the installed version of `verifiers` loads it."""
    verifiers = importlib.import_module("verifiers")
    if hasattr(verifiers, "load_environment"):
        return LegacyEnvironment(env_id, options)
    return TasksetEnvironment(env_id, options)


class VerifiersHandler:
    """Handler that lists the tasks of one environment and plays their episodes."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Load the environment that the settings name."""
        # `verifiers` looks for uv, which may be installed beside this Python.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # The environment may be a module in the working directory, which Python does not search for
        # imports when it runs a script.
        sys.path.insert(0, str(Path.cwd()))
        self._env = load_environment(settings["id"], settings["args"])

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request: tasks, an episode's result, or an error."""
        # Runtimes of `verifiers` hide variables whose names contain API_KEY from agents' programs.
        key_variable = f"EPISODE_{request['number']}_API_KEY"
        try:
            if "limit" in request:
                return {"tasks": self._env.tasks(request["limit"])}
            os.environ[key_variable] = request["key"]
            result: dict[str, Any] = await self._env.play(
                request["row"], request["url"], key_variable
            )
            return result
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]}
        finally:
            os.environ.pop(key_variable, None)
