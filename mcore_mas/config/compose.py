"""Composition of a run's config: Hydra over the shipped `configs/` and a user's own, grids of experiments, sharing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any, TextIO

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from mcore_mas import SHIPPED
from mcore_mas.config.models import located
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.config.scale import scaled
from mcore_mas.equations.advantages import ESTIMATORS
from rollout.base.files import read_yaml
from rollout.base.options import merged
from rollout.base.schema_words import expected, json_schema, walk
from rollout.base.text import nearest
from rollout.tasks.files import located_dataset
from rollout.tasks.splits import SPLITS

CONFIGS = SHIPPED / "configs"
CHOICES = "choices.yaml"  # of a folder of configs: a table of small ones by group and name
GROUPS = (
    "team",
    "advantage",
    "loss",
    "engine",
    "coach",
    "cluster",
    "tracking",
    "experiment",
    "recipe",
)
_GLOBAL = (
    "team",
    "experiment",
    "recipe",
)  # groups whose files set any section, not the one of their name


def resolve(
    overrides: Sequence[str],
    folder: Path | None = None,
    scale: str = "paper",
    own: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compose the configs of `folder`, if any, and the shipped ones with Hydra overrides, at a scale.

    The values are plain and validated; sections of `own` go into the composed ones, key by key.

    Raises:
        ConfigError: a file is no config, an override names nothing, or the result does not validate.
    """
    folders = [CONFIGS] if folder is None else [folder.resolve(), CONFIGS]
    where = (
        f"run '{own['run']}'" if own else f"configs/ with {' '.join(overrides) or 'no overrides'}"
    )
    try:
        values = scaled(_located(_shared(_over(_composed(overrides, folders), own or {}))), scale)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not YAML ({' '.join(str(error).split())})") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{where}: {_no_mapping(overrides) or uncomposed(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return RunConfig.check(
        values, where, given=[_key(override) for override in overrides]
    ).model_dump(mode="json")


def experiments(folder: Path = CONFIGS) -> dict[str, Path]:
    """The experiments of a folder of configs, each with its file: one by itself, or the grid that it is a row of."""
    files = sorted((folder / "experiment").glob("*.yaml"))
    return {name: file for file in files for name in _names(file, file.stat().st_mtime_ns)}


def names_in(group: str) -> list[str]:
    """The names of a group of configs, the shipped ones and those in `configs` of the current folder."""
    folders = {CONFIGS, Path("configs").resolve()}
    sources = [Folder(Folder.scheme(), str(folder)) for folder in folders if folder.is_dir()]
    return sorted({name for source in sources for name in source.list(group, ObjectType.CONFIG)})


def _composed(overrides: Sequence[str], folders: Sequence[Path]) -> dict[str, Any]:
    """What Hydra makes of `config.yaml`; of a file in several folders it takes the first.

    These are the steps of `load_configuration` without Hydra's own section, which nobody reads and which takes as long,
    and with plain values in place of OmegaConf's, which take as long again, until all files are merged.
    """
    path = ConfigSearchPathImpl()
    for folder in folders:
        path.append(str(folder), f"{Folder.scheme()}://{folder}")
    path.append("schema", "structured://")
    version.setbase("1.3")
    loader = ConfigLoaderImpl(path)
    loader.repository = _Repository(path)
    parsed, repository = loader._parse_overrides_and_create_caching_repo(
        "config", list(map(_forced, overrides))
    )
    loader.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=True)
    choices = [
        (one.key_or_group, one.value())
        for one in parsed
        if one.key_or_group in GROUPS and not one.is_delete()
    ]
    for group, chosen in choices:  # a mapping is no choice, but settings
        for name in (
            chosen
            if isinstance(chosen, list) and chosen
            else [chosen] * (not isinstance(chosen, dict))
        ):
            if not loader.repository.config_exists(f"{group}/{name}"):
                raise ConfigError(
                    _unchosen(group, name, loader.repository.get_group_options(group))
                )
    defaults = create_defaults_list(
        repo=repository,
        config_name="config",
        overrides_list=parsed,
        prepend_hydra=False,
        skip_missing=False,
    )
    parts = (_in_package(default, loader.repository) for default in defaults.defaults)
    composed = OmegaConf.create(_merged(*parts))
    OmegaConf.set_struct(composed, True)
    loader._apply_overrides_to_config(defaults.config_overrides, composed)
    return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[return-value]


