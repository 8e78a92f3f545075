"""Scaffold of a project of one's own: a team, environment, reward and tasks that learn on a laptop, with their test."""

from __future__ import annotations

import keyword
from pathlib import Path

from mcore_mas.pipeline.base_model import make_tiny_model
from mcore_mas.rollout.base.files import write_text

_FILES = Path(__file__).with_name("scaffold")
_NAME = "my_team"  # as the files say


class ScaffoldError(ValueError):
    """A project cannot be made: says why, and what to do."""


def new_project(name: str, parent: Path) -> Path:
    """Write a project called `name` into a folder of that name, with a small random model.

    Raises:
        ScaffoldError: the name is none of a Python package, one is taken, or the folder holds something.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name in ("mcore_mas", "tests"):
        raise ScaffoldError(f"'{name}' cannot be a Python package; expected letters, digits and _, such as my_team")
    folder = parent / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ScaffoldError(f"{folder}: something is there already; name another project, or remove it")
    for file in sorted(_FILES.rglob("*.txt")):
        place = str(file.relative_to(_FILES)).removesuffix(".txt").replace(_NAME, name)
        write_text(folder / place, file.read_text(encoding="utf-8").replace(_NAME, name))
    make_tiny_model(folder / "models" / "tiny")
    return folder
