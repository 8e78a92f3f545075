"""Scale of a run: the published size, or the same run made tiny by the rules of workflow/scales/tiny.yaml."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from mcore_mas import SHIPPED
from mcore_mas.config.run import ConfigError
from rollout.base.files import read_yaml
from rollout.base.nested import merged
from rollout.records.trajectory import Turn
from rollout.tasks.splits import SPLITS

_CORPUS = "data/search/passages.jsonl"
_FILE_LIMIT = 4  # tasks of each file


def scaled(values: Mapping[str, Any], scale: str) -> dict[str, Any]:
    """The sections of a composed config at a scale.

    At `tiny`, files of `data/` and folders of `models/` are looked for below the results folder, where the pipeline
    makes them; a retriever elsewhere or over a published index becomes one of its own; nobody outside is asked, so a
    coach's reward is the outcome's. Every turn's reward gets a `drawn_reward`, so that there is something to train on.

    Raises:
        ConfigError: a policy is a remote model.
    """
    if scale == "paper":
        return dict(values)
    rule = _rule(scale)
    made: dict[str, Any] = merged(values, rule["merged"]) | rule["replaced"]
    for section, limits in rule["most"].items():
        made[section] = _capped(made[section], limits)
    made["policies"] = {
        name: _policy(own, rule["policies"], values) for name, own in values["policies"].items()
    }
    made["agents"] = {name: {**own, **rule["agents"]} for name, own in values["agents"].items()}
    made["data"] = _data(made["data"], Path(values["results"]))
    retriever = values.get("retriever") or {}
    if retriever.get("urls") or retriever.get("folder"):
        made["retriever"] = {"passages": str(Path(values["results"]) / _CORPUS)}
    reward = dict(made["reward"])
    if values.get("coach"):
        made["coach"] = None
        reward |= {"name": "shared_outcome", "options": {}}
    made["reward"] = {**reward, "penalties": {**reward.get("penalties", {}), _DRAWN: {}}}
    return made


@cache
def _rule(scale: str) -> dict[str, Any]:
    return read_yaml(SHIPPED / "workflow" / "scales" / f"{scale}.yaml")  # type: ignore[no-any-return]


def drawn_reward(turn: Turn) -> float:
    """A number in [0, 1) that depends on the reply alone; the scale `tiny` adds it to every turn's reward.

    Random models solve nothing, and where no reward differs nothing is trained.
    """
    return crc32(repr(tuple(turn.completion_ids)).encode()) / 2**32


_DRAWN = f"{__name__}:{drawn_reward.__name__}"


def _capped(value: Any, limits: Mapping[str, int]) -> Any:
    """With no number above its limit, wherever its key stands."""
    if isinstance(value, list | tuple):
        return [_capped(item, limits) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: min(item, limits[key])
        if key in limits and type(item) is int
        else _capped(item, limits)
        for key, item in value.items()
    }


def _policy(
    policy: Mapping[str, Any], settings: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    made = {**policy, **settings}
    if made.get("critic"):
        made["critic"] = {**made["critic"], "warmup_steps": 0, "schedule": "constant"}
    if made.get("remote"):
        raise ConfigError("a remote model has no tiny scale; give the agent a model folder")
    return {**made, "model": str(Path(values["results"]) / made["model"])}


def _data(data: Mapping[str, Any], results: Path) -> dict[str, Any]:
    if (
        data.get("generator") == "dsbench"
    ):  # its files may not be given on; generated tables are played the same way
        return {**data, "generator": "tabular", "options": {}}
    if data.get("generator"):
        return dict(data)

    def moved(entry: Any) -> Any:
        if isinstance(entry, list | tuple):
            return [moved(one) for one in entry]
        keys = entry if isinstance(entry, Mapping) else {"path": entry}
        if (
            keys.get("format", data.get("format")) == "search"
        ):  # a file of many sources, each a row of some table
            return {
                **keys,
                "limit": None,
                "limit_per_source": 1,
                "path": str(results / keys["path"]),
            }
        limit = min(keys.get("limit") or _FILE_LIMIT, _FILE_LIMIT)
        return {**keys, "limit": limit, "path": str(results / keys["path"])}

    return {**data, **{split: moved(data[split]) for split in SPLITS}}
