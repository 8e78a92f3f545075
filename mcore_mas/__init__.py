"""Reinforcement-learning post-training of teams of LLM agents on Megatron-core."""

import gc
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_CHECKOUT = Path(__file__).resolve().parent.parent
# The folder of configs/ and workflow/: the checkout, or in an installed package where setup.py puts them.
SHIPPED = (
    _CHECKOUT if (_CHECKOUT / "configs").is_dir() else Path(__file__).resolve().parent / "shipped"
)

PACKAGES = ("mcore_mas", "rollout", "retrieval")  # of this distribution, side by side


def package_folders() -> list[Path]:
    """Return the folders of this distribution's packages, each as its import finds it."""
    return [Path(str(find_spec(name).origin)).parent for name in PACKAGES]


def _check_packages() -> None:
    """Raise ImportError if another folder hides `rollout` or `retrieval`, such as one of the user's project."""
    for name in PACKAGES[1:]:
        spec = find_spec(name)
        folders = (
            []
            if spec is None
            else [Path(folder) for folder in spec.submodule_search_locations or ()]
        )
        if _CHECKOUT / name not in [folder.resolve() for folder in folders]:
            at = f"{spec.origin or folders[0]}" if spec is not None else "nowhere"
            raise ImportError(
                f"mcore_mas needs its own package '{name}' from {_CHECKOUT / name}, and Python finds {at}: "
                f"rename that folder or file, or start Python in another folder"
            )


_check_packages()

# Modules and records are many objects that stay, and by default the collector looks after every 700 new ones: that is a
# seventh of the time that a trainer takes to start, and a third of what trees of trajectories take.
if 0 < gc.get_threshold()[0] < 10_000:
    gc.set_threshold(10_000)


def with_pages(text: str) -> str:
    """The text with the full path of each file that it names, such as docs/tables.md, and that is not here."""
    import re

    named = r"(?<![\w./-])(docs/\w+\.md|workflow/schemas/[\w.]+\.json)"
    return re.sub(
        named, lambda found: found[0] if Path(found[0]).is_file() else str(SHIPPED / found[0]), text
    )


def code_commit() -> str:
    """The commit of this checkout, with a star where it has changes; "unknown" in an installed package."""
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
    """The public names are those of `mcore_mas.api`, which is imported when the first of them is used."""
    if name == "__version__":
        return version("mcore-mas")
    if name.startswith("_"):
        raise AttributeError(f"module 'mcore_mas' has no attribute '{name}'")
    api = import_module("mcore_mas.api")
    return (
        getattr(api, name) if name in api.__all__ else api.__getattr__(name)
    )  # which says what is there


def __dir__() -> list[str]:
    return [*globals(), "__version__", *import_module("mcore_mas.api").__all__]
