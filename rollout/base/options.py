"""Typed options of objects that a config chooses by name: pydantic models made from signatures.

An option is a keyword-only parameter. Its annotation is its type with bounds (`Annotated[int,
Field(ge=1)]`, `Literal`, `| None`), its default is its default, and its entry under `Args:` in the
docstring describes it. The checks of a config, the JSON schema for editors and the option tables in
docs/ are generated from these signatures.
"""

import dataclasses
import inspect
import re
import sys
import typing
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import pydantic
from pydantic import BaseModel, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticSerializationError, to_json
from pydantic_core.core_schema import CoreSchema

from rollout.base.error_lines import error_below
from rollout.base.errors import OptionsError
from rollout.base.hints import nearest_hint
from rollout.base.lookup import lookup
from rollout.base.section import StrictSection
from rollout.base.signatures import called_function, check_call


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """Registry of one kind of object that a config chooses by name."""

    kind: str  # as errors name it, such as "env"
    registered: Mapping[str, Callable[..., Any]]
    takes: tuple[str, ...]  # names of the positional arguments of the objects
    supplied: frozenset[str] = frozenset()  # keyword arguments that a run passes itself
    coroutine: bool = False  # True if the objects are async functions
    importable: bool = True  # True if a name may be an import path

    def find(self, name: str) -> Callable[..., Any]:
        """Return the object with this name or import path.

        Raises:
            UnknownName: the name is unknown, or its import path cannot be imported.
            OptionsError: an imported object does not take the positional arguments `takes`, or is no
                coroutine function although `coroutine` is True.
        """
        target = lookup(self.kind, name, self.registered, importable=self.importable)
        if name not in self.registered:
            check_call(f"{self.kind} '{name}'", target, self.takes, coroutine=self.coroutine)
        return target

    def model(self, name: str) -> type[BaseModel]:
        """Return a model of the options of the object with this name.

        Raises:
            UnknownName, OptionsError: as `find`; or an option has a type that cannot be read or checked.
        """
        target = self.find(name)
        try:
            return options_model(target, self.supplied)
        except OptionsError as error:
            raise OptionsError(f"{self.kind} '{name}': {error}") from error

    def arguments(
        self, name: str, options: Mapping[str, Any], *, location: tuple[int | str, ...] = ()
    ) -> dict[str, Any]:
        """Validate options and return them as keyword arguments; options that are not given are left out.

        Args:
            location: keys of the options in the config, for the locations of validation errors.

        Raises:
            UnknownName, OptionsError: as `model`; or an option is unknown or missing.
            ValidationError: a value has another type or is out of bounds.
        """
        return validate_options(
            f"{self.kind} '{name}'", self.model(name), options, location=location
        )

    def needs(self, name: str) -> frozenset[str]:
        """Return the keyword arguments among `supplied` that the object cannot do without."""
        parameters = inspect.signature(self.find(name)).parameters
        return frozenset(
            key
            for key in self.supplied & parameters.keys()
            if parameters[key].default is parameters[key].empty
        )


