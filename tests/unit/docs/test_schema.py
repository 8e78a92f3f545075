"""Schemas tell editors what a config may say: made from the models, and the shipped configs keep to them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from docs.writers.schema import editor_schemas
from mcore_mas.config.experiments import CONFIGS

FILES = sorted(CONFIGS.rglob("*.yaml"))
MODELINE = "# yaml-language-server: $schema="


@cache
def validator(name: str) -> Any:
    schemas = {
        file.name: json.loads(file.read_text()) for file in (CONFIGS / "schema").glob("*.json")
    }
    resources = [
        (file, Resource.from_contents(schema, default_specification=_DRAFT))
        for file, schema in schemas.items()
    ]
    return Draft202012Validator(schemas[name], registry=Registry().with_resources(resources))


_DRAFT: Any = Resource.from_contents(
    {"$schema": "https://json-schema.org/draft/2020-12/schema"}
)._specification


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_a_shipped_config_keeps_to_the_schema_that_it_names(file: Path) -> None:
    first, text = file.read_text(encoding="utf-8").split("\n", 1)
    schema = (file.parent / first.removeprefix(MODELINE)).resolve()
    assert schema.parent == CONFIGS / "schema"
    assert [
        error.message for error in validator(schema.name).iter_errors(yaml.safe_load(text))
    ] == []


def test_the_committed_schemas_are_made_from_the_models() -> None:
    committed = {
        file.stem: json.loads(file.read_text()) for file in (CONFIGS / "schema").glob("*.json")
    }
    assert committed == json.loads(json.dumps(editor_schemas())), (
        "run python -m docs.writers options"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run", "trainer: {steps: many}"),
        ("run", "trainer: {stesp: 3}"),
        ("run", "orchestra: {name: debate, options: {rounds: 0}}"),
        ("run", "orchestra: {name: debat}"),
        ("run", "orchestra: {name: program, options: {rules: {at_once: 0}}}"),
        ("run", "advantage: {name: gigpo, options: {step: {gama: 1.0}}}"),
        ("run", "env: {name: plan_path, options: {rewards: {goal: lots}}}"),
        ("run", "reward: {name: shares, penalties: {invalid: {coef: high}}}"),
        ("run", "data: {generator: plan_path, options: {size: tiny}}"),
        ("run", "{data: {generator: plan_path}, cold_start: {options: {slips: often}}}"),
        ("run", "settings: {large: {policy_defaults: {tp: two}}}"),
        ("loss", "{name: ppo_clip, options: {clip_high: banana}}"),
        ("loss", "{name: ppo_clip, correction: {name: tis, options: {level: reply}}}"),
        ("engine", "slots: many"),
    ],
)
def test_the_schemas_reject_wrong_values(name: str, text: str) -> None:
    assert not validator(f"{name}.json").is_valid(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text",
    [
        "orchestra: {name: 'my_pkg.teams:relay', options: {anything: 1}}",
        "trainer: {steps: '${seed}'}",
        "data: {train: data/x.parquet, test: [{path: y.json, limit: 3}, z.csv]}",
    ],
)
def test_own_code_and_interpolations_are_let_be(text: str) -> None:
    assert validator("run.json").is_valid(yaml.safe_load(text))
