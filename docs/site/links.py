"""Hook of mkdocs: README, CONTRIBUTING and CHANGELOG are pages too, and links to other files lead to copies of them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]
_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_NOTEBOOKS = ROOT / "docs" / "notebooks"
_SHOWN: dict[
    str, str
] = {}  # what cells of notebooks show as HTML, by what stands for it in the page's Markdown
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def _place(link: str, page: Path) -> tuple[str, str] | None:
    """The file in the repository that a page's link names, and its place in the site; None where there is no file."""
    path = Path(os.path.normpath(page.parent / link))
    if not path.is_file():
        return None
    name = path.relative_to(ROOT).as_posix()
    return name, name.removeprefix("docs/") if name.startswith("docs/") else _PAGES.get(
        name, f"source/{name}"
    )


def on_config(config: Any) -> Any:
    """Anchors as GitHub makes them, and Mermaid's blocks as pictures: nothing is fetched from elsewhere."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    fence = {"name": "mermaid", "class": "", "format": _diagram}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def _diagram(source: str, *_: object, **__: object) -> str:
    """A diagram as a picture in the page; kept in build/, as each takes most of a second."""
    import mermaidx

    kept = ROOT / "build" / "mermaid" / f"{hashlib.sha256(source.encode()).hexdigest()[:24]}.svg"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(mermaidx.render(source).svg(), encoding="utf-8")
        partial.replace(kept)
    data = base64.b64encode(kept.read_bytes()).decode()
    return f'<img alt="diagram" style="background: #fff" src="data:image/svg+xml;base64,{data}">'


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages of the root, and what pages link to outside `docs/`, as it is."""
    added = dict(_PAGES)
    sources = [Path(file.abs_src_path or "") for file in files if file.is_documentation_page()]
    for page in [*sources, *(ROOT / name for name in _PAGES)]:
        found = [_place(link, page) for link, _ in _LINK.findall(page.read_text(encoding="utf-8"))]
        added |= {
            name: place for name, place in filter(None, found) if not name.startswith("docs/")
        }
    for name, place in sorted(added.items()):
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    for notebook in sorted(_NOTEBOOKS.glob("*.ipynb")):
        files.append(
            File.generated(config, f"notebooks/{notebook.stem}.md", content=_markdown(notebook))
        )
    return files


def _markdown(notebook: Path) -> str:
    """A notebook as a page: its text, its code, and what that shows."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [
            _output(output, f"shown-{notebook.stem}-{len(_SHOWN)}")
            for output in cell.get("outputs", ())
        ]
    return "\n\n".join(parts)


def _output(output: dict[str, Any], key: str) -> str:
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "text/html" not in data:
        return f"```text\n{''.join(data['text/plain']).rstrip()}\n```"
    _SHOWN[key] = "".join(data["text/html"])
    return f"<div>{key}</div>"


def on_page_content(html: str, **_: object) -> str:
    """Put what cells show where it belongs."""
    return re.sub(
        r"<div>(shown-[\w-]+)</div>", lambda found: f"<div>{_SHOWN[found[1]]}</div>", html
    )


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Turn links in the repository into links in the site."""
    source = Path(page.file.abs_src_path or ROOT / "docs" / page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def turned(link: re.Match[str]) -> str:
        found = _place(link[1], source)
        return (
            f"]({posixpath.relpath(found[1], folder or '.')}{link[2] or ''})" if found else link[0]
        )

    return _LINK.sub(turned, markdown)
