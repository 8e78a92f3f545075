"""Hook of mkdocs: README, CONTRIBUTING and CHANGELOG are pages too, and links to other files lead to copies of them."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify
from pymdownx.superfences import fence_code_format

ROOT = Path(__file__).resolve().parents[2]
_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def _place(link: str, page: Path) -> tuple[str, str] | None:
    """The file in the repository that a page's link names, and its place in the site; None where there is no file."""
    path = Path(os.path.normpath(page.parent / link))
    if not path.is_file():
        return None
    name = path.relative_to(ROOT).as_posix()
    return name, name.removeprefix("docs/") if name.startswith("docs/") else _PAGES.get(name, f"source/{name}")


def on_config(config: Any) -> Any:
    """Anchors as GitHub makes them, and Mermaid's blocks as pictures."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    fence = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages of the root, and what pages link to outside `docs/`, as it is."""
    added = dict(_PAGES)
    sources = [Path(file.abs_src_path or "") for file in files if file.is_documentation_page()]
    for page in [*sources, *(ROOT / name for name in _PAGES)]:
        found = [_place(link, page) for link, _ in _LINK.findall(page.read_text(encoding="utf-8"))]
        added |= {name: place for name, place in filter(None, found) if not name.startswith("docs/")}
    for name, place in sorted(added.items()):
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Turn links in the repository into links in the site."""
    source, folder = Path(page.file.abs_src_path), posixpath.dirname(page.file.src_uri)

    def turned(link: re.Match[str]) -> str:
        found = _place(link[1], source)
        return f"]({posixpath.relpath(found[1], folder or '.')}{link[2] or ''})" if found else link[0]

    return _LINK.sub(turned, markdown)
