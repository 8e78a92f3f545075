"""Experiments, grids and recipes: files of settings that are expanded before Hydra composes the groups of a run.

An experiment is a file `experiment/NAME.yaml`, or a row of such a file that has a `grid`. A recipe is a file
`recipe/NAME.yaml`. `expand_experiment` and `expand_recipe` return an `Expansion`: the config that the file chooses in
each group, and its settings.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from mcore_mas import SHIPPED
from mcore_mas.config.run import ConfigError
from retrieval.regular_files import check_regular
from rollout.base.nested import merged
from rollout.base.yaml_files import read_yaml

CONFIGS = SHIPPED / "configs"
GROUPS = ("team", "advantage", "loss", "engine", "coach", "cluster", "tracking")

_MAX_CONFIG_BYTES = 1 << 17


@dataclass(frozen=True, slots=True)
class Expansion:
    """The config that an experiment or a recipe chooses in each group, and its settings."""

    # Name of a config, or names, by group; None: no config of the group.
    choices: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def then(self, later: "Expansion") -> "Expansion":
        """Return this expansion with the choices and settings of a later one, which win."""
        return Expansion(
            choices={**self.choices, **later.choices},
            settings=merged(self.settings, later.settings),
        )


def experiments(folder: Path = CONFIGS) -> dict[str, Path]:
    """Return the file of each experiment in a folder of configs; all rows of a grid have the file of the grid.

    Raises:
        ConfigError: a file cannot be read or is not YAML, or its grid is not a mapping from texts.
    """
    files = {}
    for file in sorted((folder / "experiment").glob("*.yaml")):
        for name in _experiments_in(file, _modified_ns(file)):
            files[name] = file
    return files


def available_names(group: str) -> list[str]:
    """Return the sorted names of the experiments, the recipes or the configs of a group.

    These are the shipped ones, and those in `configs` of the working directory.

    Raises:
        ConfigError: the file of an experiment cannot be used (see `experiments`).
    """
    return config_names(group, [CONFIGS, Path("configs").resolve()])


def config_names(group: str, folders: Sequence[Path]) -> list[str]:
    """Return the sorted names of the experiments, the recipes or the configs of a group in several folders.

    Raises:
        ConfigError: the file of an experiment cannot be used (see `experiments`).
    """
    names: set[str] = set()
    for folder in folders:
        if group == "experiment":
            names.update(experiments(folder))
        else:
            names.update(file.stem for file in (folder / group).glob("*.yaml"))
    return sorted(names)


def find_config(group: str, name: object, folders: Sequence[Path]) -> Path:
    """Return the file of a recipe or of a group's config; the first folder that has it wins.

    Raises:
        ConfigError: no folder has it; the error lists the nearest names or, if none is near, all names.
    """
    for folder in folders:
        file = folder / group / f"{name}.yaml"
        if file.is_file():
            return file
    raise _unknown_config(group, name, folders)


def expand_experiment(
    name: object, folders: Sequence[Path], included_by: Sequence[object] = ()
) -> Expansion:
    """Expand an experiment: its `defaults` list, then its file's sections, then its row's settings if there is a grid.

    The `defaults` list includes other experiments and chooses the configs of groups. If `_self_` is in the list, the
    sections are applied there. The name of a row of a grid is also the name of its run.

    Args:
        name: name of the experiment.
        folders: folders of configs, of which the first that has the experiment wins.
        included_by: chain of experiments, each of which includes the next one by its `defaults`; the last one
            includes this one.

    Raises:
        ConfigError: the experiment does not exist, or its file cannot be used.
    """
    if name in included_by:
        chain = " -> ".join(map(str, (*included_by, name)))
        raise ConfigError(
            f"experiments cannot include themselves: {chain}; remove one of these from the defaults that name it, or "
            "give your experiment another name"
        )
    file = _experiment_file(name, folders)
    content = _load_config(file)
    inclusion_chain = (*included_by, name)
    if "grid" not in content:
        return _expand_mapping(content, file, folders, inclusion_chain)

    common = {key: value for key, value in content.items() if key not in ("grid", "settings")}
    named_settings = _settings_by_name(content, file)
    expansion = _expand_mapping(common, file, folders, inclusion_chain)
    for value in _row_settings(content["grid"], str(name)):
        expansion = expansion.then(_expand_settings(value, str(name), named_settings, file))
    return expansion.then(Expansion(settings={"run": str(name)}))


def expand_recipe(name: object, folders: Sequence[Path]) -> Expansion:
    """Expand a recipe: the configs of groups in its `defaults`, then its settings.

    Raises:
        ConfigError: the recipe does not exist, or its file cannot be used.
    """
    file = find_config("recipe", name, folders)
    return _expand_mapping(_load_config(file), file)


def expand_braces(pattern: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each name that a pattern such as `t1_{4b,8b}` stands for, with its words from the braces."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    for words in itertools.product(*parts):
        words_in_braces = list(words[1::2])  # parts outside and inside of braces alternate
        yield "".join(words), words_in_braces


def _load_config(file: Path) -> dict[str, Any]:
    """Load a config file with OmegaConf; interpolations stay as they are written.

    All callers get the same cached values, so they must not change them.

    Raises:
        ConfigError: the file is too large, cannot be read or is not YAML, or is not a mapping.
    """
    return _load_cached(file, _modified_ns(file))


def _modified_ns(file: Path) -> int:
    """Return the time of a file's last modification, in nanoseconds since the epoch.

    Raises:
        ConfigError: the file does not exist, for example because the path is a link to a missing file.
    """
    try:
        return file.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(f"{file}: {error}; remove it, or write the config there") from error


def check_config_file(file: Path) -> None:
    """Check a file before Hydra or OmegaConf reads it.

    They would wait for ever for a pipe, and take a minute for a hundred thousand keys.

    Raises:
        ConfigError: the file is not a regular file, or is too large.
    """
    try:
        size = check_regular(file)
    except OSError as error:
        raise ConfigError(f"{file}: {error}; remove it, or write the config there") from error
    if size > _MAX_CONFIG_BYTES:
        raise ConfigError(
            f"{file}: {size} bytes; expected a config of at most {_MAX_CONFIG_BYTES} bytes"
        )


def check_mapping(file: Path) -> None:
    """Check that a config file holds a mapping of keys, or nothing.

    OmegaConf would load a file that holds only a word as a mapping with this word as its key, and many errors of
    OmegaConf and Hydra do not name the file.

    Raises:
        ConfigError: the file is too large, cannot be read or is not YAML, or holds another value.
    """
    check_config_file(file)
    values = _read_yaml(file)
    if values is not None and not isinstance(values, dict):
        raise ConfigError(
            f"{file}: holds a value of type {type(values).__name__}; expected a mapping of keys"
        )


def _read_yaml(file: Path) -> Any:
    """Read a config file with PyYAML's parser in C, which is ten times as fast as OmegaConf's loader.

    Raises:
        ConfigError: the file cannot be read or is not YAML.
    """
    try:
        return read_yaml(file)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not YAML ({' '.join(str(error).split())})") from error
    except OSError as error:
        raise ConfigError(f"{file}: {error}") from error


@lru_cache(maxsize=512)
def _load_cached(file: Path, modified_ns: int) -> dict[str, Any]:
    """Load a config file.

    The time of modification is a key of the cache, so that a modified file is read again.

    Raises:
        ConfigError: the file is too large, cannot be read or is not YAML, or is not a mapping.
    """
    check_mapping(file)
    try:
        values = OmegaConf.to_container(OmegaConf.load(file))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not YAML ({' '.join(str(error).split())})") from error
    return values  # type: ignore[return-value]  # a mapping, as `check_mapping` has found


@lru_cache(maxsize=512)
def _experiments_in(file: Path, modified_ns: int) -> list[str]:
    """Return the names of the experiments in a file: the rows of its grid, or else the name of the file.

    For `modified_ns` see `_load_cached`.

    Raises:
        ConfigError: the file cannot be read or is not YAML, or its grid is not a mapping from texts.
    """
    values = _read_yaml(file)
    if not isinstance(values, dict) or "grid" not in values:
        return [file.stem]
    grid = values["grid"]
    if not isinstance(grid, dict) or not all(isinstance(pattern, str) for pattern in grid):
        raise ConfigError(
            f"{file}: grid is {grid}; expected patterns of names, each with its settings; put a name that is a number "
            "in quotes"
        )
    names: list[str] = []
    for pattern in grid:
        names += [name for name, _ in expand_braces(pattern)]
    return names


def _experiment_file(name: object, folders: Sequence[Path]) -> Path:
    for folder in folders:
        file = experiments(folder).get(str(name))
        if file is not None:
            return file
    raise _unknown_config("experiment", name, folders)


def _unknown_config(group: str, name: object, folders: Sequence[Path]) -> ConfigError:
    names = config_names(group, folders)
    nearest = get_close_matches(str(name), names, n=5, cutoff=0.5)
    hint = f"nearest: {', '.join(nearest)}" if nearest else f"there are: {', '.join(names)}"
    return ConfigError(f"no {group} '{name}' in the configs; {hint}")


def _settings_by_name(content: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the `settings` of a file with a grid.

    Raises:
        ConfigError: they are not a mapping, or a name is not a text.
    """
    settings = content.get("settings") or {}
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{file}: settings is {settings}; expected a mapping from names to settings"
        )
    for name in settings:
        if not isinstance(name, str):
            raise ConfigError(
                f"{file}: settings has the name {name}, of type {type(name).__name__}; expected text; write a "
                "name such as `4` or `on` in quotes"
            )
    return settings


