"""Data sets as Hugging Face has them: a hub's id or a folder, and in it the files of a subset and split."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from mcore_mas.rollout.records.files import RecordError

_ALSO = {"validation": ("valid", "val", "dev"), "train": ("training",), "test": ("testing", "eval", "evaluation")}
_DATA = (".parquet", ".jsonl", ".json", ".csv")


def located_dataset(path: str) -> str:
    """`path` itself; of a hub's id that was downloaded (`hf download --repo-type dataset ID`) its folder."""
    if Path(path).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or path.endswith(_DATA):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(path, repo_type="dataset", local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return path


def not_downloaded(path: str) -> str:
    """What to do about a data file or data set that is not there."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.endswith(_DATA):
        return f"nor is it in the hub's cache on this machine: `hf download --repo-type dataset {path}`, or name a file"
    return "name another one"


def dataset_files(folder: Path, subset: str | None, split: str) -> list[Path]:
    """The files of a split in a data set's folder: those that its card names, else those that are called so.

    Raises:
        RecordError: there are none, or the folder has several subsets and `subset` names none of them.
    """
    card = _card(folder)
    if card:
        if subset is None and len(card) > 1:
            card = [one for one in card if one.get("default")] or card
        chosen = [one for one in card if subset in (None, one.get("config_name", "default"))]
        if len(chosen) != 1:
            names = ", ".join(one.get("config_name", "default") for one in card)
            raise RecordError(f"{folder}: subset {subset}; expected one of {names}")
        patterns = _by_split(chosen[0]["data_files"])
        inside = [one for one in patterns.get(split, ()) if ".." not in one and not one.startswith("/")]
        found = [file for pattern in inside for file in sorted(folder.glob(pattern))]
        there: Iterable[str] = patterns
    else:
        below = folder / subset if subset else folder
        files = sorted(file for file in below.rglob("*") if file.suffix in _DATA)
        words = "|".join((split, *_ALSO.get(split, ())))
        called = re.compile(rf"(?<![a-zA-Z0-9])({words})(?![a-zA-Z0-9])")
        found = [file for file in files if called.search(file.relative_to(below).as_posix())]
        there = [file.relative_to(folder).as_posix() for file in files[:9]]
    if not found:
        raise RecordError(f"{folder}: no files of split {split}; there are {', '.join(there) or 'none'}")
    return found


def _card(folder: Path) -> list[dict[str, Any]]:
    """The subsets of a data set's card, README.md, that name their files."""
    from huggingface_hub.repocard import metadata_load

    card = folder / "README.md"
    try:
        values = (metadata_load(card) if card.is_file() else None) or {}
        return [one for one in values.get("configs", ()) if one.get("data_files")]
    except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise RecordError(f"{card}: its head cannot be read ({str(error).splitlines()[0]})") from error


def _by_split(named: Any) -> Mapping[str, list[str]]:
    """Patterns of files by split; what names none is of train."""
    if isinstance(named, Mapping):
        named = [{"split": split, "path": path} for split, path in named.items()]
    if isinstance(named, str) or (isinstance(named, list) and all(isinstance(one, str) for one in named)):
        return {"train": [named] if isinstance(named, str) else named}
    return {one["split"]: [one["path"]] if isinstance(one["path"], str) else one["path"] for one in named}
