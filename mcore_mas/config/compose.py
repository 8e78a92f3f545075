"""Composition of a run's config.

Hydra composes the groups (`team`, `loss`, `engine`, …) that a run chooses. Then the settings of the experiment, those
of the recipes and the overrides are applied, in this order. Agents without a policy are assigned one, the ids of
downloaded models and data sets are replaced by their folders, the rules of the scale are applied, and pydantic checks
the result.
"""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mcore_mas.config.assignment import assign_policies
from mcore_mas.config.experiments import (
    CONFIGS,
    GROUPS,
    Expansion,
    check_config_file,
    check_mapping,
    expand_experiment,
    expand_recipe,
    find_config,
)
from mcore_mas.config.hub import use_downloads
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.config.scale import at_scale
from rollout.base.hints import nearest_hint
from rollout.base.nested import merged
from rollout.base.text import escape_line

DEFAULT_EXPERIMENT = "demo_math"


class ShippedConfigs(SearchPathPlugin):
    """Hydra plugin that makes the shipped configs the last folder in which Hydra looks for a config."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the shipped configs to Hydra's search path."""
        search_path.append(provider="mcore-mas", path=f"file://{CONFIGS}")


Plugins.instance().register(ShippedConfigs)


def resolve(
    overrides: Sequence[str],
    folder: Path | None = None,
    scale: str = "paper",
    sections: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compose a config from the shipped configs, those of a user's folder, and Hydra overrides, and check it.

    Args:
        overrides: overrides in Hydra's grammar, such as `experiment=demo_math`, `trainer.steps=3`.
        folder: folder of the user's configs; they replace shipped ones of the same name.
        scale: "paper" for the published size, or "tiny"; see `mcore_mas.config.scale`.
        sections: merged into the composed sections (see `_merge_sections`); they set at least `run`, the name by which
            errors call the config. None or {}: nothing is merged.

    Returns:
        The plain values of all sections, with the defaults of settings that no file and no override sets.

    Raises:
        ConfigError: a file is not a config, an override cannot be applied, or the result does not validate.
    """
    folders = (CONFIGS,) if folder is None else (folder.resolve(), CONFIGS)
    origin = f"configs/ with {' '.join(overrides) or 'no overrides'}"
    if sections:
        origin = f"run '{escape_line(str(sections['run']))}'"
    try:
        parsed = [_parse(override) for override in overrides]
        values = _compose(parsed, folders)
        if sections:
            values = _merge_sections(values, sections)
        values = assign_policies(values)
        values = use_downloads(values)
    except HydraException as error:
        raise ConfigError(f"{origin}: {' '.join(str(error).split())}") from error
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        message = str(error).splitlines()[0]
        raise ConfigError(f"{origin}: {key}{message}") from error
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error

    values = _at_scale(values, scale, origin)
    return RunConfig.from_values(values, origin).model_dump(mode="json")


def _at_scale(values: Mapping[str, Any], scale: str, origin: str) -> dict[str, Any]:
    """Return the sections at a scale (see `at_scale`).

    Raises:
        ConfigError: a policy is a remote model, or the sections do not validate.
    """
    try:
        return at_scale(values, scale)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error
    except (AttributeError, KeyError, TypeError):
        # The sections are not validated yet, and a section of a wrong type cannot be scaled. The validation names it.
        RunConfig.from_values(values, origin)
        raise


def _compose(overrides: Sequence[Override], folders: tuple[Path, ...]) -> dict[str, Any]:
    """Compose plain values of all sections; interpolations are resolved.

    Raises:
        ConfigError: a chosen config does not exist, a file cannot be used, or a key to delete is not in the config.
        HydraException: Hydra cannot compose the groups.
        OmegaConfBaseException: an override or an interpolation cannot be applied, or a value is missing (`???`).
    """
    choices, changes = _split_overrides(overrides)
    expansion = Expansion()
    for name in _names(choices.pop("experiment", DEFAULT_EXPERIMENT)):
        expansion = expansion.then(expand_experiment(name, folders))
    for name in _names(choices.pop("recipe", None)):
        expansion = expansion.then(expand_recipe(name, folders))
    choices = {**expansion.choices, **choices}
    _check_choices(choices, folders)

    group_overrides = [_group_override(group, choices[group]) for group in sorted(choices)]
    groups = _compose_groups(
        overrides=tuple(group_overrides),
        folder=folders[0],
        files_hash=_files_hash(folders),
    )
    config = OmegaConf.create(merged(groups, expansion.settings))
    for override in changes:
        _apply(override, config)
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]


def _split_overrides(overrides: Sequence[Override]) -> tuple[dict[str, Any], list[Override]]:
    """Split overrides into those that choose a config and those that change settings.

    `engine=sglang` chooses a config of the group `engine`. `engine.slots=4` and `engine={slots: 4}` change settings.

    Returns:
        The chosen name or names by group, None for no config of the group; and the overrides that change settings.
    """
    choices: dict[str, Any] = {}
    changes: list[Override] = []
    for override in overrides:
        is_group = override.key_or_group in (*GROUPS, "experiment", "recipe")
        if is_group and not isinstance(override.value(), dict):
            choices[override.key_or_group] = None if override.is_delete() else override.value()
        else:
            changes.append(override)
    return choices, changes


def _check_choices(choices: Mapping[str, Any], folders: Sequence[Path]) -> None:
    """Check that the chosen configs exist, and that their files hold mappings.

    Raises:
        ConfigError: there is no config of this name (the nearest names are listed), or its file cannot be used.
    """
    for group, chosen in choices.items():
        for name in _names(chosen):
            check_mapping(find_config(group, name, folders))


@lru_cache(maxsize=256)
def _compose_groups(*, overrides: tuple[str, ...], folder: Path, files_hash: int) -> dict[str, Any]:
    """Let Hydra compose config.yaml and its groups from `folder` and, where that lacks a file, the shipped configs.

    A composition takes Hydra a tenth of a second, and most runs of a suite choose the same groups. Results are
    therefore cached until `files_hash` changes. All callers get the same values, so they must not change them.

    Args:
        files_hash: hash of the files of the groups and of those directly in a folder (see `_files_hash`). A change of
            another file, which `defaults` may include from another subfolder, has no effect on a cached result.

    Raises:
        ConfigError: a file cannot be loaded, or its `defaults` is not a list.
        HydraException, OmegaConfBaseException: Hydra cannot compose the files, for example because one includes a
            config that does not exist.
    """
    try:
        with hydra.initialize_config_dir(str(folder), version_base="1.3"):
            config = hydra.compose("config", overrides=list(overrides))
    except yaml.YAMLError as error:  # its message names the file
        raise ConfigError(f"not YAML ({' '.join(str(error).split())})") from error
    except (HydraException, OmegaConfBaseException):
        # `resolve` converts these errors to a ConfigError. Some are subclasses of OSError or ValueError, so the clause
        # below must not catch them.
        raise
    except (OSError, ValueError, RecursionError) as error:
        # The chosen files are mappings (see `_check_choices`); config.yaml, and a file that another one includes by
        # its `defaults`, may be something else.
        message = str(error).splitlines()[0]
        raise ConfigError(
            f"config.yaml or a config of a group cannot be loaded: {message}; expected a mapping of keys in UTF-8, "
            "with a list as its defaults"
        ) from error
    return OmegaConf.to_container(config)  # type: ignore[return-value]


def _files_hash(folders: Sequence[Path]) -> int:
    """Return a hash of the names and the modification times of the files that Hydra may compose.

    These are the files of the groups, and those directly in a folder: config.yaml, and files that its `defaults` may
    include.

    Raises:
        ConfigError: one of these files is not a regular file, or is too large.
    """
    files: list[Path] = []
    for folder in folders:
        files += folder.glob("*.yaml")
        for group in GROUPS:
            files += (folder / group).rglob("*.yaml")
    for file in files:
        check_config_file(file)
    return hash(tuple((file, file.stat().st_mtime_ns) for file in files))


def _group_override(group: str, chosen: Any) -> str:
    """Write a choice as Hydra's override of a group."""
    # config.yaml puts the sections of a team at the top level, which makes `@_global_` a part of the group's key.
    key = "team@_global_" if group == "team" else group
    if chosen is None:
        return f"~{key}"
    if isinstance(chosen, list):
        return f"{key}=[{','.join(chosen)}]"
    return f"{key}={chosen}"


def _names(chosen: Any) -> list[Any]:
    """Return the names in a choice, which is one name, a list of names, or None."""
    if chosen is None:
        return []
    return chosen if isinstance(chosen, list) else [chosen]


@cache
def _overrides_parser() -> OverridesParser:
    """Return Hydra's parser of overrides; creating it for each override would take a third of the parsing time."""
    return OverridesParser.create()


def _parse(text: str) -> Override:
    """Parse an override in Hydra's grammar.

    Raises:
        ConfigError: the text is not an override, or has several values.
    """
    try:
        (override,) = _overrides_parser().parse_overrides([text])
    except OverrideParseException as error:
        raise ConfigError(
            f"'{text}' cannot be read; expected KEY=VALUE, brackets closed, and text with signs such as = or # "
            "in quotes: KEY=\"'a=b'\""
        ) from error
    if override.is_sweep_override():
        raise ConfigError(
            f"{text}: expected one value; a list is KEY=[a,b], and text with a comma is KEY=\"'a,b'\""
        )
    return override


def _apply(override: Override, config: DictConfig) -> None:
    """Set or delete the key of an override in the config.

    A mapping is merged into the section that the config has under this key; any other value replaces the present one.
    A key that the composed files lack can be set too, because it may have a default in the code.

    Raises:
        ConfigError: a key cannot be deleted (see `_delete`), or a key is below a list and is not an index.
        OmegaConfBaseException: the key cannot be set for another reason.
    """
    key = override.key_or_group
    value = override.value()
    if override.is_delete():
        _delete(config, key, value)
        return
    # With this flag, `select` returns None for a name below a list instead of raising. `update` then raises the
    # TypeError below.
    present = OmegaConf.select(config, key, throw_on_resolution_failure=False)
    merge = isinstance(value, dict) and isinstance(present, DictConfig)
    try:
        OmegaConf.update(config, key, value, merge=merge, force_add=True)
    except OmegaConfBaseException:  # some of these errors are also a TypeError or a ValueError
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}: there is a list in this path; write the index of its entry, such as 0, or replace the list"
        ) from error


