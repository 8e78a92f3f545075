"""Registry look-up: every choice that a config makes by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TypeVar

_T = TypeVar("_T")


class UnknownName(ValueError):
    """A name in a config is neither registered nor an import path."""


def lookup(kind: str, name: str, known: Mapping[str, _T]) -> _T:
    """Return `known[name]`, or the object at the import path `name` ("package.module:attribute").

    Raises:
        UnknownName: nothing of that name is registered and it is no import path that resolves.
    """
    if name in known:
        return known[name]
    module, separator, attribute = name.partition(":")
    if not separator:
        raise UnknownName(f"unknown {kind} '{name}'; known: {', '.join(sorted(known))} (or package.module:attribute)")
    try:
        found: _T = getattr(importlib.import_module(module), attribute)
        return found
    except (ImportError, AttributeError, TypeError, ValueError, SyntaxError, NameError) as error:
        raise UnknownName(f"{kind} '{name}' cannot be imported: {error}") from error