def _row_settings(grid: Mapping[str, Any], name: str) -> list[Any]:
    """Return the settings of a row of a grid, in the order in which they are merged.

    For each pattern that yields the row's name, these are the words that the name takes from the pattern's braces (keys
    of the file's `settings`), then the pattern's value: a key of `settings`, a mapping, a list of both, or None. The
    row `t1_4b` of the pattern `t1_{4b,8b}` has the settings `4b`, then the pattern's value.
    """
    row_settings: list[Any] = []
    for pattern, value in grid.items():
        for row, words in expand_braces(pattern):
            if row == name:
                row_settings += [*words, value]
    return row_settings


def _expand_settings(
    value: Any,
    row: str,
    named_settings: Mapping[str, Any],
    file: Path,
    included_by: Sequence[str] = (),
) -> Expansion:
    """Expand the settings of a row of a grid.

    Args:
        value: a name in `named_settings`, a mapping, a list of both, or None for no settings.
        row: name of the row, for errors.
        named_settings: the file's `settings`, a mapping from names to settings that rows may include.
        file: the file, for errors.
        included_by: chain of names in `named_settings`, each of which includes the next one; the last one has
            this value.

    Raises:
        ConfigError: the value has another type, the file has no settings of this name, settings include themselves,
            or a `defaults` list is malformed.
    """
    if value is None:
        return Expansion()
    if isinstance(value, str):
        if value not in named_settings:
            names = ", ".join(map(str, named_settings)) or "none"
            raise ConfigError(
                f"{file}: grid row '{row}' names settings '{value}', which the file does not have; it "
                f"has: {names}"
            )
        if value in included_by:
            chain = " -> ".join((*included_by, value))
            raise ConfigError(
                f"{file}: settings cannot include themselves: {chain}; remove one of them"
            )
        content = named_settings[value]
        return _expand_settings(content, row, named_settings, file, (*included_by, value))
    if isinstance(value, dict):
        return _expand_mapping(value, file)
    if not isinstance(value, list):
        raise ConfigError(
            f"{file}: grid row '{row}' has settings {value}; expected a mapping, a name in the file's settings, or a "
            "list of these"
        )

    expansion = Expansion()
    for entry in value:
        entry_expansion = _expand_settings(entry, row, named_settings, file, included_by)
        expansion = expansion.then(entry_expansion)
    return expansion


