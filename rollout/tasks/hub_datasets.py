"""Data sets of the Hugging Face hub: their folder on this machine, and the files of a split."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rollout.base.hints import nearest_hint
from rollout.records.files import RecordError
from rollout.tasks.rows import READERS

# Further names of a split in file names.
_SPLIT_ALIASES = {
    "validation": ("valid", "val", "dev"),
    "train": ("training",),
    "test": ("testing", "eval", "evaluation"),
}

# Number of files that an error message names.
_MAX_NAMED_FILES = 9


def locate_dataset(path: str) -> str:
    """Return the path of a data set, with "~" expanded.

    Args:
        path: path of a file or folder, or the id of a data set on the hub. If a data set with this
            id was downloaded, its folder is returned; otherwise the id itself.
    """
    if path.startswith("~/"):
        path = str(Path(path).expanduser())
    if Path(path).exists() or not _is_hub_id(path):
        return path

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(path, repo_type="dataset", local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return path


def missing_data_hint(path: str) -> str:
    """Return advice for the error that a data file or a data set is missing."""
    if _is_hub_id(path):
        return (
            "nor is it in the hub's cache on this machine: "
            f"`hf download --repo-type dataset {path}`, or name a file"
        )
    folder = Path(path).parent
    files = [str(file) for file in folder.glob("*") if file.name.endswith(tuple(READERS))]
    return f"name another one{nearest_hint(path, files)}"


def _is_hub_id(path: str) -> bool:
    """Return True if a path may be the id of a data set on the hub, such as "openai/gsm8k"."""
    has_data_suffix = path.endswith(tuple(READERS))
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", path)) and not has_data_suffix


def dataset_files(folder: Path, subset: str | None, split: str) -> list[Path]:
    """Return the files of a split in a data set's folder.

    They are those that the card of the data set names or, if it names none, those whose path has
    a name of the split.

    Args:
        folder: folder of the data set.
        subset: name of a subset; None: the default one, or the only one.
        split: name of the split.

    Raises:
        RecordError: there are no such files, or `subset` does not say which of the subsets.
    """
    subsets = _subsets_in_card(folder)
    if subsets:
        patterns = _patterns_by_split(_choose_subset(folder, subsets, subset)["data_files"])
        files = _matching_files(folder, patterns.get(split, ()))
        existing = list(patterns)
    else:
        subset_folder = folder / subset if subset else folder
        all_files = sorted(file for file in subset_folder.rglob("*") if file.suffix in READERS)
        files = _files_named_after(split, subset_folder, all_files)
        existing = [file.relative_to(folder).as_posix() for file in all_files[:_MAX_NAMED_FILES]]
    if not files:
        raise RecordError(
            f"{folder}: no files of split {split}; there are {', '.join(existing) or 'none'}"
        )
    return files


def _matching_files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files that match patterns of a card; a pattern that leaves the folder has none."""
    files = []
    for pattern in patterns:
        leaves_folder = ".." in pattern or pattern.startswith("/")
        if not leaves_folder:
            files += sorted(folder.glob(pattern))
    return files


def _files_named_after(split: str, folder: Path, files: Iterable[Path]) -> list[Path]:
    """Return the files in a folder whose path has a name of the split as a word."""
    names = "|".join((split, *_SPLIT_ALIASES.get(split, ())))
    split_name = re.compile(rf"(?<![a-zA-Z0-9])({names})(?![a-zA-Z0-9])")
    return [file for file in files if split_name.search(file.relative_to(folder).as_posix())]


def _subsets_in_card(folder: Path) -> list[dict[str, Any]]:
    """Return the subsets in a data set's card, README.md, that name their files."""
    from huggingface_hub.repocard import metadata_load

    card = folder / "README.md"
    try:
        metadata = metadata_load(card) if card.is_file() else None
        subsets = (metadata or {}).get("configs", ())
        return [subset for subset in subsets if subset.get("data_files")]
    except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise RecordError(
            f"{card}: its YAML metadata cannot be read ({str(error).splitlines()[0]})"
        ) from error


def _choose_subset(folder: Path, subsets: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """Return the subset with a name; without one, the default or only subset."""
    if name is None and len(subsets) > 1:
        subsets = [subset for subset in subsets if subset.get("default")] or subsets
    matching = [
        subset for subset in subsets if name in (None, subset.get("config_name", "default"))
    ]
    if len(matching) != 1:
        names = ", ".join(subset.get("config_name", "default") for subset in subsets)
        problem = "has several subsets" if name is None else f"has no subset '{name}'"
        raise RecordError(f"{folder}: {problem}; set subset to one of {names}")
    return matching[0]


def _patterns_by_split(data_files: Any) -> Mapping[str, list[str]]:
    """Return the file patterns of a subset by split; files without a split are training data.

    Args:
        data_files: value in the card: a pattern, a list of patterns, patterns by split, or a list
            of entries with `split` and `path`.
    """
    if isinstance(data_files, str):
        return {"train": [data_files]}
    if isinstance(data_files, Mapping):
        data_files = [{"split": split, "path": path} for split, path in data_files.items()]
    if isinstance(data_files, list) and all(isinstance(entry, str) for entry in data_files):
        return {"train": data_files}
    patterns = {}
    for entry in data_files:
        path = entry["path"]
        patterns[entry["split"]] = [path] if isinstance(path, str) else path
    return patterns
