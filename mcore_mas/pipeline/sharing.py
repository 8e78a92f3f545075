"""What a stage of the pipeline depends on in a config.

Runs that agree in it share what the stage makes: tasks and indexes, cold starts, the scores of untrained teams. And an
edit of a config runs those stages again that depend on what was edited.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Any

Runs = Mapping[str, Mapping[str, Any]]  # resolved configs by run

# what tasks, passages and their index depend on; of the retriever, its corpus
_TASKS = ("seed", "data")
# what a cold start depends on
_COLD = ("seed", "data", "env", "orchestra", "agents", "engine", "cold_start", "retriever", "cluster")
# what the score of an untrained team depends on besides its agents and the models that they play
_PLAYED = ("seed", "data", "env", "orchestra", "engine", "evaluation", "collection", "retriever", "cold_start")
_VOICE = ("model", "remote", "chat_template", "chat_template_kwargs")
_NOT_INDEXED = ("urls", "members", "key_file", "balance", "patience_s", "threads", "shards", "backend", "device")


def same_tasks(runs: Runs) -> dict[str, str]:
    """run -> the first run with the same tasks, and the same passages and index if it searches."""
    return _first((run, [_of_tasks(config), config.get("retriever")]) for run, config in runs.items())


def same_starts(runs: Runs) -> dict[str, str]:
    """run -> the first run with the same cold start; none for those that bring their models."""
    return _first((run, _of_start(config)) for run, config in runs.items() if config.get("cold_start") is not None)


def same_bases(runs: Runs) -> dict[str, str]:
    """run -> the first run whose untrained team is the same, on the same tasks."""
    return _first((run, _of_score(config)) for run, config in runs.items())


def started_from(config: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The config with `owner`'s cold-started model in place of its own."""
    if owner == config["run"]:
        return dict(config)
    mine, theirs = f"{config['results']}/{config['run']}/", f"{config['results']}/{owner}/"
    policies = {
        name: {**policy, "model": policy["model"].replace(mine, theirs)} for name, policy in config["policies"].items()
    }
    return {**config, "cold_start": None, "policies": policies}


def settings_digest(config: Mapping[str, Any], stage: str) -> str:
    """A number that changes with the settings that a stage depends on: tasks, start, training or score."""
    return sha256(_text(_STAGES[stage](config)).encode()).hexdigest()[:16]


def _of_tasks(config: Mapping[str, Any]) -> dict[str, Any]:
    corpus = {key: value for key, value in (config.get("retriever") or {}).items() if key not in _NOT_INDEXED}
    return {**{key: config[key] for key in _TASKS}, "corpus": corpus}


def _of_start(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**{key: config[key] for key in _COLD}, "agents": _unrewarded(config)}


def _of_training(config: Mapping[str, Any]) -> dict[str, Any]:
    """All but where it is watched, and how often a trained team answers."""
    return {**config, "tracking": None, "evaluation": {**config["evaluation"], "samples": None}}


def _of_score(config: Mapping[str, Any]) -> dict[str, Any]:
    agents = {
        name: {**agent, "policy": _voice(config["policies"][agent["policy"]])}
        for name, agent in _unrewarded(config).items()
    }
    return {**{key: config[key] for key in _PLAYED}, "agents": agents}


_STAGES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = MappingProxyType(
    {"tasks": _of_tasks, "start": _of_start, "training": _of_training, "score": _of_score}
)


def _voice(policy: Mapping[str, Any]) -> list[Any]:
    """What an untrained policy answers with."""
    adapter = (policy["lora"] or {}).get("adapter")
    return [*(policy[key] for key in _VOICE), adapter, policy["own"]["engine"]]


def _unrewarded(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The agents without what only training asks of them."""
    return {name: {**agent, "advantage": None, "loss_weight": 1} for name, agent in config["agents"].items()}


def _first(keys: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Each run with the first run of an equal key."""
    first: dict[str, str] = {}
    return {run: first.setdefault(_text(key), run) for run, key in keys}


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True)
