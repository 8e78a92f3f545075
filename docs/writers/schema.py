"""JSON schemas of configs for editors, made from the models that check configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_mas.config.credit import CorrectionConfig, LossConfig
from mcore_mas.config.estimators import AdvantageConfig, FilterConfig
from mcore_mas.config.experiments import CONFIGS
from mcore_mas.config.run import RunConfig
from rollout.base.options import json_schema
from rollout.config.environment import EnvConfig
from rollout.config.orchestra import OrchestraConfig
from rollout.config.reward import PENALTY_REGISTRY, RewardConfig
from rollout.tasks.generators import GENERATORS

EditorSchema = dict[str, Any]

SCHEMAS = CONFIGS / "schema"
# the section that a config of a group sets; configs of other groups may set any section
SECTIONS = {
    "advantage": "AdvantageConfig",
    "cluster": "ClusterConfig",
    "coach": "CoachConfig",
    "engine": "EngineConfig",
    "loss": "LossConfig",
    "tracking": "TrackingConfig",
}
_CHOICES = (
    EnvConfig,
    OrchestraConfig,
    RewardConfig,
    AdvantageConfig,
    FilterConfig,
    LossConfig,
    CorrectionConfig,
)
# A text that OmegaConf replaces: an interpolation, or ??? for a missing value.
_INTERPOLATED = {
    "type": "string",
    "pattern": r"^(\$\{.*\}|\?\?\?)$",
}


def editor_schemas() -> dict[str, EditorSchema]:
    """Return the schemas by file stem: "run", and one for each config group that sets one section."""
    groups = {group: {"$ref": f"run.json#/$defs/{section}"} for group, section in SECTIONS.items()}
    return {"run": run_schema(), **groups}


def run_schema() -> EditorSchema:
    """Return the schema of files that set any part of a run.

    No key is required, and Hydra's keys are allowed.
    """
    schema = _partial(json_schema(RunConfig))
    sections = schema["$defs"]
    for choice in _CHOICES:
        options = {
            name: _hoisted(sections, json_schema(choice.registry.model(name)))
            for name in choice.registry.registered
        }
        _choose(sections[choice.__name__], "name", options, importable=choice.registry.importable)
    penalties = {
        name: _hoisted(sections, json_schema(PENALTY_REGISTRY.model(name)))
        for name in PENALTY_REGISTRY.registered
    }
    sections["RewardConfig"]["properties"]["penalties"] = {
        "type": "object",
        "properties": penalties,
    }
    tasks = {
        name: _hoisted(sections, json_schema(generator.task_options))
        for name, generator in GENERATORS.items()
    }
    _choose(sections["DataConfig"], "generator", tasks, importable=False)
    file = {"anyOf": [{"$ref": "#/$defs/TaskFile"}, {"type": "string"}]}
    for split in ("train", "validation", "test"):
        sections["DataConfig"]["properties"][split] = {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                *file["anyOf"],
                {"type": "array", "items": file},
            ]
        }
    schema["allOf"] = [*_cold_starts(sections)]
    schema["properties"] |= {
        "defaults": {"type": "array"},
        "sharing": {"anyOf": [{"enum": ["shared", "separate", "partly"]}, {"type": "object"}]},
        "partly": {"type": "object", "additionalProperties": {"type": "string"}},
        "policy_defaults": {"$ref": "#/$defs/PolicyConfig"},
        "grid": {"type": "object", "additionalProperties": {"$ref": "#/$defs/Piece"}},
        "settings": {"type": "object", "additionalProperties": {"$ref": "#/$defs/Piece"}},
    }
    piece = [
        {"type": ["string", "null"]},
        {"type": "array", "items": {"$ref": "#/$defs/Piece"}},
        {"$ref": "#"},
    ]
    sections["Piece"] = {"anyOf": piece}
    for section in SECTIONS.values():
        sections[section]["properties"]["defaults"] = {"type": "array"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mcore-mas run",
        **schema,
    }


def _cold_starts(sections: EditorSchema) -> Iterator[EditorSchema]:
    """Yield a condition for each generator that gives a cold start the generator's options."""
    for name, generator in GENERATORS.items():
        if generator.demonstration_options is not None:
            options = _hoisted(sections, json_schema(generator.demonstration_options))
            then = {"properties": {"cold_start": {"properties": {"options": options}}}}
            yield {"if": _where("data", _where("generator", {"const": name})), "then": then}


def _choose(
    section: EditorSchema, key: str, options: Mapping[str, EditorSchema], *, importable: bool
) -> None:
    """Make the schema of a section's options depend on the name under `key`.

    Args:
        section: schema of the section, which is changed.
        key: key of the name.
        options: schema of the options of each name.
        importable: True if an import path may replace the name.
    """
    names: list[str | None] = [*sorted(options)]
    if key == "generator":
        names.append(None)  # a run whose tasks come from files has no generator
    name_schema: EditorSchema = {"enum": names}
    if importable:
        name_schema = {"anyOf": [name_schema, {"type": "string", "pattern": ":"}]}
    section["properties"][key] = name_schema
    section["allOf"] = [
        {"if": _where(key, {"const": name}), "then": {"properties": {"options": schema}}}
        for name, schema in options.items()
    ]


def _where(key: str, schema: EditorSchema) -> EditorSchema:
    return {"properties": {key: schema}, "required": [key]}


def _hoisted(sections: EditorSchema, schema: EditorSchema) -> EditorSchema:
    """Return the schema of options, after moving its definitions into `sections`."""
    partial: EditorSchema = _partial(schema)
    sections |= partial.pop("$defs", {})
    return partial


def _partial(schema: Any) -> Any:
    """Return the schema without required keys and titles, with interpolations allowed for any value."""
    if isinstance(schema, list):
        return [_partial(part) for part in schema]
    if not isinstance(schema, dict):
        return None if isinstance(schema, float) and schema == float("inf") else schema
    result = {
        key: _partial(part)
        for key, part in schema.items()
        if key not in ("required", "title", "properties")
    }
    if "properties" in schema:
        result["properties"] = {
            name: {"anyOf": [_partial(part), _INTERPOLATED]}
            for name, part in schema["properties"].items()
        }
    return result
