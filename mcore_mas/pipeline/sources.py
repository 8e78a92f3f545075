"""Sources of published data and models, as workflow/sources.yaml lists them."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, TypeAdapter

from mcore_mas import SHIPPED
from rollout.base.section import Section
from rollout.base.yaml_files import read_yaml

SOURCES_FILE = SHIPPED / "workflow" / "sources.yaml"


class Source(Section):
    """Where one data file or model folder comes from; workflow/sources.yaml explains the keys."""

    host: Literal["hub", "github"] = "hub"
    repository: str | None = None
    revision: str | None = None
    files: tuple[str, ...] = ()
    sha256: dict[str, str] = Field(default_factory=dict)
    rows: int | None = None
    gb: float | None = None
    licence: str | None = None
    gated: bool = False
    where: dict[str, str] = Field(default_factory=dict)
    drawn: tuple[int, int] | None = None
    format: str | None = None
    by_hand: str | None = None
    needs: tuple[str, ...] = ()
    encoder: str | None = None

    @property
    def description(self) -> str:
        """Repository or place, size and licence in one line."""
        if self.by_hand:
            parts = [self.by_hand]
        elif self.repository:
            host = "GitHub" if self.host == "github" else "the hub"
            parts = [f"{self.repository} of {host}"]
        else:
            parts = [f"made of {self.needs[0]}"]

        gb = self.gb or sum(known_sources()[path].gb or 0 for path in self.needs)
        if gb:
            parts.append(f"{gb:g} GB")
        elif self.rows:
            parts.append(f"{self.rows} rows")
        if self.licence:
            parts.append(f"licence {self.licence}")
        if self.gated:
            parts.append("gated")
        return ", ".join(parts)


@cache
def known_sources() -> Mapping[str, Source]:
    """Return every entry of workflow/sources.yaml by its path below the working folder."""
    return TypeAdapter(dict[str, Source]).validate_python(read_yaml(SOURCES_FILE))


def acquirable(paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """Sort paths, each after those that it needs, by how they are acquired.

    A file of the user's own that exists is in neither list.

    Returns:
        Paths that can be fetched or checked, and paths that have to be put there by hand.
    """
    sources = known_sources()
    fetched: list[str] = []
    by_hand: list[str] = []
    for path in paths:
        source = sources.get(path)
        if Path(path).exists() and (source is None or source.by_hand):
            continue
        needs = source.needs if source else ()
        for needed in (*needs, path):
            needed_source = sources.get(needed)
            if needed_source is None or needed_source.by_hand:
                by_hand.append(needed)
            else:
                fetched.append(needed)
    return list(dict.fromkeys(fetched)), list(dict.fromkeys(by_hand))


def describe_paths(paths: Iterable[str], notes: Mapping[str, str] | None = None) -> list[str]:
    """Return a line for each path with its source and size.

    Args:
        notes: text to append to the line of a path.
    """
    sources = known_sources()
    lines = []
    for path in paths:
        source = sources.get(path)
        description = source.description if source else "not in workflow/sources.yaml"
        lines.append(f"  {path}: {description}{(notes or {}).get(path, '')}")
    return lines