@cache
def options_model(
    target: Callable[..., Any], supplied: frozenset[str] = frozenset()
) -> type[BaseModel]:
    """Make a model of the keyword-only parameters of a callable, without those that are `supplied` by the run.

    Raises:
        OptionsError: the signature or a type cannot be read, or a type cannot be checked.
    """
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError as error:
        raise OptionsError(f"its signature cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in supplied:
            fields[parameter.name] = (_annotation(target, parameter), _default(parameter))
    try:
        with warnings.catch_warnings():
            # pydantic warns about an option with the name of a method of BaseModel.
            warnings.simplefilter("ignore", UserWarning)
            model: type[BaseModel] = pydantic.create_model(
                "Options",
                __config__=StrictSection.model_config,
                **fields,
            )
    except (pydantic.PydanticUserError, NameError, TypeError, ValueError) as error:
        message = " ".join(str(error).split())
        raise OptionsError(f"its options cannot be typed: {message}") from error
    # pydantic makes no field of a name that is private or that it uses itself, such as model_config.
    ignored = fields.keys() - model.model_fields.keys()
    if ignored:
        raise OptionsError(f"'{min(ignored)}' cannot be the name of an option; rename it")
    return model


def validate_options(
    owner: str,
    model: type[BaseModel],
    options: Mapping[str, Any],
    *,
    location: tuple[int | str, ...] = (),
) -> dict[str, Any]:
    """Validate options and return them in the types of a model; options that are not given are left out.

    Args:
        owner: object with the options, as errors name it.
        location: keys of the options in the config, for the locations of validation errors.

    Raises:
        OptionsError: an option is unknown or missing, or not a plain value.
        ValidationError: a value has another type or is out of bounds.
    """
    for name in options:
        if name not in model.model_fields:
            names = ", ".join(model.model_fields) or "none"
            nearest = nearest_hint(name, model.model_fields)
            raise OptionsError(f"{owner} has no option '{name}'; its options: {names}{nearest}")
    for name, field in model.model_fields.items():
        if field.is_required() and name not in options:
            raise OptionsError(f"{owner} needs option '{name}'")
    # Defaults are validated too, because those of a user's function may be wrong.
    plain_defaults = {
        name: field.default
        for name, field in model.model_fields.items()
        if isinstance(field.default, int | float | str)
    }
    try:
        # In strict mode, pydantic accepts a list for a tuple only from JSON.
        json = to_json({**plain_defaults, **options}, inf_nan_mode="constants")
        values = model.model_validate_json(json)
    except PydanticSerializationError as error:
        raise OptionsError(f"{owner}: an option is not a plain value ({error})") from error
    except ValidationError as error:
        raise error_below(error, model, location) from None
    return {name: getattr(values, name) for name in options}


def option_descriptions(target: Callable[..., Any]) -> dict[str, str]:
    """Return the description of each parameter under `Args:` in the docstrings of a callable.

    Descriptions that several functions share are read from `Options:` (or `Args:`) in the docstring of
    the module. Those of base classes override them, and those of the callable override both.
    """
    descriptions: dict[str, str] = {}
    classes = reversed(getattr(target, "__mro__", (target,)))
    for documented in (inspect.getmodule(called_function(target)), *classes):
        parts = re.split(r"\n(?:Args|Options):\n", inspect.getdoc(documented) or "", maxsplit=1)
        section = parts[1].partition("\n\n")[0] if len(parts) == 2 else ""
        entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n     +.*)*)", section, re.MULTILINE)
        for names, text in entries:
            for name in names.split(", "):
                descriptions[name] = " ".join(text.split())
    return descriptions


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a model; for a type that JSON lacks, any value is valid."""
    return model.model_json_schema(schema_generator=_AnythingForUnknownTypes)


class _AnythingForUnknownTypes(GenerateJsonSchema):
    """Generator of JSON schemas in which a type that JSON lacks may be any value."""

    def handle_invalid_for_json_schema(
        self, schema: CoreSchema, error_info: str
    ) -> JsonSchemaValue:
        try:
            return super().handle_invalid_for_json_schema(schema, error_info)
        except PydanticInvalidForJsonSchema:
            return {}


def _default(parameter: inspect.Parameter) -> Any:
    if parameter.default is parameter.empty:
        return ...
    if isinstance(parameter.default, Mapping):
        return dict(parameter.default)  # pydantic cannot copy a mappingproxy
    return parameter.default


def _annotation(target: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the type of a parameter; without an annotation, the type of its default if it is plain."""
    if parameter.annotation is parameter.empty:
        plain = type(parameter.default)
        return plain if plain in (bool, int, float, str) else Any

    # A string annotation is evaluated in the module that contains it.
    scope = getattr(called_function(target), "__globals__", {})
    if dataclasses.is_dataclass(target) and isinstance(target, type):
        for owner in target.__mro__:
            if parameter.name in vars(owner).get("__annotations__", {}):
                scope = vars(sys.modules[owner.__module__])
                break
    annotated = SimpleNamespace(__annotations__={"type": parameter.annotation})
    try:
        return typing.get_type_hints(annotated, scope, include_extras=True)["type"]
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise OptionsError(
            f"option '{parameter.name}' has the type {parameter.annotation}, which cannot be read at run time "
            f"({error}); import it outside TYPE_CHECKING"
        ) from error
