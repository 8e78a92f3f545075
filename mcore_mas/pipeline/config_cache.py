"""Cache of a suite's resolved configs.

Snakemake reads the suite anew in every job that it submits; with the cache, jobs compose nothing.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from mcore_mas import PACKAGES, SHIPPED, package_folders
from mcore_mas.pipeline.sharing import json_digest
from rollout.base.files import write_text
from rollout.base.json_files import read_json

# OmegaConf's resolver of an environment variable, which may change without any file.
_ENVIRONMENT_RESOLVER = "oc.env"
_SHIPPED_VARIABLE = "SGLANG_PYTHON"  # the one that a shipped config reads (engine/sglang.yaml)


class ConfigCache:
    """Resolved configs by the settings that they were composed from, in one JSON file.

    A config is composed again when its overrides, our code or configs, or a file of the user that
    it was composed from has changed: configs, imported Python modules, the config.json of a model.
    After a download from the Hub, all are composed again, because ids of models and data sets are
    replaced by the folders of their downloads. Nothing is cached if the user's configs or the
    overrides read environment variables. The file may be deleted at any time.
    """

    def __init__(self, path: Path, configs: Path | None, code: Sequence[Path]) -> None:
        """Read the cache, if there is one.

        Args:
            path: the cache's file.
            configs: folder of the user's own configs.
            code: folders of Python modules that the configs may name.
        """
        self._path = path
        self._code_prefixes = tuple(f"{folder}{os.sep}" for folder in code)

        shipped = [
            *(SHIPPED / "configs").rglob("*.yaml"),
            *(SHIPPED / "workflow" / "scales").iterdir(),
        ]
        modules = [file for folder in package_folders() for file in folder.rglob("*.py")]
        user_configs = sorted(configs.rglob("*.yaml")) if configs else []
        hub_cache = Path(constants.HF_HUB_CACHE)
        downloads = sorted([*hub_cache.glob("*/refs/*"), *hub_cache.glob("*/snapshots/*")])
        files = [*shipped, *modules, *user_configs, *downloads]
        self._common_digest = json_digest([_stamps(files), os.environ.get(_SHIPPED_VARIABLE)])
        self._disabled = any(
            _ENVIRONMENT_RESOLVER in file.read_text(encoding="utf-8", errors="replace")
            for file in user_configs
        )

        self._previous: dict[str, Any] = {}
        with suppress(OSError, ValueError, TypeError):  # missing, damaged, or not a mapping
            self._previous = dict(read_json(path))
        self._current: dict[str, Any] = {}

    def get(
        self, settings: Mapping[str, Any], compose: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the config of `settings`, which is composed if the cache does not have it."""
        if self._disabled or _ENVIRONMENT_RESOLVER in str(settings):
            return compose()

        key = json_digest([self._common_digest, settings])
        entry = self._previous.get(key)
        if entry is None or entry["files"] != _stamps(entry["files"]):
            config = compose()
            models = [f"{policy['model']}/config.json" for policy in config["policies"].values()]
            entry = {"files": _stamps([*self._imported_files(), *models]), "config": config}
        self._current[key] = entry
        return dict(entry["config"])

    def save(self) -> None:
        """Write the configs that were asked for, and no others, if one of them is new."""
        if any(self._previous.get(key) != entry for key, entry in self._current.items()):
            write_text(self._path, json.dumps(self._current))

    def _imported_files(self) -> list[str]:
        """Return the files of the user's modules that this process has imported."""
        files = []
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if not isinstance(file, str) or not file.startswith(self._code_prefixes):
                continue
            is_ours = name.partition(".")[0] in PACKAGES
            is_installed = f"{os.sep}site-packages{os.sep}" in file
            if not is_ours and not is_installed:
                files.append(file)
        return files


def _stamps(files: Iterable[Path | str]) -> dict[str, list[int] | None]:
    """Return the stamp of each file, None for a file that does not exist."""
    return {str(file): _stamp(Path(file)) if Path(file).exists() else None for file in files}


def _stamp(file: Path) -> list[int]:
    """Return size, times and inode of a file, which change with its content."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
