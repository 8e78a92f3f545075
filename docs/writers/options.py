"""Writer of docs/options.md and configs/schema/: the options of everything that is chosen by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from docs.writers import DOCS, rendered
from docs.writers.schema import SCHEMAS, editor_schemas
from docs.writers.type_words import type_words
from mcore_mas.config.credit import CorrectionConfig, LossConfig
from mcore_mas.config.estimators import AdvantageConfig, FilterConfig
from rollout.base.options import json_schema, option_descriptions, options_model
from rollout.config.agents import TOOL_REGISTRY
from rollout.config.environment import EnvConfig
from rollout.config.orchestra import OrchestraConfig
from rollout.config.reward import PENALTY_REGISTRY, RewardConfig
from rollout.tasks.generators import GENERATORS

OPTIONS = DOCS / "options.md"
# by name: the model of the options, and the callable that has them
Options = dict[str, tuple[type[BaseModel], Callable[..., Any]]]
_REGISTRIES = {
    "Orchestras": ("`orchestra.name`, `orchestra.options`", OrchestraConfig.registry),
    "Environments": ("`env.name`, `env.options`", EnvConfig.registry),
    "Tools": ("`agents.<name>.tools`, options by name", TOOL_REGISTRY),
    "Rewards": ("`reward.name`, `reward.options`", RewardConfig.registry),
    "Penalties": ("`reward.penalties`, options by name", PENALTY_REGISTRY),
    "Estimators": ("`advantage.name`, `advantage.options`", AdvantageConfig.registry),
    "Filters": ("`filter.name`, `filter.options`", FilterConfig.registry),
    "Losses": ("`loss.name`, `loss.options`", LossConfig.registry),
    "Corrections": ("`loss.correction.name`, `loss.correction.options`", CorrectionConfig.registry),
}


def pages() -> dict[Path, str]:
    """Return the text of docs/options.md and the editors' schemas, each by its file."""
    tables = []
    for title, (keys, registry) in _REGISTRIES.items():
        options = {
            name: (registry.model(name), registry.find(name)) for name in registry.registered
        }
        tables.append(_table(title, keys, options))

    task_options: Options = {}
    demonstration_options: Options = {}
    for name, generator in GENERATORS.items():
        task_options[name] = (generator.task_options, generator.options or generator.tasks)
        model = generator.demonstration_options
        if generator.demonstrations is not None and model is not None:
            demonstration_options[name] = (model, generator.demonstrations)
    tables.append(_table("Task generators", "`data.options`", task_options))
    tables.append(_table("Cold starts", "`cold_start.options`", demonstration_options))

    texts = {OPTIONS: rendered("options", tables=tables)}
    for name, schema in editor_schemas().items():
        text = json.dumps(schema, indent=1, allow_nan=False, sort_keys=True)
        texts[SCHEMAS / f"{name}.json"] = f"{text}\n"
    return texts


def _table(title: str, keys: str, options: Options) -> dict[str, Any]:
    return {"title": title, "text": f"{keys}.", "rows": list(_option_rows(options))}


def _option_rows(options: Options) -> Iterator[tuple[str, ...]]:
    """Yield the row of each option: name, option, type, default, and its line in the docstring."""
    for name, (model, function) in options.items():
        for cells in _cells_of(model, function):
            yield f"`{name}`", *cells
        if not model.model_fields:
            yield f"`{name}`", "none", "", "", ""


def _cells_of(
    model: type[BaseModel], function: Callable[..., Any], group: str = ""
) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each option, and of each key of a group of options."""
    schema = json_schema(model)
    descriptions = option_descriptions(function)
    for option, field in model.model_fields.items():
        if isinstance(field.annotation, type) and is_dataclass(field.annotation):
            yield from _cells_of(options_model(field.annotation), field.annotation, f"{option}.")
            continue
        part = schema["properties"][option]
        default = "required" if field.is_required() else f"`{yaml_default(part.get('default'))}`"
        takes = type_words(part, schema.get("$defs", {}))
        description = descriptions.get(option, "").replace("|", "/")
        yield f"`{group}{option}`", takes, default, description


def yaml_default(default: Any) -> str:
    """Return a default as YAML on one line."""
    text: str = yaml.safe_dump(default, default_flow_style=True, width=1000, sort_keys=False)
    return text.removesuffix("...\n").strip()
