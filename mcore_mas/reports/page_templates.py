"""Rendering of the templates in templates/, in which model output is escaped.

Pages load and run nothing, except for the studio, which loads its own scripts.
"""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from rollout.base.text import escape_text


def render_page(template: str, **values: Any) -> str:
    """Render a file of templates/ with values.

    On a web page every value is escaped. Control and bidirectional characters, which a browser
    would obey, are shown as escapes such as `\\x1b`. Should an escape ever be missing, the content
    security policy of the page lets no script in a value run, and nothing load from elsewhere.
    """
    return _TEMPLATES.get_template(template).render(values)


def embed_page(page: str) -> Markup:
    """Return an HTML frame with a page, which can run and load nothing there."""
    return Markup(
        '<iframe sandbox srcdoc="{}" style="width: 100%; height: 32em; border: 0"></iframe>'
    ).format(page)


def _escape_controls(value: Any) -> Any:
    """Return a value with its control characters as escapes.

    Markup is left as it is, such as the output of a macro, whose values have been escaped.
    """
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return escape_text(value)
    return value


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    # Markdown pages have names, numbers and reasons, and no text of models.
    autoescape=select_autoescape(disabled_extensions=("md.jinja",), default=True),
    finalize=_escape_controls,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
