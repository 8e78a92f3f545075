"""Local folders of the models and data sets that a config names by their id on the Hugging Face Hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.tasks.hub_datasets import locate_dataset
from rollout.tasks.splits import SPLITS


def downloaded_model(model: str) -> str:
    """Return the folder of a model that is named by a path or by its id on the Hub.

    The folder of an id is the snapshot in this machine's cache. The id of a model that was not
    downloaded is returned as it is, and so is a path, in which only `~/` is expanded.
    """
    if model.startswith("~/"):
        model = str(Path(model).expanduser())
    if Path(model).exists() or model.count("/") != 1:  # an id is OWNER/NAME
        return model
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a path such as `../mine`
        return model
    return str(Path(file).parent) if isinstance(file, str) else model


def use_downloads(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a composed config in which the ids of downloaded models and data sets are replaced by folders."""
    sections = dict(values)
    policies = sections.get("policies")
    if isinstance(policies, dict):
        sections["policies"] = {name: _with_model_folder(policies[name]) for name in policies}
    data = sections.get("data")
    if isinstance(data, dict):
        splits = {split: _with_dataset_folders(data[split]) for split in SPLITS if split in data}
        sections["data"] = {**data, **splits}
    return sections


def _with_model_folder(policy: Any) -> Any:
    if not isinstance(policy, dict) or not isinstance(policy.get("model"), str):
        return policy
    return {**policy, "model": downloaded_model(policy["model"])}


def _with_dataset_folders(source: Any) -> Any:
    """Replace the ids of downloaded data sets by their folders in the value of a split.

    In other paths only `~/` is expanded. A number of tasks is returned as it is.
    """
    if isinstance(source, list):
        return [_with_dataset_folders(entry) for entry in source]
    if isinstance(source, dict) and isinstance(source.get("path"), str):
        return {**source, "path": locate_dataset(source["path"])}
    if isinstance(source, str):
        return locate_dataset(source)
    return source
