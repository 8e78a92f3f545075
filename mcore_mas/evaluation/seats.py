"""Seats of an evaluation: which model plays each agent of a team (cross-play)."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import ValidationError

from mcore_mas.config.policy import PolicyConfig
from mcore_mas.config.run import STATES, ConfigError, RunConfig
from rollout.base.digests import check_tree
from rollout.base.hints import nearest_hint
from rollout.base.json_files import read_record
from rollout.base.ownership import FolderError

_STATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class _SeatedPolicy:
    """Policy that plays an agent in an evaluation.

    Attributes:
        name: name of the policy in the config of the evaluation. It is the name of the agent's own policy
            if the agent has the default seat. Otherwise it has a prefix, such as "base." or "RUN.", because
            other agents of the same policy may have another model.
        config: settings of the policy, with the model of the seat.
    """

    name: str
    config: PolicyConfig


def config_with_seats(
    config: RunConfig, state: str, seats: Mapping[str, Any] = MappingProxyType({})
) -> RunConfig:
    """Return the run's config with the policies of an evaluation: each agent has the model of its seat.

    Args:
        config: config of the run.
        state: "base" or "trained": the model of the agents without a seat. Any other name of an
            evaluation counts as "trained", and is valid only with seats.
        seats: seat of each agent, which is one of

            - "base" or "trained";
            - the name of another run: the trained model of its agent of the same name;
            - "run/agent": the trained model of this agent of that run;
            - {"model": folder}, or {"remote": {...}} with the settings of a remote model.

    Raises:
        ConfigError: there is no such agent or run, a seat is none of these, or `state` is
            neither "base" nor "trained" and there are no seats.
        FolderError: a run whose trained model plays has not finished its training, or a file of the
            model has changed since.
    """
    if not seats and state not in STATES:
        raise ConfigError(
            f"state '{state}' of {config.run}: expected {' or '.join(STATES)}"
            f"{nearest_hint(state, STATES)}"
        )
    _check_seated_agents(seats, config.agents)

    default = state if state in STATES else "trained"
    agents = {}
    policies = {}
    for name, agent in config.agents.items():
        seat = seats.get(name, default)
        seated_policy = _seated_policy(config, name, seat, default)
        policies[seated_policy.name] = seated_policy.config
        agents[name] = agent.model_copy(update={"policy": seated_policy.name})
    return config.model_copy(update={"agents": agents, "policies": policies})


def player_names(
    config: RunConfig, state: str, seats: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, str]:
    """Return, for each agent, the name by which cross-play knows the model that plays the agent.

    A trained model has the same name in every evaluation in which it plays the same agent. The name is
    RUN for the model that a run has trained for this agent, RUN/AGENT for that of another agent,
    RUN@base for the model before training, and else the folder or the remote model.

    Args:
        config: config of the run, before `config_with_seats`.
        state, seats: as in `config_with_seats`, which has checked them.
    """
    default = state if state in STATES else "trained"
    names = {}
    for agent in config.agents:
        seat = seats.get(agent, default)
        if seat == "trained":
            names[agent] = config.run
        elif seat == "base":
            names[agent] = f"{config.run}@base"
        elif isinstance(seat, str):
            names[agent] = seat.removesuffix(f"/{agent}")
        else:
            names[agent] = str(seat.get("model") or seat["remote"].get("model", "remote"))
    return names


def _check_seated_agents(seated_agents: Iterable[str], agents: Collection[str]) -> None:
    """Raise ConfigError if an agent that has a seat is not in the team."""
    for agent in sorted(seated_agents):
        if agent not in agents:
            raise ConfigError(
                f"seat of '{agent}', who is not in the team; agents: {', '.join(agents)}"
                f"{nearest_hint(agent, agents)}"
            )


def parse_seats(state: str, texts: Sequence[str], agents: Collection[str]) -> dict[str, Any]:
    """Parse the seats of a command line, each written as AGENT=WHO.

    Args:
        state: name of the evaluation.
        texts: seats, whose WHO is YAML.
        agents: agents of the team.

    Raises:
        ConfigError: a seat is not of this form; an agent has several seats, or is not in the team; `state` is
            "base" or "trained" although there are seats, or another name although there are none; or `state`
            cannot be the name of a file.
    """
    seats: dict[str, str] = {}
    for text in texts:
        agent, _, who = text.partition("=")
        if agent in seats:
            raise ConfigError(
                f"--seat {' '.join(texts)}: '{agent}' has several seats; expected one for each agent"
            )
        seats[agent] = who
    if not all(seats.values()):
        raise ConfigError(
            f"--seat {' '.join(texts)}: expected AGENT=WHO, for example verifier=base"
        )
    _check_seated_agents(seats, agents)
    if seats and state in STATES:
        raise ConfigError(
            f"--seat {' '.join(texts)}: with --seat, also give --state NAME, a name for the evaluation other "
            f"than {' and '.join(STATES)}"
        )
    if not seats and state not in STATES:
        raise ConfigError(
            f"--state {state}: expected {' or '.join(STATES)} without --seat{nearest_hint(state, STATES)}"
        )
    if not _STATE_NAME.fullmatch(state):
        raise ConfigError(
            f"--state {state[:120]}: expected at most 100 letters, digits, _, . and -, the first a "
            "letter or digit; files are named after it"
        )
    try:
        return {agent: yaml.safe_load(who) for agent, who in seats.items()}
    except yaml.YAMLError as error:
        raise ConfigError(
            f"--seat {' '.join(texts)}: WHO is not YAML ({' '.join(str(error).split())})"
        ) from error


def _seated_policy(config: RunConfig, agent: str, seat: Any, default: str) -> _SeatedPolicy:
    """Return the policy that plays an agent.

    Args:
        config: config of the run.
        agent: name of the agent.
        seat: seat of the agent, as in `config_with_seats`.
        default: seat of all agents that have none.
    """
    policy = config.agents[agent].policy
    if seat in STATES:
        name = policy if seat == default else f"{seat}.{policy}"
        if seat == "trained":
            return _SeatedPolicy(name, _trained_policy(config, policy))
        return _SeatedPolicy(name, config.policies[policy])

    if isinstance(seat, str):
        run, _, other_agent = seat.partition("/")
        other_agent = other_agent or agent
        other = RunConfig.load(config.results / run / "config.yaml")
        if other_agent not in other.agents:
            raise ConfigError(f"seat of '{agent}': run '{run}' has no agent '{other_agent}'")
        other_policy = other.agents[other_agent].policy
        return _SeatedPolicy(f"{run}.{other_policy}", _trained_policy(other, other_policy))

    try:
        policy_config = PolicyConfig.model_validate(seat)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"seat of '{agent}': {message}; expected base, trained, a run, run/agent, "
            "{model: folder} or {remote: ...}"
        ) from error
    return _SeatedPolicy(f"seat.{agent}.{policy}", policy_config)


def _trained_policy(config: RunConfig, policy: str) -> PolicyConfig:
    """Return a policy with the model that training wrote; a frozen policy is unchanged.

    Raises:
        FolderError: the training has not finished, or a file of the model has changed since.
    """
    done_file = config.folder / "train" / "done.json"
    if not done_file.is_file():
        raise FolderError(
            f"{done_file}: no such file; train first (`mcore-mas train {config.folder}`, or "
            "`run.train()` in Python)"
        )
    digests = read_record(done_file, "policies").get("sha256", {})
    if policy not in digests:
        return config.policies[policy]
    # The path is not read from the record, because the run may have been moved.
    model = done_file.parent / "models" / policy
    check_tree(model, digests[policy])
    return config.policies[policy].model_copy(update={"model": str(model)})
