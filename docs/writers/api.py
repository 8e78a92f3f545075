"""Writer of docs/api.md, from the docstrings of the public names."""

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

`import mcore_mas as mm` has these names, and no others are promised to stay. This page is made from
their docstrings by `python -m docs.writers api`. See [quickstart.md](quickstart.md) for examples.
"""


def pages() -> dict[Path, str]:
    """Return the text of the page."""
    parts = [_HEAD]
    for name in sorted(api.__all__):
        parts.extend(_entry(name, getattr(api, name)))
    return {API_PAGE: "\n".join(parts)}


def public_methods(class_: type) -> dict[str, Any]:
    """Return the public methods and properties that a class defines itself, by name."""
    methods = {}
    for name, value in vars(class_).items():
        is_field = name in getattr(class_, "__dataclass_fields__", {})
        is_method = isinstance(value, FunctionType | property | classmethod)
        if is_method and not is_field and not name.startswith("_"):
            methods[name] = value
    return methods


def _entry(name: str, documented: Any) -> Iterator[str]:
    """Yield the sections of a public name and of its methods."""
    yield _section(f"## `mm.{name}`", f"{name}{_signature(documented)}", documented)
    if not isinstance(documented, type):
        return
    for method, value in public_methods(documented).items():
        if isinstance(value, property):
            yield _section(f"### `{name}.{method}`", method, value.fget)
        else:
            function = getattr(value, "__func__", value)  # of a class method
            yield _section(f"### `{name}.{method}`", f"{method}{_signature(function)}", function)


def _section(heading: str, call: str, documented: Any) -> str:
    return f"{heading}\n\n```python\n{call}\n```\n\n{_docstring_as_markdown(documented)}\n"


def _signature(documented: Any) -> str:
    if isinstance(documented, EnumType):
        return "(value)"  # the other parameters depend on the version of Python
    signature = str(inspect.signature(documented))
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)  # quotes around annotations
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", signature)


def _docstring_as_markdown(documented: Any) -> str:
    """Convert a docstring to Markdown: the entries of Args and Raises become lists."""
    lines = []
    for line in (inspect.getdoc(documented) or "").splitlines():
        name, _, description = line.strip().partition(": ")
        is_entry = re.match(r"    \S", line) and description
        if line in ("Args:", "Raises:"):
            lines.append(f"\n{line}\n")
        elif is_entry:
            lines.append(f"- `{name}`: {description}")
        else:
            lines.append(line.strip())
    return "\n".join(lines).replace("\n\n\n", "\n\n").strip()
