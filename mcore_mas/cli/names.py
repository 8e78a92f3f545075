"""Command `list`: the names that a config may use."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated

import typer

from mcore_mas.cli.arguments import UsageError
from mcore_mas.cli.data import DATA_PANEL
from rollout.base.hints import nearest_hint
from rollout.base.lookup import entry_points_of

name_commands = typer.Typer()


@dataclass(frozen=True, slots=True)
class NameSource:
    """Registry of the names of one kind.

    Attributes:
        module: module of the registry.
        attribute: its name in the module: a dictionary or sequence of names, or, with `config_group`,
            a function that maps a config group to names.
        kind: kind of the entry points by which installed packages add names; "" if they cannot.
        config_group: folder in configs/ whose files are the names; "" if they are not files.
    """

    module: str
    attribute: str
    kind: str = ""
    config_group: str = ""

    def shipped(self) -> Iterable[str]:
        """Return the names that ship; for a config group, also those of the user's files in configs/."""
        registry = getattr(import_module(self.module), self.attribute)
        return registry(self.config_group) if self.config_group else registry  # type: ignore[no-any-return]

    def installed(self) -> list[str]:
        """Return the names that other installed packages offer, each with its package."""
        if not self.kind:
            return []
        return [
            f"{entry.name}  (of {entry.dist.name if entry.dist else '?'})"
            for entry in entry_points_of(self.kind)
        ]


REGISTRIES = {
    "orchestras": NameSource("rollout.orchestras", "ORCHESTRAS", "orchestra"),
    "envs": NameSource("rollout.environments", "ENVS", "env"),
    "roles": NameSource("rollout.teams.roles", "ROLES", "agent role"),
    "tasks": NameSource("rollout.tasks.generators", "GENERATORS", "task generator"),
    "formats": NameSource("rollout.tasks.files", "READABLE", "data format"),
    "allocators": NameSource("rollout.rewards", "ALLOCATORS", "reward"),
    "penalties": NameSource("rollout.rewards.penalties", "PENALTIES", "penalty"),
    "estimators": NameSource("mcore_mas.equations.advantages", "ESTIMATORS", "advantage"),
    "filters": NameSource("mcore_mas.equations.filters", "FILTERS", "filter"),
    "losses": NameSource("mcore_mas.equations.losses", "LOSSES"),
    "corrections": NameSource("mcore_mas.equations.corrections", "CORRECTIONS"),
    "aggregations": NameSource("mcore_mas.equations.losses", "AGGREGATIONS"),
    "engines": NameSource("rollout.engines.registry", "ENGINES", "engine"),
    "tools": NameSource("rollout.environments", "TOOLS", "tool"),
    "providers": NameSource("rollout.engines.remote.registry", "PROVIDERS"),
    "experiments": NameSource(
        "mcore_mas.config.experiments", "available_names", config_group="experiment"
    ),
    "teams": NameSource("mcore_mas.config.experiments", "available_names", config_group="team"),
    "recipes": NameSource("mcore_mas.config.experiments", "available_names", config_group="recipe"),
}


@name_commands.command("list", rich_help_panel=DATA_PANEL)
def list_names(
    registry: Annotated[
        str | None,
        typer.Argument(help=", ".join(REGISTRIES), autocompletion=lambda: list(REGISTRIES)),
    ] = None,
) -> None:
    """Print the names that a config may use, one a line; without an argument, the registries.

    The key of a config works too: advantage, reward.name, data.generator. Names that an installed
    package offers are followed by the package.
    """
    if registry is None:
        for name in REGISTRIES:
            print(name)
        return
    source = REGISTRIES[_registry_name(registry)]
    for line in sorted([*source.shipped(), *source.installed()]):
        print(line)


def _registry_name(key: str) -> str:
    """Return the name of a registry that the user names, in singular or plural, or by a config key.

    Raises:
        UsageError: there is no such registry.
    """
    word = key.removesuffix(".name").rpartition(".")[2]
    for name, source in REGISTRIES.items():
        singulars = {name.removesuffix("s"), name.removesuffix("es")}
        if source.kind:
            # The last word of a kind is a config key too, such as `generator` of "task generator".
            singulars.add(source.kind.split()[-1])
        plurals = {f"{singular}s" for singular in singulars}
        if word == name or word in singulars | plurals:
            return name
    raise UsageError(
        f"no registry '{key}'; there are: {', '.join(REGISTRIES)}{nearest_hint(word, REGISTRIES)}"
    )
