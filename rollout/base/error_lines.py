"""Formatter of pydantic's validation errors: one line with the key, pydantic's message and the value."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from rollout.base.hints import nearest_hint
from rollout.base.text import escape_line

_SHOWN_CHARS = 120  # length of a shown value or key
_SHOWN_KEYS = 10  # number of wrong keys that a line describes
# Keys of a config by the names that other trainers give to them.
KEY_SYNONYMS = {
    "batch_size": "tasks_per_step",
    "epochs": "passes",
    "k": "samples",
    "learning_rate": "lr",
    "max_completion_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_steps": "steps",
    "model_name_or_path": "model",
    "num_generations": "group_size",
    "num_steps": "steps",
    "num_train_epochs": "passes",
    "num_samples": "samples",
    "rollouts_per_prompt": "group_size",
    "train_batch_size": "tasks_per_step",
}

# Types of errors, as pydantic names them; "unknown_key" is the type that `error_below` makes.
_UNKNOWN_KEY_TYPES = ("extra_forbidden", "unexpected_keyword_argument")
# Types of errors whose lines do not quote the value.
_WITHOUT_VALUE = ("value_error", "missing", "unknown_key", *_UNKNOWN_KEY_TYPES)


def error_line(
    error: ValidationError, model: type[BaseModel], values: Any, *, prefix: str = ""
) -> str:
    """Return one line about the keys of nested `values` that a model refused, in the order of the model's fields.

    The line describes the first ten keys, and counts the others.

    Args:
        prefix: the dotted key of `values` in the whole config.
    """
    messages: dict[str, str] = {}  # by dotted key
    value_texts: dict[str, str] = {}
    other_keys: set[str] = set()
    for details in error.errors(include_url=False):
        keys = _keys(details, values)
        path = ".".join(map(str, [prefix, *keys] if prefix else keys))
        key = escape_line(_shortened(path))
        if key not in messages and len(messages) == _SHOWN_KEYS:
            other_keys.add(key)
            continue
        message = _message(details, model, keys)
        if key not in messages:
            messages[key] = message
        elif message not in messages[key]:  # the alternatives of a union
            messages[key] += f", or {message[:1].lower()}{message[1:]}"
        value_texts[key] = _value_text(details)

    parts = []
    for key, message in messages.items():
        label = f"{key}: " if key else ""  # an error of the whole model has no key
        parts.append(f"{label}{message}{value_texts[key]}")
    if other_keys:
        parts.append(f"and {len(other_keys)} other keys are wrong")
    return "; ".join(parts)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def error_below(
    error: ValidationError, model: type[BaseModel], location: tuple[int | str, ...]
) -> ValidationError:
    """Return the error of a model, with locations in the whole config.

    Args:
        error: error of the model of one part of the config.
        location: keys of that part in the config; they come before each location of the error.
    """
    moved_details = []
    unknown_keys = 0
    for details in error.errors(include_url=False):
        kind: str = details["type"]
        message = details["msg"]
        if kind in _UNKNOWN_KEY_TYPES:
            unknown_keys += 1
            if unknown_keys <= _SHOWN_KEYS:
                # The caller formats the error without this model, so the nearest keys are added here.
                kind = "unknown_key"
                message = _unknown_key_message(model, details["loc"])
        moved_details.append(
            InitErrorDetails(
                type=PydanticCustomError(kind, "{message}", {"message": message}),
                loc=(*location, *details["loc"]),
                input=details["input"],
            )
        )
    return ValidationError.from_exception_data(error.title, moved_details)


def _keys(details: ErrorDetails, values: Any) -> list[int | str]:
    """Return the part of a location that is in the values; pydantic also puts names of types there."""
    keys: list[int | str] = []
    for key in details["loc"]:
        if _has(values, key):
            values = values[key]
            keys.append(key)
        elif details["type"] == "missing" and key == details["loc"][-1]:
            keys.append(key)
    return keys


def _has(values: Any, key: int | str) -> bool:
    if isinstance(values, Mapping):
        return key in values
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    return is_list and isinstance(key, int) and key < len(values)


def _message(details: ErrorDetails, model: type[BaseModel], keys: Sequence[int | str]) -> str:
    if details["type"] in _UNKNOWN_KEY_TYPES:
        return _unknown_key_message(model, keys)
    return details["msg"].removeprefix("Value error, ")


def _unknown_key_message(model: type[BaseModel], keys: Sequence[int | str]) -> str:
    *parents, name = map(str, keys)
    known_keys = _keys_of_section_at(model, parents)
    synonym = KEY_SYNONYMS.get(name)
    if synonym in known_keys:
        return f"unknown key; write {'.'.join([*parents, synonym])}"
    nearest = nearest_hint(name, known_keys)
    if nearest:
        return f"unknown key{nearest}"
    keys_elsewhere = dotted_keys(name, model)
    if keys_elsewhere:
        return f"unknown key; write {' or '.join(keys_elsewhere)}"
    if known_keys:
        return f"unknown key; known here: {', '.join(known_keys)}"
    return "unknown key"


def _value_text(details: ErrorDetails) -> str:
    value = details["input"]
    if details["type"] in _WITHOUT_VALUE or isinstance(value, Mapping):
        return ""
    return f" (got {_shortened(json.dumps(value, default=str, ensure_ascii=False))})"


def _keys_of_section_at(model: type[BaseModel], keys: Sequence[str]) -> list[str]:
    """Return the keys of the section at `keys`; empty below a field that is not a section, such as `options`."""
    fields = _field_types(model)
    for key in keys:
        if key in fields:
            section = next(_sections_in(fields[key]), None)
            fields = {} if section is None else _field_types(section)
        # Any other key is an index, or the name of an agent or a policy.
    return list(fields)


def _field_types(section: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(section):
        return {field.name: field.type for field in dataclasses.fields(section)}
    return {field.alias or name: field.annotation for name, field in section.model_fields.items()}


def _sections_in(annotation: Any) -> Iterator[Any]:
    """Yield the models and dataclasses in a type."""
    # issubclass raises TypeError for an argument that is no class, such as a value in a Literal.
    is_class = isinstance(annotation, type)
    if is_class and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)


def dotted_keys(name: str, model: type[BaseModel]) -> list[str]:
    """Return the dotted keys called `name` in the sections of a model, such as `trainer.lr`.

    If there are none, return the keys for which `name` is a synonym (see `KEY_SYNONYMS`). In a
    mapping, such as that of the agents, `*` stands for the name of the entry.
    """
    return list(_keys_named(name, model)) or list(_keys_named(KEY_SYNONYMS.get(name, ""), model))


def section_keys(model: type[BaseModel]) -> set[str]:
    """Return the names of the keys in the sections of a model, such as `lr` and `steps`."""
    return {
        name
        for annotation in _field_types(model).values()
        for section in _sections_in(annotation)
        for name in _field_types(section)
    }


def _keys_named(name: str, model: type[BaseModel]) -> Iterator[str]:
    for key, annotation in _field_types(model).items():
        for section in _sections_in(annotation):
            if name in _field_types(section):
                yield f"{key}.*.{name}" if get_origin(annotation) is dict else f"{key}.{name}"
