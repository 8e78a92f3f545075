"""Sources of published data and models, as workflow/sources.yaml lists them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, TypeAdapter

from mcore_mas import SHIPPED
from rollout.base.section import Section
from rollout.base.yaml_files import read_yaml

SOURCES_FILE = SHIPPED / "workflow" / "sources.yaml"


class Source(Section):
    """Origin of a data file, model folder or index; workflow/sources.yaml explains the keys."""

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
        """Repository or instructions, size and licence in one line."""
        if self.by_hand:
            parts = [self.by_hand]
        elif self.repository:
            host = "GitHub" if self.host == "github" else "the hub"
            parts = [f"{self.repository} of {host}"]
        else:
            parts = [f"made of {self.needs[0]}"]

        sources = load_sources()
        gb = self.gb or sum(sources[path].gb or 0 for path in self.needs)
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
def load_sources() -> Mapping[str, Source]:
    """Return every entry of workflow/sources.yaml by its path below the working folder."""
    return TypeAdapter(dict[str, Source]).validate_python(read_yaml(SOURCES_FILE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquisition:
    """Paths of inputs by how they are acquired, each after the paths that it needs."""

    downloadable: list[str]  # can be downloaded, or checked if they exist
    by_hand: list[str]  # have to be put in place by the user


def sort_by_acquisition(paths: Iterable[str]) -> Acquisition:
    """Sort the paths of inputs by how they are acquired.

    An existing file that cannot be downloaded needs no action, so it is in neither list.
    """
    sources = load_sources()
    downloadable: list[str] = []
    by_hand: list[str] = []
    for path in paths:
        source = sources.get(path)
        if Path(path).exists() and (source is None or source.by_hand):
            continue

        needs = source.needs if source else ()
        for needed_path in (*needs, path):
            needed_source = sources.get(needed_path)
            if needed_source is None or needed_source.by_hand:
                by_hand.append(needed_path)
            else:
                downloadable.append(needed_path)

    return Acquisition(
        downloadable=list(dict.fromkeys(downloadable)),
        by_hand=list(dict.fromkeys(by_hand)),
    )


def describe_paths(paths: Iterable[str], notes: Mapping[str, str] | None = None) -> list[str]:
    """Return a line for each path with its source and size.

    Args:
        paths: paths of inputs, relative to the working folder.
        notes: text that is appended to the line of a path.
    """
    sources = load_sources()
    notes = notes or {}
    lines = []
    for path in paths:
        source = sources.get(path)
        description = source.description if source else "not in workflow/sources.yaml"
        lines.append(f"  {path}: {description}{notes.get(path, '')}")
    return lines
