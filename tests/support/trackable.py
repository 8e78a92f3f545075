"""What a tracker reads of a run's config, with as few parameters as a test wants."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mcore_mas.tracking.feed import Tracker


def opened_tracker(
    folder: Path,
    uri: str,
    warn: Any,
    *,
    params: dict[str, object] | None = None,
    tags: dict[str, str] | None = None,
    zeros: bool = False,
    first: int = 0,
    id: str | None = None,
    ended: bool = False,
) -> Tracker:
    """The tracker of a training in the run folder `folder`, in the experiment `e`."""
    path = folder / "config.yaml"
    path.touch()
    (folder / "train").mkdir(exist_ok=True)
    tracking = SimpleNamespace(uri=uri, experiment="e", zeros=zeros, tags=tags or {})
    given: Any = SimpleNamespace(
        run="r",
        seed=1,
        folder=folder,
        results=folder,
        models={},
        tracking=tracking,
        model_dump=lambda **_: params or {},
    )
    return Tracker(given, path, first, id, warn, ended=ended)
