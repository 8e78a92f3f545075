"""Identity of a run: its models, its recipe (what decides what is learnt) and its inputs.

A checkpoint is only used for a run of the same identity.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from mcore_mas.config.run import RunConfig
from rollout.base.nested import dotted_items
from rollout.base.yaml_files import read_yaml
from rollout.models.architecture import read_architecture
from rollout.records.files import read_tasks, tasks_digest

TASKS_KEY = "data.tasks"  # key of the recipe: digest of the training tasks
CODE_KEY = "code"  # key of the inputs: digest of the sources of this project

# Number of keys that a description of differences names.
_MAX_NAMED_KEYS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of the run that checkpoints belong to.

    Attributes:
        run: name of the run.
        models: architecture as plain data, by policy and `<policy>.critic`.
        recipe: settings that decide the training, as JSON values by dotted key.
        inputs: digests of everything else that the training reads and runs, by name; {} if unknown.
        may_change: True if checkpoints of another recipe or other inputs can be used, for a fork.
    """

    run: str
    models: Mapping[str, Mapping[str, Any]]
    recipe: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    may_change: bool = False


def identity_of(config: RunConfig) -> Identity:
    """Return the identity of a run, without the digests of its inputs.

    The recipe includes a digest of the training tasks.

    Raises:
        ModelError: the config of a model cannot be read.
        RecordError: the tasks cannot be read.
    """
    recipe = recipe_of(config)
    tasks = config.folder / "tasks" / "train.parquet"
    if tasks.is_file():
        recipe[TASKS_KEY] = tasks_digest(read_tasks(tasks))
    return Identity(
        run=config.run,
        models=architectures_of(config),
        recipe=recipe,
        may_change=config.trainer.resume == "changed",
    )


def architectures_of(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the architecture of each trained policy and critic, with the policy's adapter.

    Raises:
        ModelError: the config of a model cannot be read.
    """
    models: dict[str, dict[str, Any]] = {}
    for name in config.trained:
        policy = config.policies[name]
        adapter = None
        if policy.lora is not None:
            adapter = {
                "rank": policy.lora.rank,
                "alpha": policy.lora.alpha,
                "targets": sorted(policy.lora.targets),
            }
        models[name] = {**asdict(read_architecture(Path(policy.model))), "lora": adapter}
        if policy.critic is not None:
            models[f"{name}.critic"] = models[name]
    return models


def recipe_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide what is learnt, as JSON values by dotted key.

    Settings with their default value are left out, so that a key which a later version adds is no
    change.
    """
    sections = _recipe_sections()
    values = config.model_dump(mode="json", include=set(sections), exclude_defaults=True)
    recipe: dict[str, Any] = {}
    for section, free_keys in sections.items():
        if section in values:
            recipe.update(dotted_items({section: values[section]}, free_keys))
    return recipe


def identity_digest(identity: Identity) -> str:
    """Return a digest of a run's identity, of 16 hexadecimal digits."""
    text = json.dumps(asdict(replace(identity, may_change=False)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def describe_differences(manifest: Mapping[str, Any], identity: Identity) -> str:
    """Describe the differences between a checkpoint's recipe and a run's, or "" if there are none.

    If the recipes are equal, the differences between the inputs are described. The text goes on after
    "trained with", so it names what the checkpoint had.

    Args:
        manifest: manifest of the checkpoint. A manifest without recipe or inputs, as earlier versions
            wrote it, counts as equal.
        identity: identity of the run.
    """
    differences = _describe_changes(
        manifest.get("recipe", {}), identity.recipe, _describe_setting_change
    )
    if not differences and identity.inputs:
        differences = _describe_changes(
            manifest.get("inputs", {}), identity.inputs, _describe_input_change
        )
    return differences


def _describe_changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    describe_change: Callable[[str, Mapping[str, Any], Mapping[str, Any]], str],
) -> str:
    if not before:
        return ""
    changes = [
        describe_change(key, before, now)
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    text = "; ".join(changes[:_MAX_NAMED_KEYS])
    if len(changes) > _MAX_NAMED_KEYS:
        text += f" (and {len(changes) - _MAX_NAMED_KEYS} more keys)"
    return text


def _describe_setting_change(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if key == TASKS_KEY:
        return "other training tasks than those of data.train"
    return f"{key}={_value_text(before, key)}, and the config says {_value_text(now, key)}"


def _describe_input_change(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    name = "mcore-mas" if key == CODE_KEY else key
    if key not in before:
        return f"no {name}"
    if key not in now:
        return f"{name}, which is missing now"
    return f"another version of {name}"


def _value_text(recipe: Mapping[str, Any], key: str) -> str:
    return json.dumps(recipe[key]) if key in recipe else "(default)"


@cache
def _recipe_sections() -> dict[str, frozenset[str]]:
    """Return the config's sections that decide what is learnt, each with its keys that do not."""
    sections = read_yaml(Path(__file__).with_name("recipe.yaml"))
    return {section: frozenset(free_keys) for section, free_keys in sections.items()}
