"""Writers of this repository's generated pages, from its code, its configs and its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
_TEMPLATES = Environment(  # noqa: S701  (Markdown of this repository's own texts)
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def rendered(template: str, **values: Any) -> str:
    """Return the page that a file of `templates/` gives with these values."""
    return _TEMPLATES.get_template(f"{template}.md.jinja").render(values)
