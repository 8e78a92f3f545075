from pathlib import Path

from mcore_mas.api import *  # noqa: F403

SHIPPED: Path
PACKAGES: tuple[str, ...]
__version__: str

def code_commit() -> str: ...
def resolve_page_paths(text: str) -> str: ...
def package_folders() -> list[Path]: ...
