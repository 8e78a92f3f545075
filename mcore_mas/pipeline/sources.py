"""Sources of published data and models: which repository of a hub, or which place, each is from."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from pydantic import Field, TypeAdapter

from mcore_mas import SHIPPED
from mcore_mas.rollout.base.files import read_yaml
from mcore_mas.rollout.base.options import Section

SOURCES_FILE = SHIPPED / "workflow" / "sources.yaml"


class Source(Section):
    """Where one data file or model folder is from: an entry of workflow/sources.yaml, which says what its keys are."""

    repository: str | None = None
    revision: str | None = None
    files: tuple[str, ...] = ()
    sha256: dict[str, str] = Field(default_factory=dict)
    rows: int | None = None
    gb: float | None = None
    licence: str | None = None
    gated: bool = False
    where: dict[str, str] = Field(default_factory=dict)
    format: str | None = None
    by_hand: str | None = None
    needs: tuple[str, ...] = ()
    encoder: str | None = None

    @property
    def described(self) -> str:
        """Repository or place, size and licence, as a person asks for them."""
        what = self.by_hand or (f"{self.repository} of the hub" if self.repository else f"made of {self.needs[0]}")
        size = f", {self.gb:g} GB" if self.gb else ""
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
        if Path(path).exists() and source is None:
            continue  # of a user's own
        for needed in (*(source.needs if source else ()), path):
            own = known.get(needed)
            ours = own is not None and (own.by_hand is None or Path(needed).exists())
            (fetched if ours else by_hand)[needed] = None
    return list(fetched), list(by_hand)


def listed(paths: Iterable[str], behind: Mapping[str, str] | None = None) -> list[str]:
    """A line for each of `paths`, with where it is from and its size, and what is to be said `behind` that."""
    known = known_sources()
    return [
        f"  {path}: {known[path].described if path in known else 'not in workflow/sources.yaml'}"
        f"{(behind or {}).get(path, '')}"
        for path in paths
    ]
