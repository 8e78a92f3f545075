"""The page docs/api.md, made from the docstrings of the public names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import EnumType
from pathlib import Path
from types import FunctionType
from typing import Any

from docs.writers import DOCS
from mcore_mas import api

API_PAGE = DOCS / "api.md"
_HEAD = """# Python API

`import mcore_mas as mm` has these names, and no others are promised to stay. Made by `python -m docs.writers api` from
the docstrings. [quickstart.md](quickstart.md) uses them.
"""


def pages() -> dict[Path, str]:
    """The page."""
    entries = (part for name in sorted(api.__all__) for part in _entry(name, getattr(api, name)))
    return {API_PAGE: "\n".join([_HEAD, *entries])}


def public_methods(thing: type) -> dict[str, Any]:
    """What a class adds to its bases for everybody, by name: methods and properties."""
    kinds = (FunctionType, property, classmethod)
    own = {
        name: value
        for name, value in vars(thing).items()
        if not name.startswith("_") and isinstance(value, kinds)
    }
    return {
        name: value
        for name, value in own.items()
        if name not in getattr(thing, "__dataclass_fields__", {})
    }


def _entry(name: str, thing: Any) -> Iterator[str]:
    yield f"## `mm.{name}`\n\n```python\n{name}{_signature(thing)}\n```\n\n{_text(thing)}\n"
    for method, value in public_methods(thing).items() if isinstance(thing, type) else ():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        called = "" if isinstance(value, property) else _signature(function)
        yield f"### `{name}.{method}`\n\n```python\n{method}{called}\n```\n\n{_text(function)}\n"


def _signature(thing: Any) -> str:
    if isinstance(thing, EnumType):
        return "(value)"  # Python's versions do not agree on what else it takes
    written = re.sub(
        r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(thing))
    )  # annotations that are texts
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", written)


def _text(thing: Any) -> str:
    """A docstring as Markdown: what is below Args: and Raises: as a list."""
    lines = []
    for line in (inspect.getdoc(thing) or "").splitlines():
        head, _, rest = line.strip().partition(": ")
        if line in ("Args:", "Raises:"):
            lines.append(f"\n{line}\n")
        else:
            entry = re.match(r"    \S", line) and rest
            lines.append(f"- `{head}`: {rest}" if entry else line.strip())
    return "\n".join(lines).replace("\n\n\n", "\n\n").strip()
