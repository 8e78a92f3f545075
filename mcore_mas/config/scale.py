"""Scale of a run: the published size, or the same run made tiny by the rules of workflow/scales/tiny.yaml."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from mcore_mas import SHIPPED
from mcore_mas.config.run import ConfigError
from rollout.base.nested import merged
from rollout.base.yaml_files import read_yaml
from rollout.records.trajectory import Turn
from rollout.tasks.splits import SPLITS

_CORPUS = "data/search/passages.jsonl"  # passages that the pipeline makes, below the results folder
_TASKS_PER_FILE = 4  # maximum number of tasks that a split takes from a data file


def at_scale(values: Mapping[str, Any], scale: str) -> dict[str, Any]:
    """Return the sections of a composed config at a scale, "paper" or "tiny".

    At `tiny`, every relative path of a data file or a model is read below the results folder, where the pipeline makes
    those of `data/` and `models/`. Absolute paths, also those of downloaded models, stay. Generated tables take the
    place of DSBench's tasks. A retriever on other servers, or over a published index, is replaced by one that the run
    starts. A coach is left out; the reward, which may use its scores, is then the outcome of the trajectory. A policy's
    overrides of `engine` and `trainer` are left out too, because they could exceed the scale. `drawn_reward` is added
    to every turn's reward, so that there is something to learn.

    Raises:
        ConfigError: a policy is a remote model.
    """
    if scale == "paper":
        return dict(values)
    rule = _rule(scale)
    sections: dict[str, Any] = merged(values, rule["merged"]) | rule["replaced"]
    for section, limits in rule["most"].items():
        sections[section] = _limited(sections[section], limits)

    results = Path(values["results"])
    sections["policies"] = {
        name: _scaled_policy(name, {**policy, **rule["policies"]}, results)
        for name, policy in values["policies"].items()
    }
    sections["agents"] = {
        name: {**agent, **rule["agents"]} for name, agent in values["agents"].items()
    }
    sections["data"] = _scaled_data(sections["data"], results)
    retriever = values.get("retriever") or {}
    if retriever.get("urls") or retriever.get("folder"):
        sections["retriever"] = {"passages": str(results / _CORPUS)}
    sections["reward"] = _scaled_reward(sections["reward"], has_coach=bool(values.get("coach")))
    if values.get("coach"):
        sections["coach"] = None
    return sections


def drawn_reward(turn: Turn) -> float:
    """Return a number in [0, 1) that depends on the reply alone.

    Random models solve nothing, and nothing is trained where all rewards are equal.
    """
    return crc32(repr(tuple(turn.completion_ids)).encode()) / 2**32


# Key of `drawn_reward` in `reward.penalties`: the path that a run imports it by.
_DRAWN_REWARD_PATH = f"{__name__}:{drawn_reward.__name__}"


@cache
def _rule(scale: str) -> dict[str, Any]:
    """Read the rules of a scale; the comments of its file say what each key does."""
    return read_yaml(SHIPPED / "workflow" / "scales" / f"{scale}.yaml")  # type: ignore[no-any-return]


def _limited(value: Any, limits: Mapping[str, int]) -> Any:
    """Return a copy of a part of a section, with integers at any depth capped at the limits of their keys."""
    if isinstance(value, list | tuple):
        return [_limited(item, limits) for item in value]
    if not isinstance(value, Mapping):
        return value
    limited = {}
    for key, item in value.items():
        if key in limits and type(item) is int:  # bool is a subclass of int
            limited[key] = min(item, limits[key])
        else:
            limited[key] = _limited(item, limits)
    return limited


def _scaled_policy(name: str, policy: Mapping[str, Any], results: Path) -> dict[str, Any]:
    """Return a policy with its model below the results folder, and its critic at a constant learning rate.

    Of its overrides, only those of the loss stay.

    Args:
        policy: the policy with the settings of the scale, which make its own learning rate constant.

    Raises:
        ConfigError: the policy is a remote model.
    """
    if policy.get("remote"):
        raise ConfigError(
            f"policies.{name}: a remote model has no tiny scale; give the policy a model folder in place of remote"
        )
    scaled = {**policy, "model": str(results / policy["model"])}
    if "overrides" in policy:
        scaled["overrides"] = {
            section: settings
            for section, settings in policy["overrides"].items()
            if section not in ("engine", "trainer")
        }
    if policy.get("critic"):
        scaled["critic"] = {**policy["critic"], "warmup_steps": 0, "schedule": "constant"}
    return scaled


def _scaled_reward(reward: Mapping[str, Any], *, has_coach: bool) -> dict[str, Any]:
    """Return the section `reward` with `drawn_reward` as a penalty, and without the scores of a coach."""
    # A penalty may be any function of a turn; the number that it returns is added to the reward.
    penalties = {**reward.get("penalties", {}), _DRAWN_REWARD_PATH: {}}
    scaled = {**reward, "penalties": penalties}
    if has_coach:
        scaled["name"] = "shared_outcome"
        scaled["options"] = {}
    return scaled


def _scaled_data(data: Mapping[str, Any], results: Path) -> dict[str, Any]:
    if data.get("generator") == "dsbench":
        # Its files may not be redistributed. Generated tables are played in the same way.
        return {**data, "generator": "tabular", "options": {}}
    if data.get("generator"):
        return dict(data)
    scaled = dict(data)
    for split in SPLITS:
        scaled[split] = _scaled_files(data[split], data.get("format"), results)
    return scaled


def _scaled_files(files: Any, default_format: str | None, results: Path) -> Any:
    """Return the files of a split with paths below the results folder, where the pipeline generates tiny files.

    Each file is also given a low limit of tasks.
    """
    if isinstance(files, list | tuple):
        return [_scaled_files(file, default_format, results) for file in files]
    file = files if isinstance(files, Mapping) else {"path": files}
    path = str(results / file["path"])
    if file.get("format", default_format) == "search":
        # Scores are reported for each source of a search file, so a task of every source is kept.
        return {**file, "limit": None, "limit_per_source": 1, "path": path}
    limit = min(file.get("limit") or _TASKS_PER_FILE, _TASKS_PER_FILE)
    return {**file, "limit": limit, "path": path}
