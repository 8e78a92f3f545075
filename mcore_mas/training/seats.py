"""Seats of an evaluation: which model plays each agent, of this run, another one, a folder or an API (cross-play)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from mcore_mas.config.policy import PolicyConfig
from mcore_mas.config.run import STATES, ConfigError, RunConfig
from rollout.base.files import FolderError


def seated(config: RunConfig, state: str, seats: Mapping[str, Any]) -> RunConfig:
    """The run with each agent playing the model that an evaluation gives it, as a policy with that model's folder.

    Args:
        state: `base` or `trained`, of the agents without a seat; any other name is that of a cell, and means `trained`.
        seats: by agent `base`, `trained`, another run's name, for what trained its agent of the same name, or
            `run/agent`; or `{model: folder}`, or `{remote: ...}` with a remote model's settings.

    Raises:
        ConfigError: there is no such agent or run, or a seat is none of these.
        FolderError: a run that is named has not finished its training.
    """
    unknown = seats.keys() - config.agents.keys()
    if unknown:
        raise ConfigError(f"seat of '{min(unknown)}', who is not in the team; agents: {', '.join(config.agents)}")
    home = state if state in STATES else "trained"
    agents, policies = {}, {}
    for name, agent in config.agents.items():
        source = seats.get(name, home)
        own, policies_own = _policy(config, name, source)
        label = own if source == home else f"{_name(source, name)}.{own}"
        policies[label] = policies_own
        agents[name] = agent.model_copy(update={"policy": label})
    return config.model_copy(update={"agents": agents, "policies": policies})


def read_seats(state: str, given: Sequence[str]) -> dict[str, Any]:
    """Seats written as `agent=who`, of an evaluation called `state`.

    Raises:
        ConfigError: one is not of that form, a name is not that of a cell, or it has no seats.
    """
    seats = dict(seat.partition("=")[::2] for seat in given)
    if not all(seats.values()):
        raise ConfigError(f"--seat {' '.join(given)}: expected AGENT=WHO, for example verifier=base")
    if bool(seats) == (state in STATES):
        raise ConfigError(
            f"--state {state} with {len(seats)} seats; expected base or trained without, or another name with --seat"
        )
    try:
        return {agent: yaml.safe_load(who) for agent, who in seats.items()}
    except yaml.YAMLError as error:
        raise ConfigError(f"--seat: not YAML ({' '.join(str(error).split())})") from error


def _name(source: Any, agent: str) -> str:
    """What tells policies of other places from the run's own."""
    return source.partition("/")[0] if isinstance(source, str) else f"seat.{agent}"


def _policy(config: RunConfig, agent: str, source: Any) -> tuple[str, PolicyConfig]:
    """(Name, settings) of the policy that a seat stands for."""
    own = config.agents[agent].policy
    if source in STATES:
        return own, _trained(config, own) if source == "trained" else config.policies[own]
    if isinstance(source, str):
        run, _, other = source.partition("/")
        elsewhere = RunConfig.load(config.results / run / "config.yaml")
        if (other or agent) not in elsewhere.agents:
            raise ConfigError(f"seat of '{agent}': run '{run}' has no agent '{other or agent}'")
        policy = elsewhere.agents[other or agent].policy
        return policy, _trained(elsewhere, policy)
    try:
        return own, PolicyConfig.model_validate(source)
    except ValidationError as error:
        raise ConfigError(
            f"seat of '{agent}': {error.errors()[0]['msg'].removeprefix('Value error, ')}; expected base, trained, a "
            "run, run/agent, {model: folder} or {remote: ...}"
        ) from error


def _trained(config: RunConfig, policy: str) -> PolicyConfig:
    """A policy with the model that training wrote; as it is where it is frozen."""
    done = config.folder / "train" / "done.json"
    if not done.is_file():
        raise FolderError(f"{done}: no such file; train first (`mcore-mas train --config {config.folder}/config.yaml`)")
    folder = json.loads(done.read_text())["policies"].get(policy)
    own = config.policies[policy]
    return own if folder is None else own.model_copy(update={"model": folder})
