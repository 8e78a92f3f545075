"""Paths in a run's config, made valid when the run is moved, copied, or used from elsewhere."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Folders of which a run's folder has at least one after its first job.
_STAGE_FOLDERS = ("tasks", "base", "bootstrap", "train", "evaluation")
_SQLITE = "sqlite:///"


def relocate_paths(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Rewrite the paths of a run's config so that they are valid from the working directory.

    The paths in the file are relative to the project: the directory from which the run was started.
    Nothing changes if `results` and `run`, read from the working directory, name the present folder
    of the run. Otherwise every path to a file of the run is replaced by its path in the present
    folder, and `results` and `run` are set to this folder.

    If the project is known (see `_project_of`), the paths of its other files and SQLite databases
    become absolute too (see `_relocate_text`), and the project is added to sys.path for the modules
    of the user's team. Otherwise, as after the folder was renamed, all other paths stay as they are.

    Args:
        values: values that were read from the file.
        file: config.yaml in the run's folder; the values of any other file are unchanged.
    """
    folder = file.resolve().parent
    configured_folder = _configured_folder(values)
    if configured_folder is None or file.name != "config.yaml" or not _is_run_folder(folder):
        return dict(values)
    if configured_folder.exists() and configured_folder.samefile(folder):
        return dict(values)

    project = _project_of(folder, configured_folder)
    if project is not None and str(project) not in sys.path:
        sys.path.append(str(project))

    def relocate(text: str) -> str:
        return _relocate_text(
            text, folder=folder, configured_folder=configured_folder, project=project
        )

    relocated = _map_texts(values, relocate)
    return {**relocated, "results": str(folder.parent), "run": folder.name}


def _relocate_text(
    text: str, *, folder: Path, configured_folder: Path, project: Path | None
) -> str:
    """Return a text of the config, with its path made valid from the working directory if it is a path.

    Args:
        text: a path, the URL of a SQLite database, or any other text, such as a name or a prompt.
        folder: present folder of the run.
        configured_folder: the run's folder as its config names it.
        project: the run's project, or None if it is not known (see `_project_of`).
    """
    is_sqlite_url = text.startswith(_SQLITE)
    prefix = _SQLITE if is_sqlite_url else ""
    path = Path(text.removeprefix(_SQLITE))
    if path.is_relative_to(configured_folder):
        return prefix + str(folder / path.relative_to(configured_folder))

    if project is None:
        return text
    if is_sqlite_url:  # always a path, even if the database does not exist yet
        return prefix + str(project / path)

    # Any other text counts as a path only if it has a slash (a text without one may be a name), and names a file or
    # folder of the project.
    if "/" not in text or not _exists(project / path):
        return text
    return str(project / path)


def _configured_folder(values: Mapping[str, Any]) -> Path | None:
    """Return the run's folder as the config names it, or None if it names none."""
    results = values.get("results")
    run = values.get("run")
    if isinstance(results, str) and isinstance(run, str):
        return Path(results, run)
    return None


def _is_run_folder(folder: Path) -> bool:
    """Return True if a stage of a run has written to the folder."""
    return any((folder / name).is_dir() for name in _STAGE_FOLDERS)


def _project_of(folder: Path, configured_folder: Path) -> Path | None:
    """Return the project of a run: `folder` without the `configured_folder` at its end.

    Args:
        folder: present folder of the run.
        configured_folder: the run's folder as its config names it, relative to the project.

    Returns:
        None if `folder` does not end with `configured_folder`, because it was moved, copied or renamed, or if
        `configured_folder` is absolute.
    """
    depth = len(configured_folder.parts)
    if configured_folder.is_absolute() or folder.parts[-depth:] != configured_folder.parts:
        return None
    return Path(*folder.parts[:-depth])


def _exists(path: Path) -> bool:
    """Return True if a path exists; False also for a text that can be no path, such as a prompt."""
    try:
        return path.exists()
    except OSError:  # the name is too long
        return False


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return nested values with every text replaced by `change(text)`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_texts(item, change) for item in value]
    return value
