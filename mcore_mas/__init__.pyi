from pathlib import Path

from mcore_mas.api import *  # noqa: F403

SHIPPED: Path
__version__: str

def code_commit() -> str: ...
def with_pages(text: str) -> str: ...