def _delete(config: DictConfig, key: str, expected: Any) -> None:
    """Delete a key of the config.

    Args:
        expected: the value in `~KEY=VALUE`; None in `~KEY`, which deletes any value.

    Raises:
        ConfigError: the key is not in the config, is an entry of a list, or has another value than the expected one.
    """
    section_key, _, name = key.rpartition(".")
    section = OmegaConf.select(config, section_key) if section_key else config
    if isinstance(section, ListConfig):
        raise ConfigError(f"~{key}: an entry of a list cannot be deleted; replace the list")
    if not isinstance(section, DictConfig) or name not in section:
        hint = nearest_hint(name, map(str, section)) if isinstance(section, DictConfig) else ""
        raise ConfigError(f"~{key}: there is no such key to delete{hint}")
    if expected is not None and expected != section[name]:
        raise ConfigError(
            f"~{key}={expected}: the value is {section[name]}; write ~{key} to delete any value"
        )
    del section[name]


def _merge_sections(values: dict[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the composed sections with `sections` merged into them key by key.

    If a section has another `name` than the composed one, such as another reward, the composed `options` are dropped
    first, because they are options of the old name.
    """
    composed = dict(values)
    for key, section in sections.items():
        composed_section = composed.get(key)
        if not isinstance(composed_section, dict) or not isinstance(section, Mapping):
            continue
        composed_name = composed_section.get("name")
        if section.get("name", composed_name) != composed_name:
            composed[key] = {
                setting: value
                for setting, value in composed_section.items()
                if setting != "options"
            }
    return merged(composed, sections)