def _in_package(default: ResultDefault, repository: ConfigRepository) -> dict[str, Any]:
    """The values of a config that Hydra chose, in the section that they set."""
    path = str(default.config_path)
    folder = repository._find_object_source(path, ObjectType.CONFIG)
    _, made = folder.content(path) if isinstance(folder, Folder) else (None, {})
    values = {key: value for key, value in made.items() if key != "defaults"}
    for section in reversed(default.package.split(".") if default.package else ()):
        values = {section: values}
    return values


def _forced(override: str) -> str:
    """An override that also sets what only has a default in the code; what is no key is for pydantic to say."""
    key = _key(override)
    return override if key.startswith("~") or key in GROUPS else f"++{override.lstrip('+')}"


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


class _Repository(ConfigRepository):
    def __deepcopy__(self, memo: dict[int, Any]) -> _Repository:
        return self  # Hydra copies it, and all configs that it registers itself, before each composition


class Folder(FileConfigSource):
    """A folder of configs, with what has no file of its own: rows of grids and of CHOICES, plain estimators."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self._experiments = experiments(Path(self.path))
        choices = Path(self.path, CHOICES)
        given = _content(choices)[1] if choices.is_file() else {}
        for group, rows in given.items():
            if group not in GROUPS:
                raise ConfigError(
                    f"{choices}: no group '{group}'; groups: {', '.join(GROUPS)}{nearest(group, GROUPS)}"
                )
            if not isinstance(rows, dict) or not all(
                isinstance(row, dict | None) for row in rows.values()
            ):
                raise ConfigError(
                    f"{choices}: {group} is {rows}; expected names, each with its settings"
                )
        self._rows: dict[str, dict[str, Any]] = {
            "advantage": {name: {"name": name} for name in ESTIMATORS},
            **given,
        }

    @staticmethod
    def scheme() -> str:
        """Of the folders on Hydra's search path."""
        return "configs"

    def is_config(self, config_path: str) -> bool:
        """Whether there is such a config; a grid is none itself."""
        group, name = _place(config_path)
        if group == "experiment":
            return name in self._experiments
        return super().is_config(config_path) or name in self._rows.get(group, ())

    def load_config(self, config_path: str) -> ConfigResult:
        """The section that a config sets, and the configs that it is made of; `content` has its values."""
        package, made = self.content(config_path)
        if not isinstance(made.get("defaults", []), list):
            raise ConfigError(
                f"{config_path}: defaults is {made['defaults']}; expected a list: [override /team: NAME]"
            )
        header = {"package": package or ("_global_" if _place(config_path)[0] in _GLOBAL else None)}
        config = OmegaConf.create({"defaults": made["defaults"]} if "defaults" in made else {})
        return ConfigResult(provider=self.provider, path=self.path, config=config, header=header)

    def content(self, config_path: str) -> tuple[str | None, dict[str, Any]]:
        """(the package that its header names, its values).

        Raises:
            ConfigLoadError: there is no such file, or it is no mapping.
        """
        group, name = _place(config_path)
        if group == "experiment":
            package, values = _content(file := self._experiments[name])
            return (None, _row(file, name)) if "grid" in values else (package, values)
        if not super().is_config(config_path) and name in self._rows.get(group, ()):
            return None, self._rows[group][name] or {}
        return _content(Path(self.path, f"{config_path.removesuffix('.yaml')}.yaml"))

    def is_group(self, config_path: str) -> bool:
        """Whether there is such a group of configs."""
        return config_path in self._rows or super().is_group(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The names in a group."""
        made = self._experiments if config_path == "experiment" else self._rows.get(config_path, ())
        return sorted(
            {
                *(
                    super().list(config_path, results_filter)
                    if super().is_group(config_path)
                    else ()
                ),
                *made,
            }
        )


Plugins.instance().register(Folder)


def _place(config_path: str) -> tuple[str, str]:
    group, _, name = config_path.removesuffix(".yaml").rpartition("/")
    return group, name


def _content(file: Path) -> tuple[str | None, dict[str, Any]]:
    """(the package that a file names in its header, its content)."""
    return _read(file, file.stat().st_mtime_ns if file.is_file() else 0)


class _Loader(yaml.cyaml.CParser, get_yaml_loader()):  # type: ignore[misc]
    """OmegaConf's reader of YAML, parsing in C."""

    def __init__(self, stream: TextIO) -> None:
        yaml.cyaml.CParser.__init__(self, stream)
        yaml.constructor.SafeConstructor.__init__(self)
        yaml.resolver.Resolver.__init__(self)


@lru_cache
def _read(file: Path, modified_ns: int) -> tuple[str | None, dict[str, Any]]:
    if not file.is_file():
        raise ConfigLoadError(f"no file {file}")
    values = read_yaml(file, _Loader)
    with file.open(encoding="utf-8") as stream:
        header = ConfigSource._get_header_dict(stream.read(512))
    if not isinstance(values, dict | None):
        raise ConfigLoadError(f"{file}: {type(values).__name__}; expected a mapping of keys")
    return header["package"], values or {}


@lru_cache
def _names(file: Path, modified_ns: int) -> list[str]:
    """The experiments in a file, which was `modified_ns` after the epoch: its rows, or without a grid itself."""
    values = read_yaml(file)
    if not isinstance(values, dict) or "grid" not in values:
        return [file.stem]
    if not isinstance(values["grid"], dict):
        raise ConfigError(
            f"{file}: grid is {values['grid']}; expected patterns of names, each with its settings"
        )
    return [name for pattern in values["grid"] for name, _ in expand_braces(pattern)]


def expand_braces(pattern: str) -> Iterator[tuple[str, list[str]]]:
    """Each name that a pattern such as `t1_{4b,8b}` stands for, with the words that it took from the braces."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    for words in itertools.product(*parts):
        yield "".join(words), list(words[1::2])


def _row(file: Path, name: str) -> dict[str, Any]:
    """A row of a grid: the file without the grid, then the settings of the words in its name, then the row's own."""
    _, content = _content(file)
    grid, settings = content["grid"], content.get("settings", {})
    values = {key: value for key, value in content.items() if key not in ("grid", "settings")}
    pieces = [
        [*words, own]
        for pattern, own in grid.items()
        for row, words in expand_braces(pattern)
        if row == name
    ]
    try:
        return _merged(values, _setting(pieces, settings), {"run": name})
    except KeyError as error:
        known = ", ".join(settings)
        raise ConfigError(
            f"{file}: '{name}' takes {error}; expected one of settings: {known}"
        ) from error


def _setting(piece: Any, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a piece of a row sets: written out, named in `settings`, or a list of both."""
    if isinstance(piece, str):
        return _setting(settings[piece], settings)
    return (
        _merged(*(_setting(part, settings) for part in piece))
        if isinstance(piece, list)
        else piece or {}
    )


def _merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings one into the other; the last has the word."""
    lists = [part["defaults"] for part in parts if "defaults" in part]
    out: dict[str, Any] = {}
    for part in parts:
        out = merged(out, part)
    return out | {"defaults": reduce(_joined, lists, [])} if lists else out


def _over(values: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` in `values`; a section that names another thing begins without the options of the one before."""
    for key, section in own.items():
        before = values.get(key)
        if isinstance(before, dict) and isinstance(section, Mapping):
            named = before.get("name")
            if section.get("name", named) != named:
                before.pop("options", None)
    return _merged(values, own)


def _joined(first: Sequence[Any], last: Sequence[Any]) -> list[Any]:
    """Defaults lists in one, as Hydra reads them: of included configs the last has the word, of overrides the first."""
    mappings = (item for item in (*last, *first) if isinstance(item, Mapping))
    over = [item for item in mappings if str(next(iter(item))).startswith("override ")]
    return [*(item for item in (*first, *last) if item not in over), *over]


def _shared(values: dict[str, Any]) -> dict[str, Any]:
    """Give each agent without a policy that of `sharing`, and these policies `policy_defaults`."""
    if lacks := [key for key in ("orchestra", "env", "reward", "agents") if key not in values]:
        raise ConfigError(
            f"no team: {', '.join(lacks)} missing; choose one by `defaults: [override /team: NAME]` in the experiment "
            "or team=NAME, or write orchestra, env, reward and agents"
        )
    sharing, partly = values.pop("sharing", "shared"), values.pop("partly", None)
    defaults, policies = values.pop("policy_defaults", {}), values.get("policies") or {}
    agents = values.get("agents")
    if not isinstance(agents, dict) or not all(
        isinstance(agent, dict) for agent in agents.values()
    ):
        return values  # pydantic says what is wrong with them
    known = {
        "shared": dict.fromkeys(agents, "shared"),
        "separate": {name: name for name in agents},
        "partly": partly,
    }
    named = known.get(sharing) if isinstance(sharing, str) else sharing
    if not isinstance(named, dict) or named.keys() != agents.keys():
        expected = [name for name, policy in known.items() if policy]
        raise ConfigError(
            f"sharing is {sharing}; expected {', '.join(expected)}, or a policy for each of {', '.join(agents)}"
        )
    values["agents"] = {
        name: {**agent, "policy": agent.get("policy", named[name])}
        for name, agent in agents.items()
    }
    if not isinstance(defaults, dict):
        raise ConfigError(
            f"policy_defaults is {defaults}; expected keys of a policy, for example lr: 1.0e-6"
        )
    if defaults and isinstance(policies, dict):
        played = [
            agent["policy"]
            for agent in values["agents"].values()
            if agent["policy"] in named.values()
        ]
        values["policies"] = {
            name: _merged(defaults, policies.get(name) or {})
            for name in dict.fromkeys([*played, *policies])
        }
    return values


def _located(values: dict[str, Any]) -> dict[str, Any]:
    """With the folder of each hub's id, of models and data sets, that is in this machine's cache."""
    policies = values.get("policies")
    for policy in policies.values() if isinstance(policies, dict) else ():
        if isinstance(policy, dict) and isinstance(policy.get("model"), str):
            policy["model"] = located(policy["model"])
    data = values.get("data")
    if isinstance(data, dict):
        values["data"] = {
            key: _located_file(value) if key in SPLITS else value for key, value in data.items()
        }
    return values


def _located_file(file: Any) -> Any:
    """The same for a data file, or a list of them, each by its path or with one."""
    if isinstance(file, list):
        return [_located_file(one) for one in file]
    if isinstance(file, dict) and isinstance(file.get("path"), str):
        return {**file, "path": located_dataset(file["path"])}
    return located_dataset(file) if isinstance(file, str) else file


# what Hydra and OmegaConf say, and what it means
_MEANT = (
    (
        r"Could not override '([^'@]+)",
        f"defaults override '{{}}', no group{{near}}; there are: {', '.join(GROUPS)}",
    ),
    (
        r"Could not delete(?: from config\.)? '([^'=]+)",
        "~{}: there is no such key to take out{near}",
    ),
    (
        r"Ambiguous value for argument '\+*(\S+)'",
        "{}: expected one value; a list is KEY=[a,b], text KEY=\"'a,b'\"",
    ),
    (
        r"Missing mandatory value: .* full_key: (\S+)",
        "{} is ???, which is to be set; give it a value",
    ),
    (r"(.*resolving interpolation: )?(?P<said>.*) full_key: (?P<key>\S+)", "{key}: {said}"),
)


def uncomposed(error: Exception) -> str:
    """Why Hydra could not compose values."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return _unchosen(group, name, error.options)
    if isinstance(error, OverrideParseException):
        written = error.override.removeprefix("++")
        return f"'{written}' cannot be read; expected KEY=VALUE, brackets closed, and text with other signs in quotes"
    said = " ".join(str(error).split())
    for pattern, words in _MEANT:
        if found := re.search(pattern, said):
            near = (
                ""
                if "." in str(found[1])
                else nearest(str(found[1]), {*GROUPS, *RunConfig.model_fields})
            )
            return words.format(*found.groups(), **found.groupdict(), near=near)
    return said


def _unchosen(group: str, name: object, known: Sequence[str]) -> str:
    near = get_close_matches(str(name), known, n=5, cutoff=0.5)
    which = f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(known)}"
    return f"no {group} '{'null' if name is None else name}' in the configs; {which}"


def _no_mapping(overrides: Sequence[str]) -> str:
    """What is wrong with the first override that sets a section to something else than a mapping; "" without one."""
    schema = json_schema(RunConfig)
    for override in overrides:
        key, value = _key(override), override.partition("=")[2]
        keys, at = walk(schema, tuple(key.split(".")))
        words = expected(at, schema["$defs"]) if ".".join(map(str, keys)) == key else ""
        if words.startswith("a mapping") and not value.startswith(("{", "$", "null")):
            return f"{key}: expected {words} (got {value})"
    return ""