def _expand_mapping(
    content: Mapping[str, Any],
    file: Path,
    folders: Sequence[Path] = (),
    inclusion_chain: Sequence[object] = (),
) -> Expansion:
    """Expand settings and their `defaults` list, in the order of the list.

    An entry that is a name includes the experiment of this name, and an entry `override /GROUP: NAME` chooses the
    config of a group. As in Hydra, `_self_` stands for the settings, which come last if the list has no `_self_`.

    Args:
        content: settings, and maybe a `defaults` list.
        file: the file that they come from, for errors.
        folders: folders of configs, in which experiments of the list are looked up.
        inclusion_chain: chain of experiments, each of which includes the next one by its `defaults`; the last one has
            these settings. (): a recipe or a row of a grid has these settings; its list cannot name experiments.

    Raises:
        ConfigError: `defaults` is not a list, or an entry cannot be used.
    """
    settings = {key: value for key, value in content.items() if key != "defaults"}
    entries = content.get("defaults", [])
    if not isinstance(entries, list):
        raise ConfigError(
            f"{file}: defaults is {entries}; expected a list such as [override /team: chain]"
        )

    if "_self_" not in entries:
        entries = [*entries, "_self_"]

    expansion = Expansion()
    for entry in entries:
        if entry == "_self_":
            expansion = expansion.then(Expansion(settings=settings))
        elif isinstance(entry, str) and inclusion_chain:
            expansion = expansion.then(expand_experiment(entry, folders, inclusion_chain))
        else:
            expansion = expansion.then(Expansion(choices=_chosen_configs(entry, file)))
    return expansion


def _chosen_configs(entry: Any, file: Path) -> dict[str, Any]:
    """Return the chosen config of each group that an entry of a defaults list names as `override /GROUP: NAME`.

    Raises:
        ConfigError: the entry has another form, or there is no such group.
    """
    if not isinstance(entry, dict):
        raise _defaults_error(entry, file)
    choices = {}
    for key, name in entry.items():
        group = str(key).removeprefix("override /")
        if group not in GROUPS or not str(key).startswith("override /"):
            raise _defaults_error(key, file)
        choices[group] = name
    return choices


def _defaults_error(key: Any, file: Path) -> ConfigError:
    return ConfigError(
        f"{file}: '{key}' in defaults; expected `override /GROUP: NAME` with one of the groups "
        f"{', '.join(GROUPS)}, or, at the top level of an experiment's file, the name of another experiment"
    )
