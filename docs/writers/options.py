"""The page docs/options.md and the schemas of editors in configs/schema/: what every option takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from docs.writers import DOCS, rendered
from docs.writers.schema import SCHEMAS, editor_schemas
from docs.writers.type_words import type_words
from mcore_mas.config.credit import AdvantageConfig, CorrectionConfig, FilterConfig, LossConfig
from rollout.base.options import json_schema, option_descriptions, options_model
from rollout.config.agents import TOOL_REGISTRY
from rollout.config.environment import EnvConfig
from rollout.config.orchestra import OrchestraConfig
from rollout.config.reward import PENALTY_REGISTRY, RewardConfig
from rollout.tasks import GENERATORS

OPTIONS = DOCS / "options.md"
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
    """The page, a table for each registry and a row for each option; and the schemas by their files."""
    made = {
        title: (
            place,
            {name: (registry.model(name), registry.find(name)) for name in registry.registered},
        )
        for title, (place, registry) in _REGISTRIES.items()
    }
    tasks = {
        name: (maker.task_options, maker.options or maker.tasks)
        for name, maker in GENERATORS.items()
    }
    starts = {
        name: (maker.demonstration_options, maker.demonstrations)
        for name, maker in GENERATORS.items()
        if maker.demonstrations is not None and maker.demonstration_options is not None
    }
    made |= {
        "Task generators": ("`data.options`", tasks),
        "Cold starts": ("`cold_start.options`", starts),
    }
    tables = [
        {"title": title, "text": f"{place}.", "rows": list(_option_rows(options))}
        for title, (place, options) in made.items()
    ]
    schemas = {
        SCHEMAS / f"{name}.json": json.dumps(schema, indent=1, allow_nan=False, sort_keys=True)
        + "\n"
        for name, schema in editor_schemas().items()
    }
    return {OPTIONS: rendered("options", tables=tables), **schemas}


def _option_rows(
    options: Mapping[str, tuple[type[BaseModel], Callable[..., Any]]],
) -> Iterator[tuple[str, ...]]:
    """Cells of each name's options: what it takes, its default, and what the docstring says of it."""
    for name, (model, function) in options.items():
        yield from ((f"`{name}`", *cells) for cells in _cells_of(model, function))
        if not model.model_fields:
            yield f"`{name}`", "none", "", "", ""


def _cells_of(
    model: type[BaseModel], function: Callable[..., Any], group: str = ""
) -> Iterator[tuple[str, ...]]:
    """Cells of each option, and of each key of a group of options."""
    schema, said = json_schema(model), option_descriptions(function)
    for option, field in model.model_fields.items():
        if isinstance(field.annotation, type) and is_dataclass(field.annotation):
            yield from _cells_of(options_model(field.annotation), field.annotation, f"{option}.")
            continue
        part = schema["properties"][option]
        default = "required" if field.is_required() else f"`{yaml_default(part.get('default'))}`"
        takes = type_words(part, schema.get("$defs", {}))
        yield f"`{group}{option}`", takes, default, said.get(option, "").replace("|", "/")


def yaml_default(default: Any) -> str:
    """Return a default as YAML on one line."""
    text: str = yaml.safe_dump(default, default_flow_style=True, width=1000, sort_keys=False)
    return text.removesuffix("...\n").strip()
