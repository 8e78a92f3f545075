"""Reinforcement-learning post-training of teams of LLM agents on Megatron-core."""

import gc
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_CHECKOUT = Path(__file__).resolve().parent.parent
# The folder of configs/ and workflow/: the checkout, or in an installed package the folder
# where setup.py puts them.
SHIPPED = (
    _CHECKOUT if (_CHECKOUT / "configs").is_dir() else Path(__file__).resolve().parent / "shipped"
)

PACKAGES = ("mcore_mas", "rollout", "retrieval")  # packages of this distribution, side by side


def package_folders() -> list[Path]:
    """Return the folders from which this distribution's packages are imported."""
    folders = []
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            folders.append(Path(spec.origin).parent)
    return folders


def _check_packages() -> None:
    """Raise ImportError if another folder hides `rollout` or `retrieval`, such as one of the user's project."""
    for name in PACKAGES[1:]:
        spec = find_spec(name)
        folders: list[str] = []
        origin = "nowhere"
        if spec is not None:
            folders = list(spec.submodule_search_locations or ())
            origin = spec.origin or folders[0]  # a folder without __init__.py has no origin
        if _CHECKOUT / name not in [Path(folder).resolve() for folder in folders]:
            raise ImportError(
                f"mcore_mas needs its own package '{name}' from {_CHECKOUT / name}, and Python finds {origin}: "
                f"rename that folder or file, or start Python in another folder"
            )


_check_packages()

# Modules and records are many long-lived objects. With the default threshold of 700 new objects,
# garbage collection takes a seventh of a trainer's start-up, and a third of the time of large
# trajectory trees.
if 0 < gc.get_threshold()[0] < 10_000:
    gc.set_threshold(10_000)


def resolve_page_paths(text: str) -> str:
    """Replace names of this distribution's pages and schemas, such as docs/tables.md, by their full paths.

    The name of a file that the current folder has stays.
    """
    import re

    def full_path(match: re.Match[str]) -> str:
        name = match[0]
        return name if Path(name).is_file() else str(SHIPPED / name)

    return re.sub(
        r"(?<![\w./-])(docs/\w+\.md|workflow/schemas/[\w.]+\.json)",
        full_path,
        text,
    )


def code_commit() -> str:
    """Return the commit of this checkout, with a star if it has uncommitted changes.

    It is "unknown" in an installed package.
    """
    import subprocess

    command = [
        "git",
        "-C",
        str(SHIPPED),
        "describe",
        "--always",
        "--dirty=*",
        "--abbrev=10",
        "--exclude=*",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def __getattr__(name: str) -> Any:
    """Return the version, or a public name of `mcore_mas.api`, which is imported when one is first used."""
    if name == "__version__":
        return version("mcore-mas")
    if name.startswith("_"):
        raise AttributeError(f"module 'mcore_mas' has no attribute '{name}'")
    return getattr(import_module("mcore_mas.api"), name)


def __dir__() -> list[str]:
    return [*globals(), "__version__", *import_module("mcore_mas.api").__all__]
