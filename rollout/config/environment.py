"""Section of a config about the environment that the team acts in."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

from pydantic import Field, model_validator

from rollout.base.lookup import lookup
from rollout.base.options import Registry
from rollout.base.signatures import check_methods
from rollout.config.agents import AgentConfig
from rollout.config.choice import Choice
from rollout.environments import ENVS, SUPPLIED
from rollout.environments.protocol import Env
from rollout.environments.worker_env import WorkerEnv
from rollout.records.trajectory import Task

# Methods of an environment with their parameters.
_METHODS = {"reset": ("task",), "async step": ("action",)}
_SEARCH_TOOLS = ("search", "passages")
# Environments that start processes themselves: why `env.workers` is refused, and the option to set.
_WITH_OWN_PROCESSES = {
    "openenv": "its servers are processes; set env.options.servers",
    "verifiers": "it plays in processes already; set env.options.workers",
}


class EnvConfig(Choice):
    """The environment of a team."""

    registry = Registry(kind="env", registered=ENVS, takes=("task",), supplied=SUPPLIED)

    # Number of worker processes that play the environment, for one whose steps block or need a processor;
    # 0: the run's own process plays it.
    workers: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if not self.workers:
            return self
        reason = self._reason_against_workers()
        if reason:
            raise ValueError(f"env '{self.name}' cannot be played in workers: {reason}")
        return self

    def _reason_against_workers(self) -> str:
        """Return why worker processes cannot play this environment, and what to do; "" if they can."""
        if self.name in _WITH_OWN_PROCESSES:
            return _WITH_OWN_PROCESSES[self.name]
        if self.name.startswith("here:"):
            return "it is an object of a script or notebook; define it in a module and give its import path"
        if self.needs:
            needed = " and ".join(sorted(self.needs))
            return f"it needs the {needed} of the run's process; leave env.workers out"
        factory = self.registry.find(self.name)
        parameters = inspect.signature(factory.open).parameters if hasattr(factory, "open") else ()
        if "calls" in parameters:  # it is given the trajectory's `CallRecord`
            return "it records its calls in the run's process; leave env.workers out"
        return ""

    @model_validator(mode="after")
    def _check_methods(self) -> Self:
        factory = self.registry.find(self.name)
        # The environments that a function returns are checked by `check_task`.
        if isinstance(factory, type):
            check_methods(f"env '{self.name}'", factory, _METHODS)
        return self

    @property
    def needs(self) -> frozenset[str]:
        """Resources that a run must supply, such as "retriever"."""
        return self.registry.needs(self.name)

    @property
    def names_states(self) -> bool:
        """True if the environment names its states, so that trajectories may have states in common."""
        return hasattr(lookup("env", self.name, ENVS), "state")

    def check_tools(self, team: Mapping[str, AgentConfig]) -> None:
        """Refuse the tools that query env `search` if another shipped environment is chosen."""
        if self.name not in ENVS or self.name == "search":
            return
        for name, agent in team.items():
            for tool in _SEARCH_TOOLS:
                if tool in agent.tools:
                    raise ValueError(
                        f"agent '{name}': tool '{tool}' asks env 'search', and this is env '{self.name}'; "
                        "leave the tool out, or choose env.name=search"
                    )

    def check_task(self, task: Task) -> None:
        """Check that the environment can be created for a task, and can reset to it.

        An environment that needs resources of a run is not created, and so not checked. One with
        `open` is created and not reset.

        Raises:
            ValueError: the environment raises, or lacks a method.
        """
        if self.needs:
            return
        env = self._attempt("be made of", self.call, task)
        check_methods(f"env '{self.name}'", env, _METHODS)
        if not hasattr(env, "open"):  # `open` acquires what `reset` needs
            self._attempt("begin", env.reset, task)

    def _attempt(self, action: str, call: Callable[[Task], Any], task: Task) -> Any:
        try:
            return call(task)
        except Exception as error:
            message = f"{type(error).__name__}: {error}".partition("\n")[0]
            hint = ""
            if task.env != self.name and self.name in ENVS:
                hint = f"; the task is of env '{task.env}'"
            raise ValueError(
                f"env '{self.name}' cannot {action} task '{task.id}' ({message}){hint}"
            ) from error


def build_env(config: EnvConfig, **resources: Any) -> Callable[[Task], Env]:
    """Return a function that makes an environment of a task, with resources such as a retriever."""
    if config.workers:
        return partial(WorkerEnv, name=config.name, options=config.options, workers=config.workers)
    return partial(config.call, **resources)
