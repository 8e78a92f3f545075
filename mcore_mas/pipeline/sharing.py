"""Settings that each stage of the pipeline depends on.

Runs with equal settings of a stage share its results: tasks and indexes, cold starts, and the
evaluations of untrained teams. After an edit of a config, only the stages that depend on the edited
settings run again.

The stages are "tasks", "index", "cold_start", "train" and "evaluate".
"""

import json
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from mcore_mas.runtime.input_digests import module_digests

Runs = Mapping[str, Mapping[str, Any]]  # resolved configs by run

# Keys of a config that tasks, passages and their index depend on, in addition to those keys of the
# retriever that are not in _SERVER_KEYS.
_TASK_KEYS = ("seed", "data")
# Keys of the retriever that change neither its passages nor the content of its index.
_SERVER_KEYS = ("urls", "key_file", "patience_s", "threads", "shards", "device", "python")
# Keys that a cold start depends on, in addition to the agents.
_COLD_START_KEYS = (
    "seed",
    "data",
    "env",
    "orchestra",
    "engine",
    "cold_start",
    "retriever",
    "cluster",
)
# Keys that an evaluation depends on, in addition to the agents and their policies before training.
# Snakemake compares the trained models itself, because they are input files of the evaluation.
_EVALUATION_KEYS = (
    "seed",
    "data",
    "env",
    "orchestra",
    "engine",
    "evaluation",
    "collection",
    "retriever",
    "cold_start",
)
# Keys of a policy that decide its replies before training.
_POLICY_KEYS = ("model", "remote", "chat_template", "chat_template_kwargs")


def stage_owners(runs: Runs, stage: str) -> dict[str, str]:
    """Return for each run the first run with the same settings of a stage.

    Args:
        stage: "tasks", "index", "cold_start", "train" or "evaluate".
    """
    return first_equal((run, _STAGES[stage](config)) for run, config in runs.items())


def first_equal(items: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return for each run the first run with an equal value.

    Args:
        items: runs and their values, which JSON can hold.
    """
    first_by_digest: dict[str, str] = {}
    first_by_run: dict[str, str] = {}
    for run, value in items:
        first_by_run[run] = first_by_digest.setdefault(json_digest(value), run)
    return first_by_run


def with_cold_start_of(config: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return a config whose policies start from the cold-started models of the run `owner`."""
    if owner == config["run"]:
        return dict(config)
    run_folder = f"{config['results']}/{config['run']}/"
    owner_folder = f"{config['results']}/{owner}/"
    policies = {
        name: {**policy, "model": policy["model"].replace(run_folder, owner_folder)}
        for name, policy in config["policies"].items()
    }
    return {**config, "cold_start": None, "policies": policies}


def settings_digest(config: Mapping[str, Any], stage: str) -> str:
    """Return a digest of the settings that a stage depends on, and of the user's modules in them."""
    settings = _STAGES[stage](config)
    modules = module_digests(settings)
    return json_digest([settings, modules] if modules else settings)[:16]


def json_digest(value: Any) -> str:
    """Return the SHA-256 of a value that JSON can hold; the order of keys does not matter."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _task_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    retriever = config.get("retriever") or {}
    corpus = {key: value for key, value in retriever.items() if key not in _SERVER_KEYS}
    return {**{key: config[key] for key in _TASK_KEYS}, "corpus": corpus}


def _index_settings(config: Mapping[str, Any]) -> list[Any]:
    """Return the settings of tasks and index, and those of the server.

    Runs that share an index also share the probe of its server, which depends on threads and device.
    """
    return [_task_settings(config), config.get("retriever")]


def _cold_start_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**{key: config[key] for key in _COLD_START_KEYS}, "agents": _untrained_agents(config)}


def _training_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings except tracking and the number of samples of an evaluation."""
    evaluation = {**config["evaluation"], "samples": None}
    return {**config, "tracking": None, "evaluation": evaluation}


def _evaluation_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that an evaluation depends on, in addition to the trained models."""
    agents = {}
    for name, agent in _untrained_agents(config).items():
        policy = config["policies"][agent["policy"]]
        agents[name] = {**agent, "policy": _untrained_policy(policy)}
    return {**{key: config[key] for key in _EVALUATION_KEYS}, "agents": agents}


def _untrained_policy(policy: Mapping[str, Any]) -> list[Any]:
    """Return the settings that decide the replies of an untrained policy."""
    adapter = (policy["lora"] or {}).get("adapter")
    return [*(policy[key] for key in _POLICY_KEYS), adapter, policy["overrides"]["engine"]]


def _untrained_agents(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the agents without the settings that only training uses."""
    return {
        name: {**agent, "advantage": None, "loss_weight": 1}
        for name, agent in config["agents"].items()
    }


_STAGES: Mapping[str, Callable[[Mapping[str, Any]], Any]] = MappingProxyType(
    {
        "tasks": _task_settings,
        "index": _index_settings,
        "cold_start": _cold_start_settings,
        "train": _training_settings,
        "evaluate": _evaluation_settings,
    }
)
