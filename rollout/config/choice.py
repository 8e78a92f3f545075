"""Sections of a config that choose something by name and set its options."""

from collections.abc import Callable, Collection, Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from rollout.base.hints import nearest_hint
from rollout.base.options import Registry
from rollout.base.section import Section

OptionsByName = dict[str, dict[str, Any]]


class Choice(Section):
    """A choice by name, with options that are typed by the signature of the chosen callable."""

    registry: ClassVar[Registry]  # of the callables

    name: str
    options: dict[str, Any] = Field(default_factory=dict, validate_default=True)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        cls.registry.model(name)
        return name

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "name" in info.data:
            cls.registry.arguments(info.data["name"], options)
        return options

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The options as keyword arguments, in the types of the parameters."""
        return self.registry.arguments(self.name, self.options)

    @cached_property
    def call(self) -> Callable[..., Any]:
        """The chosen callable with its options filled in."""
        return partial(self.registry.find(self.name), **self.arguments)

    def model_post_init(self, _: Any) -> None:
        """Fill in the options when the config is read, because `call` is used in every step."""
        _ = self.call


def check_options_by_name(registry: Registry, options: OptionsByName) -> OptionsByName:
    """Validate the options of several choices from one registry; return them unchanged.

    Raises:
        UnknownName, OptionsError, ValidationError: as `Registry.arguments`.
    """
    for name, options_of_choice in options.items():
        registry.arguments(name, options_of_choice, location=(name,))
    return options


def check_agent_names(owner: str, options: Mapping[str, Any], team: Collection[str]) -> None:
    """Refuse options that name an agent who is not in the team.

    Every key of a mapping and every string in a list counts as the name of an agent.

    Raises:
        ValueError: an option names such an agent; the error begins with `owner`.
    """
    for option, value in options.items():
        if not isinstance(value, dict | list | tuple):
            continue
        for name in value:
            if isinstance(name, str) and name not in team:
                raise ValueError(
                    f"{owner}: {option} names agent '{name}', who is not in the team; "
                    f"agents: {', '.join(team)}{nearest_hint(name, team)}"
                )
