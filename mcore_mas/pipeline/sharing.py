"""What a stage of the pipeline depends on in a config, and the cache of composed configs.

Runs that agree in it share what the stage makes: tasks and indexes, cold starts, the scores of untrained teams. And an
edit of a config runs those stages again that depend on what was edited.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mcore_mas import PACKAGES, SHIPPED, package_folders
from rollout.base.files import file_stamp, write_text

Runs = Mapping[str, Mapping[str, Any]]  # resolved configs by run

# what tasks, passages and their index depend on; of the retriever, its corpus
_TASKS = ("seed", "data")
# what a cold start depends on
_COLD = (
    "seed",
    "data",
    "env",
    "orchestra",
    "agents",
    "engine",
    "cold_start",
    "retriever",
    "cluster",
)
# what the score of an untrained team depends on besides its agents and the models that they play
_PLAYED = (
    "seed",
    "data",
    "env",
    "orchestra",
    "engine",
    "evaluation",
    "collection",
    "retriever",
    "cold_start",
)
_VOICE = ("model", "remote", "chat_template", "chat_template_kwargs")
_NOT_INDEXED = ("urls", "key_file", "patience_s", "threads", "shards", "device", "python")


def sharers(runs: Runs, stage: str) -> dict[str, str]:
    """run -> the first run in which all is the same that a stage depends on: tasks and index, cold start, or score."""
    return first_alike((run, _STAGES[stage](config)) for run, config in runs.items())


def started_from(config: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The config with `owner`'s cold-started model in place of its own."""
    if owner == config["run"]:
        return dict(config)
    mine, theirs = f"{config['results']}/{config['run']}/", f"{config['results']}/{owner}/"
    policies = {
        name: {**policy, "model": policy["model"].replace(mine, theirs)}
        for name, policy in config["policies"].items()
    }
    return {**config, "cold_start": None, "policies": policies}


def settings_digest(config: Mapping[str, Any], stage: str) -> str:
    """A number that changes with the settings that a stage depends on: tasks, start, training or score."""
    return _digest(_STAGES[stage](config))[:16]


def _of_tasks(config: Mapping[str, Any]) -> dict[str, Any]:
    corpus = {
        key: value
        for key, value in (config.get("retriever") or {}).items()
        if key not in _NOT_INDEXED
    }
    return {**{key: config[key] for key in _TASKS}, "corpus": corpus}


def _of_score(config: Mapping[str, Any]) -> dict[str, Any]:
    agents = {
        name: {**agent, "policy": _voice(config["policies"][agent["policy"]])}
        for name, agent in _unrewarded(config).items()
    }
    return {**{key: config[key] for key in _PLAYED}, "agents": agents}


_STAGES: Mapping[str, Callable[[Mapping[str, Any]], Any]] = MappingProxyType(
    {
        "tasks": _of_tasks,
        "index": lambda config: [_of_tasks(config), config.get("retriever")],
        "start": lambda config: {
            **{key: config[key] for key in _COLD},
            "agents": _unrewarded(config),
        },
        # all but where it is watched, and how often a trained team answers
        "training": lambda config: {
            **config,
            "tracking": None,
            "evaluation": {**config["evaluation"], "samples": None},
        },
        "score": _of_score,
    }
)


def _voice(policy: Mapping[str, Any]) -> list[Any]:
    """What an untrained policy answers with."""
    adapter = (policy["lora"] or {}).get("adapter")
    return [*(policy[key] for key in _VOICE), adapter, policy["own"]["engine"]]


def _unrewarded(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The agents without what only training asks of them."""
    return {
        name: {**agent, "advantage": None, "loss_weight": 1}
        for name, agent in config["agents"].items()
    }


def first_alike(keys: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Each run with the first run of an equal key."""
    first: dict[str, str] = {}
    return {run: first.setdefault(_digest(key), run) for run, key in keys}


_FROM_ENVIRONMENT = (
    "oc.env"  # OmegaConf's resolver of a variable, which may change without any file
)


class ConfigCache:
    """A suite's resolved configs by what they were composed from, in one file that may be deleted at any time.

    A config is composed again where its overrides change, any of our code or configs, or a file of the user that it
    was made with: configs, Python code that it imported, the description of a model.
    """

    def __init__(self, path: Path, configs: Path | None, code: Sequence[Path]) -> None:
        """Read what is there; `configs` are a user's own, `code` folders with Python modules that they may name."""
        self._path, self._code = path, code
        shipped = [
            *(SHIPPED / "configs").rglob("*.yaml"),
            *(SHIPPED / "workflow" / "scales").iterdir(),
        ]
        packages = [file for folder in package_folders() for file in folder.rglob("*.py")]
        own = sorted(configs.rglob("*.yaml")) if configs else []
        self._off = any(
            _FROM_ENVIRONMENT in file.read_text(encoding="utf-8", errors="replace") for file in own
        )
        self._made_with = _digest(_stamps([*shipped, *packages, *own]))
        self._before: dict[str, Any] = {}
        with suppress(OSError, ValueError, TypeError):  # it is not there, or no mapping
            self._before = dict(json.loads(path.read_text(encoding="utf-8")))
        self._now: dict[str, Any] = {}

    def get(
        self, settings: Mapping[str, Any], compose: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
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
        if self._now.keys() - self._before.keys() or any(
            self._now[key] != self._before[key] for key in self._now
        ):
            write_text(self._path, json.dumps(self._now))

    def _imported(self) -> list[str]:
        """The user's modules that this process has imported."""
        others = (
            module
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] not in PACKAGES
        )
        files = (str(getattr(module, "__file__", None) or "") for module in others)
        folders = tuple(f"{folder}{os.sep}" for folder in self._code)
        return [
            file
            for file in files
            if file.startswith(folders) and f"{os.sep}site-packages{os.sep}" not in file
        ]


def _stamps(files: Iterable[Path | str]) -> dict[str, list[int] | None]:
    """`file_stamp` of each file; None of one that is not there."""
    return {str(file): file_stamp(Path(file)) if Path(file).exists() else None for file in files}


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
