"""Writer of docs/settings.md: every key of a run's config, from the models that check it."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from docs.writers import DOCS, rendered
from docs.writers.options import yaml_default
from docs.writers.type_words import type_words
from mcore_mas.config.run import RunConfig
from rollout.base.options import json_schema
from rollout.base.section import Section
from rollout.base.yaml_files import read_yaml
from rollout.config.data import TaskFile

SETTINGS = DOCS / "settings.md"
MEANINGS: dict[str, str] = read_yaml(Path(__file__).with_name("settings.yaml"))

Row = tuple[str, str, str, str]  # key, type and bounds, default, meaning


def pages() -> dict[Path, str]:
    """Return the text of the page: a table for each section of a run."""
    definitions = json_schema(RunConfig)["$defs"]
    tables = []
    top_level_keys = []
    for name, field in RunConfig.model_fields.items():
        section = _section_of(field.annotation)
        if section is None:
            top_level_keys.append(name)
            continue
        is_by_name = str(field.annotation).startswith("dict")
        heading = f"{name}.&lt;name&gt;" if is_by_name else name
        tables.append(
            {
                "title": heading,
                "summary": (inspect.getdoc(section) or "").partition("\n\n")[0],
                "rows": list(_rows(section, definitions, name)),
            }
        )
    run_rows = []
    for row in _rows(RunConfig, definitions, "run"):
        if row[0].strip("`") in top_level_keys:
            run_rows.append(row)
    run_table = {"title": "Top level", "summary": "The run itself.", "rows": run_rows}
    files_table = {
        "title": "Data files",
        "summary": "A file of `data.train`, `data.validation` or `data.test`: its path, or these keys.",
        "rows": list(_rows(TaskFile, definitions, "file")),
    }
    return {SETTINGS: rendered("settings", tables=[run_table, *tables, files_table])}


def field_comments(model: type[BaseModel]) -> dict[str, str]:
    """Return the comment above or beside each field of a model and of its base classes, by field name."""
    comments: dict[str, str] = {}
    for class_ in reversed(model.__mro__):
        is_model = issubclass(class_, BaseModel) and class_ is not BaseModel
        if not is_model:
            continue
        lines = textwrap.dedent(inspect.getsource(class_)).splitlines()
        (definition,) = ast.parse("\n".join(lines)).body
        assert isinstance(definition, ast.ClassDef)
        for node in definition.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                end = node.end_lineno or node.lineno
                comment = _comment_beside(lines[node.lineno - 1 : end])
                comment = comment or _comment_above(lines, node.lineno - 1)
                comments[node.target.id] = comment.replace("|", "/").replace("None:", "null:")
    return comments


def _comment_above(lines: list[str], index: int) -> str:
    comment: list[str] = []
    while index > 0 and lines[index - 1].strip().startswith("# "):
        index -= 1
        comment.insert(0, lines[index].strip().removeprefix("# "))
    return " ".join(comment)


def _comment_beside(lines: list[str]) -> str:
    tokens = tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return " ".join(comment.removeprefix("#").strip() for comment in comments)


def _section_of(annotation: Any) -> type[Section] | None:
    """Return the section that a field holds: directly, optionally, or as values of a dictionary."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for part in get_args(annotation):
        section = _section_of(part)
        if section is not None:
            return section
    return None


def _rows(
    model: type[BaseModel], definitions: Mapping[str, Any], section: str, prefix: str = ""
) -> Iterator[Row]:
    """Yield the row of each key of a section, followed by those of the sections below it."""
    schema = json_schema(model)
    definitions = {**definitions, **schema.get("$defs", {})}
    comments = field_comments(model)
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        meaning = comments[name] or MEANINGS.get(f"{section}.{key}", "")
        below = _section_of(field.annotation)
        holds_files = below is TaskFile
        if below is not None and not holds_files and model is not RunConfig:
            if not field.is_required() and field.get_default(call_default_factory=True) is None:
                yield f"`{key}`", "a section or null", "`null`", meaning
            yield from _rows(below, definitions, section, f"{key}.")
            continue
        takes = type_words(schema["properties"][name], definitions)
        if holds_files:
            takes = "a number of tasks, a data file or a list of data files"
        yield f"`{key}`", takes.replace("|", "/"), _default(field), meaning


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return f"`{yaml_default(to_jsonable_python(default))}`"
