"""Sources of published data and models: which repository of a hub, or which place, each is from."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, TypeAdapter

from mcore_mas import SHIPPED
from rollout.base.files import read_yaml
from rollout.base.section import Section

SOURCES_FILE = SHIPPED / "workflow" / "sources.yaml"


class Source(Section):
    """Where one data file or model folder is from: an entry of workflow/sources.yaml, which says what its keys are."""

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
    def described(self) -> str:
        """Repository or place, size and licence, as a person asks for them."""
        host = "GitHub" if self.host == "github" else "the hub"
        what = self.by_hand or (
            f"{self.repository} of {host}" if self.repository else f"made of {self.needs[0]}"
        )
        gb = self.gb or sum(known_sources()[path].gb or 0 for path in self.needs)
        size = f", {gb:g} GB" if gb else f", {self.rows} rows" if self.rows else ""
        return f"{what}{size}{f', licence {self.licence}' if self.licence else ''}{', gated' if self.gated else ''}"


@cache
def known_sources() -> Mapping[str, Source]:
    """Every entry of workflow/sources.yaml by its path."""
    return TypeAdapter(dict[str, Source]).validate_python(read_yaml(SOURCES_FILE))


def acquirable(paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """`paths` with what they need before them: those that can be fetched or checked, and those to put there by hand."""
    known = known_sources()
    fetched, by_hand = dict[str, None](), dict[str, None]()
    for path in paths:
        source = known.get(path)
        if Path(path).exists() and (source is None or source.by_hand):
            continue  # of a user's own
        for needed in (*(source.needs if source else ()), path):
            own = known.get(needed)
            (fetched if own and not own.by_hand else by_hand)[needed] = None
    return list(fetched), list(by_hand)


def listed(paths: Iterable[str], behind: Mapping[str, str] | None = None) -> list[str]:
    """A line for each of `paths`, with where it is from and its size, and what is to be said `behind` that."""
    known = known_sources()
    return [
        f"  {path}: {known[path].described if path in known else 'not in workflow/sources.yaml'}"
        f"{(behind or {}).get(path, '')}"
        for path in paths
    ]
