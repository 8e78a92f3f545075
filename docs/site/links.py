"""Hook of mkdocs: adds pages from outside docs/, notebooks as pages, and copies of the files that pages link to."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]
# pages of the repository's root, by file
_ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_NOTEBOOKS = ROOT / "docs" / "notebooks"
# HTML output of notebook cells, by the placeholder that stands for it in the page's Markdown
_CELL_HTML: dict[str, str] = {}
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


class _Target(NamedTuple):
    """File that a link names: its path in the repository, and its path in the site."""

    file: str
    site_path: str


def _resolve(link: str, page: Path) -> _Target | None:
    """Return the file that a page's link names, or None if there is no such file."""
    path = Path(os.path.normpath(page.parent / link))
    if not path.is_file():
        return None
    file = path.relative_to(ROOT).as_posix()
    if file.startswith("docs/"):
        return _Target(file, file.removeprefix("docs/"))
    return _Target(file, _ROOT_PAGES.get(file, f"source/{file}"))


def on_config(config: Any) -> Any:
    """Make anchors as GitHub does, and Mermaid diagrams as pictures, so that no page loads a script from elsewhere."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    fence = {"name": "mermaid", "class": "", "format": _diagram}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def _diagram(source: str, *_: object, **__: object) -> str:
    """Return a diagram as an embedded SVG; it is cached in build/, because rendering takes most of a second."""
    import mermaidx

    digest = hashlib.sha256(source.encode()).hexdigest()[:24]
    cached = ROOT / "build" / "mermaid" / f"{digest}.svg"
    if not cached.is_file():
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_suffix(f".{os.getpid()}")
        partial.write_text(mermaidx.render(source).svg(), encoding="utf-8")
        partial.replace(cached)
    data = base64.b64encode(cached.read_bytes()).decode()
    return f'<img alt="diagram" style="background: #fff" src="data:image/svg+xml;base64,{data}">'


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages of the root, the notebooks, and the files outside docs/ that pages link to."""
    pages = [Path(file.abs_src_path or "") for file in files if file.is_documentation_page()]
    pages += [ROOT / name for name in _ROOT_PAGES]
    added = dict(_ROOT_PAGES)
    for page in pages:
        for link, _ in _LINK.findall(page.read_text(encoding="utf-8")):
            target = _resolve(link, page)
            if target is not None and not target.file.startswith("docs/"):
                added[target.file] = target.site_path

    for name, site_path in sorted(added.items()):
        files.append(File.generated(config, site_path, abs_src_path=str(ROOT / name)))
    for notebook in sorted(_NOTEBOOKS.glob("*.ipynb")):
        site_path = f"notebooks/{notebook.stem}.md"
        files.append(File.generated(config, site_path, content=_notebook_markdown(notebook)))
    return files


def _notebook_markdown(notebook: Path) -> str:
    """Return a notebook as Markdown: text, code and output of its cells."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            parts.append(_output(output, f"shown-{notebook.stem}-{len(_CELL_HTML)}"))
    return "\n\n".join(parts)


def _output(output: dict[str, Any], placeholder: str) -> str:
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "text/html" not in data:
        return f"```text\n{''.join(data['text/plain']).rstrip()}\n```"
    _CELL_HTML[placeholder] = "".join(data["text/html"])
    return f"<div>{placeholder}</div>"


def on_page_content(html: str, **_: object) -> str:
    """Replace placeholders by the HTML output of notebook cells."""
    return re.sub(
        r"<div>(shown-[\w-]+)</div>", lambda match: f"<div>{_CELL_HTML[match[1]]}</div>", html
    )


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Convert links between files of the repository to links of the site."""
    source = Path(page.file.abs_src_path or ROOT / "docs" / page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri) or "."

    def site_link(link: re.Match[str]) -> str:
        target = _resolve(link[1], source)
        if target is None:
            return link[0]
        return f"]({posixpath.relpath(target.site_path, folder)}{link[2] or ''})"

    return _LINK.sub(site_link, markdown)
