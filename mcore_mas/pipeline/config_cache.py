"""Resolved configs composed before: every job of a pipeline reads its suite again, and composes none of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from mcore_mas import SHIPPED
from mcore_mas.rollout.base.files import write_text

_PACKAGES = ("mcore_mas", "rollout", "retrieval")
_FROM_ENVIRONMENT = "oc.env"  # OmegaConf's resolver of a variable, which may change without any file


class ConfigCache:
    """A suite's resolved configs by what they were composed from, in one file that may be deleted at any time.

    A config is composed again where its overrides change, any of our code or configs, or a file of the user that it
    was made with: configs, Python code that it imported, the description of a model.
    """

    def __init__(self, path: Path, configs: Path | None, code: Sequence[Path]) -> None:
        """Read what is there.

        Args:
            configs: a user's own, if there are.
            code: folders of the user whose Python modules configs may name.
        """
        self._path, self._code = path, code
        shipped = [*(SHIPPED / "configs").rglob("*.yaml"), *(SHIPPED / "workflow" / "scales").iterdir()]
        packages = [file for name in _PACKAGES for file in (Path(__file__).parents[2] / name).rglob("*.py")]
        own = sorted(configs.rglob("*.yaml")) if configs else []
        self._off = any(_FROM_ENVIRONMENT in file.read_text(encoding="utf-8", errors="replace") for file in own)
        self._made_with = _digest(_stamps([*shipped, *packages, *own]))
        self._before = self._read()
        self._now: dict[str, Any] = {}
        self._imports: tuple[int, list[str]] = (0, [])  # as of so many modules

    def get(self, settings: Mapping[str, Any], compose: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The config of `settings`, composed where it is not known."""
        key = _digest([self._made_with, settings])
        known = self._before.get(key)
        if self._off or _FROM_ENVIRONMENT in str(settings):
            return compose()
        if known is None or known["files"] != _stamps(known["files"]):
            config = compose()
            models = [f"{policy['model']}/config.json" for policy in config["policies"].values()]
            known = {"files": _stamps([*self._imported(), *models]), "config": config}
        self._now[key] = known
        return dict(known["config"])

    def save(self) -> None:
        """Keep what was asked for, and nothing else, if any of it is new."""
        if self._now.keys() - self._before.keys() or any(self._now[key] != self._before[key] for key in self._now):
            write_text(self._path, json.dumps(self._now))

    def _imported(self) -> list[str]:
        """The user's modules that this process has imported, looked for again where it has imported any."""
        if len(sys.modules) == self._imports[0]:
            return self._imports[1]
        others = (module for name, module in list(sys.modules.items()) if name.partition(".")[0] != "mcore_mas")
        files = (str(getattr(module, "__file__", None) or "") for module in others)
        folders = tuple(f"{folder}{os.sep}" for folder in self._code)
        found = [file for file in files if file.startswith(folders) and f"{os.sep}site-packages{os.sep}" not in file]
        self._imports = len(sys.modules), found
        return found

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _stamps(files: Iterable[Path | str]) -> dict[str, list[int] | None]:
    """Size and time of change of each file; None of one that is not there."""
    return {str(file): _stamp(Path(file)) for file in files}


def _stamp(file: Path) -> list[int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
