"""Nested mappings, such as the sections of a config."""

from collections.abc import Iterator, Mapping, Set
from typing import Any


def dotted_items(
    values: Mapping[str, Any], without: Set[str] = frozenset(), prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting; keys in `without` are left out at every level."""
    for key, value in values.items():
        if key in without:
            continue
        if isinstance(value, Mapping) and value:
            yield from dotted_items(value, without, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with `changes` merged into it key by key; a value in `changes` wins."""
    result = dict(values)
    for key, change in changes.items():
        value = result.get(key)
        if isinstance(change, Mapping) and isinstance(value, Mapping):
            result[key] = merged(value, change)
        else:
            result[key] = change
    return result
