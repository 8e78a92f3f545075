"""Choices of a config: look-up by name, and typed options, models made from the signatures of what takes them.

An option is a keyword-only parameter. Its annotation is its type and bounds (`Annotated[int, Field(ge=1)]`, `Literal`,
`| None`), its default is its default, and its line under `Args:` in the docstring says what it is. The checks of a
config, the JSON schema for editors and the tables in docs/ are all made from that.
"""

import dataclasses
import importlib
import inspect
import math
import re
import sys
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticSerializationError, to_json

from rollout.base.schema_words import Schema, expected, json_schema, keys_of, meant, walk
from rollout.base.text import nearest

# A text is never read as a number; a whole number will do for a float, and a list for a tuple, as YAML has no other.
STRICT = ConfigDict(
    extra="forbid", strict=True, frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True
)
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # pydantic's names of errors
_T = TypeVar("_T")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# positional arguments with their types; one of the type of another, or with its name, was taken for it
_TYPES = {
    "task": ("Task",),
    "team": ("TeamSession",),
    "env": ("Env", "PlayedEnv", "Episode"),
    "group": ("Group",),
}
_TYPES |= {
    "turn": ("Turn",),
    "turns": ("Turns",),
    "text": ("str",),
    "seed": ("int",),
    "n": ("int",),
}
_TOLD = {"float", "bool", *(kind for kinds in _TYPES.values() for kind in kinds)}


def _above_low(high: float, info: ValidationInfo) -> float:
    low = info.data.get("low", -math.inf)
    if high <= low:
        raise ValueError(f"expected a number above low, which is {low:g}")
    return high


def _different(names: Sequence[str]) -> Sequence[str]:
    if len(set(names)) < len(names):
        raise ValueError("expected a list of different names")
    return names


Share = Annotated[float, Field(ge=0, le=1)]
Names = Annotated[
    Sequence[str],
    Field(min_length=1, json_schema_extra={"uniqueItems": True}),
    AfterValidator(_different),
]
AboveLow = Annotated[
    float, Field(validate_default=True), AfterValidator(_above_low)
]  # than the option `low` before it


class Section(BaseModel):
    """A section of a config: unknown keys are refused, values do not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class Strict(Section):
    """One whose values are not read as another type."""

    model_config = STRICT


class UnknownName(ValueError):
    """A name in a config is neither registered nor an import path."""


class OptionsError(ValueError):
    """Something chosen by name is not called as its kind is, or takes other options."""


HERE: dict[
    str, Any
] = {}  # objects of this process alone, by names as `here:...`, see `mcore_mas.api`


def lookup(kind: str, name: str, known: Mapping[str, _T], *, own: bool = True) -> _T:
    """Return `known[name]`, what an installed package offers as `name`, or what is at the import path `name`.

    A package offers names as entry points of the group `mcore_mas.<kind>`, spaces in the kind being underscores. An
    import path is written "package.module:attribute".

    Args:
        own: whether it may be anything but what is known.

    Raises:
        UnknownName: nothing of that name is registered or offered, and it is no import path that resolves.
    """
    if name in known:
        return known[name]
    if own and name in HERE:
        return HERE[name]  # type: ignore[no-any-return]
    if name.startswith("here:"):
        raise UnknownName(
            f"{kind} '{name}' is an object of the script or notebook that made this run; use the run there, such as "
            "run.chat(), or have the script import the object from a module of its own"
        )
    if own and ":" not in name:
        name = next((entry.value for entry in offered(kind) if entry.name == name), name)
    module, separator, attribute = name.partition(":")
    if not (own and separator):
        more = " (or package.module:attribute)" if own else ""
        raise UnknownName(
            f"unknown {kind} '{name}'{nearest(name, known)}; known: {', '.join(sorted(known))}{more}"
        )
    try:
        found: _T = getattr(importlib.import_module(module), attribute)
        return found
    except Exception as error:  # the module's own code may raise any
        moved = ""
        if str(getattr(error, "name", None)).startswith(
            ("mcore_mas.rollout", "mcore_mas.retrieval")
        ):
            moved = f"; its package is {error.name.removeprefix('mcore_mas.')} since version 0.2.0"  # type: ignore[attr-defined]
        what = (
            ""
            if isinstance(error, ImportError | AttributeError | SyntaxError)
            else f"{type(error).__name__}: "
        )
        said = " ".join(f"{what}{error}".split())
        raise UnknownName(
            f"{kind} '{name}' cannot be imported: {said}{moved or _near(error)}"
        ) from error


def _near(error: Exception) -> str:
    """What `nearest` says of the module or attribute that an import lacks, among those where it looked."""
    if isinstance(error, AttributeError) and error.name:
        return nearest(error.name, dir(error.obj))
    if found := re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error)):
        return nearest(found[1], dir(sys.modules.get(found[2])))
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    package, _, name = error.name.rpartition(".")
    folders = getattr(sys.modules.get(package), "__path__", ()) if package else sys.path
    files = (file for folder in folders for file in Path(folder).glob("*"))
    return nearest(
        name,
        {
            file.stem
            for file in files
            if file.suffix == ".py" or (file.is_dir() and not file.suffix)
        },
    )


def imported(kind: str, name: str, paths: Mapping[str, str]) -> Any:
    """What is at the import path of `name`, or found as `lookup` finds it; imports what that needs."""
    found: Any = lookup(kind, name, paths)
    return lookup(kind, found, {}) if isinstance(found, str) else found


def leaves(
    values: Mapping[str, Any], without: Set[str] = frozenset(), prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting in nested mappings, but those called as one of `without`."""
    for key, value in values.items():
        if key in without:
            continue
        if isinstance(value, Mapping) and value:
            yield from leaves(value, without, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def merged(values: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """`changed` in `values`, mappings key by key; where both have another value `changed` has the word."""
    own = {
        key: merged(values[key], new)
        if isinstance(new, Mapping) and isinstance(values.get(key), Mapping)
        else new
        for key, new in changed.items()
    }
    return {**values, **own}


@cache
def offered(kind: str) -> tuple[EntryPoint, ...]:
    """What installed packages offer of a kind."""
    return tuple(entry_points(group=f"mcore_mas.{kind.replace(' ', '_')}"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """A kind of thing that a config chooses by name: how one is called, and which options it takes."""

    kind: str  # as errors say it: "env"
    known: Mapping[str, Callable[..., Any]]
    takes: tuple[str, ...]  # positional arguments
    supplied: frozenset[str] = (
        frozenset()
    )  # keyword arguments that a run gives to those that take them
    coroutine: bool = False  # whether it is an `async` function
    own: bool = True  # whether an import path may stand for a name

    def find(self, name: str) -> Callable[..., Any]:
        """What `name` stands for.

        Raises:
            UnknownName: nothing is registered as `name`, and it is no import path that may be used here.
            OptionsError: what is found there cannot be called as this kind is.
        """
        found = lookup(self.kind, name, self.known, own=self.own)
        if name not in self.known:
            check_call(f"{self.kind} '{name}'", found, self.takes, coroutine=self.coroutine)
        return found

    def model(self, name: str) -> type[BaseModel]:
        """The options of `name`.

        Raises:
            UnknownName, OptionsError: as `find`; or an option has a type that cannot be read or checked.
        """
        found = self.find(name)
        try:
            return options_model(found, self.supplied)
        except OptionsError as error:
            raise OptionsError(f"{self.kind} '{name}': {error}") from error

    def arguments(
        self, name: str, options: Mapping[str, Any], *, place: tuple[int | str, ...] = ()
    ) -> dict[str, Any]:
        """The `options` of `name` as values of its parameters' types; those not given are left out.

        Args:
            place: keys under which errors say the options stand.

        Raises:
            UnknownName, OptionsError: as `model`; or an option is unknown or missing.
            ValidationError: a value is of another type or out of bounds; the error says what was expected.
        """
        return checked(f"{self.kind} '{name}'", self.model(name), options, place=place)

    def needs(self, name: str) -> frozenset[str]:
        """Which of `supplied` the function of `name` cannot do without."""
        parameters = inspect.signature(self.find(name)).parameters
        return frozenset(
            k
            for k in self.supplied & parameters.keys()
            if parameters[k].default is parameters[k].empty
        )


def check_call(
    what: str,
    found: Any,
    takes: Sequence[str],
    *,
    coroutine: bool = False,
    given: Sequence[str] | None = None,
    yields: bool = False,
) -> None:
    """Refuse what cannot be called with arguments `takes`, in this order, and keywords `given`; None: with options.

    Where it does not say `yields`, generators are refused too.

    Raises:
        OptionsError: `what` must take these, and what it takes instead.
    """
    trouble = _trouble(found, takes, coroutine, given)
    if trouble or (not yields and inspect.isgeneratorfunction(_function(found))):
        trouble = trouble or " and may not yield"
        words = [
            *takes,
            *(["*"] if given or given is None else []),
            *(["..."] if given is None else given),
        ]
        raise OptionsError(f"{what} must take ({', '.join(words)}){trouble}")


def check_methods(what: str, thing: Any, methods: Mapping[str, Sequence[str]]) -> None:
    """`check_call` of methods of a class or object by name, after `async ` where they are, with what each takes.

    Raises:
        OptionsError: a method is not there, or is not called so.
    """
    for written, takes in () if hasattr(thing, "__getattr__") else methods.items():
        kind, _, name = written.rpartition(" ")
        if (method := getattr(thing, name, None)) is None or getattr(
            method, "__isabstractmethod__", False
        ):
            every = " and ".join(f"{one}({', '.join(words)})" for one, words in methods.items())
            raise OptionsError(f"{what} lacks a method {name}; expected {every}")
        if isinstance(thing, type) and inspect.isfunction(inspect.getattr_static(thing, name)):
            method = partial(method, None)  # without its `self`
        check_call(f"{what}: its method {name}", method, takes, coroutine=kind == "async", given=())


def _trouble(found: Any, takes: Sequence[str], coroutine: bool, given: Sequence[str] | None) -> str:
    if not callable(found):
        return f"; it is of type {type(found).__name__}"
    try:
        signature = inspect.signature(found)
        positional = [p for p in signature.parameters.values() if p.kind in _POSITIONAL]
        bound = signature.bind(*takes, **dict.fromkeys(given)) if given is not None else None
        fits = bound is not None or len(positional) == len(takes)
    except ValueError:  # of some that are written in C
        return "; its signature cannot be read" if given is None or coroutine else ""
    except TypeError:
        fits = False
    for parameter, word in zip(positional, takes, strict=False):
        kind = getattr(parameter.annotation, "__name__", str(parameter.annotation)).rpartition(".")[
            2
        ]
        if fits and kind in _TOLD and kind not in _TYPES.get(word, _TOLD):
            return f", and its '{parameter.name}' is of type {kind}"
        vague = kind in ("_empty", "object", "Any")
        fits &= not vague or parameter.name == word or parameter.name not in {*_TYPES, *takes}
    if not fits:
        return f", not {inspect.Signature([p.replace(annotation=p.empty) for p in signature.parameters.values()])}"
    if inspect.iscoroutinefunction(_function(found)) is not coroutine:
        return " as an async function" if coroutine else " and may not be async"
    return ""


@cache
def options_model(
    target: Callable[..., Any], supplied: frozenset[str] = frozenset()
) -> type[BaseModel]:
    """A model of the keyword-only parameters of `target`, without those that are `supplied` at run time.

    Raises:
        OptionsError: a type cannot be read at run time, or values cannot be checked against it.
    """
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name not in supplied:
            default = parameter.default
            default = (
                ...
                if default is parameter.empty
                else dict(default)
                if isinstance(default, Mapping)
                else default
            )
            fields[name] = (_annotation(target, parameter), default)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # an option may have the name of a method of BaseModel
            model: type[BaseModel] = pydantic.create_model("Options", __config__=STRICT, **fields)
    except (pydantic.PydanticUserError, NameError, TypeError, ValueError) as error:
        raise OptionsError(
            f"its options cannot be typed: {' '.join(str(error).split())}"
        ) from error
    if lost := fields.keys() - model.model_fields.keys():
        raise OptionsError(f"'{min(lost)}' cannot be the name of an option; call it otherwise")
    return model


def checked(
    whose: str,
    model: type[BaseModel],
    options: Mapping[str, Any],
    *,
    place: tuple[int | str, ...] = (),
) -> dict[str, Any]:
    """The `options` as values of the types of `model`; those not given are left out.

    Args:
        whose: as errors name it.
        place: keys under which errors say the options stand.

    Raises:
        OptionsError: an option of `whose` is unknown or missing, or no plain value.
        ValidationError: a value is of another type or out of bounds; the error says what was expected.
    """
    for name in options:
        if name not in model.model_fields:
            raise OptionsError(
                f"{whose} has no option '{name}'; its options: {', '.join(model.model_fields) or 'none'}"
                f"{_near_option(name, json_schema(model))}"
            )
    missing = [
        name
        for name, field in model.model_fields.items()
        if field.is_required() and name not in options
    ]
    if missing:
        raise OptionsError(f"{whose} needs option '{missing[0]}'")
    try:
        plain = {
            name: f.default
            for name, f in model.model_fields.items()
            if isinstance(f.default, int | float | str)
        }
        values = model.model_validate_json(to_json({**plain, **options}, inf_nan_mode="constants"))
    except PydanticSerializationError as error:
        raise OptionsError(f"{whose}: an option is no plain value ({error})") from error
    except ValidationError as error:
        raise _explained(error, model, place) from None
    return {name: getattr(values, name) for name in options}


def _near_option(name: str, schema: Schema) -> str:
    """What `nearest` says of an unknown option; of a key of one group of options, where it is."""
    known: Schema = schema.get("properties", {})
    groups = [group for group, part in known.items() if name in keys_of(schema, part)]
    return f"; nearest: {groups[0]}.{name}" if len(groups) == 1 else nearest(name, known)


def _explained(
    error: ValidationError, model: type[BaseModel], place: tuple[int | str, ...]
) -> ValidationError:
    """The `error` of values for `model`, in words that say what was expected."""
    schema = json_schema(model)
    lines = []
    for details in sorted(
        error.errors(include_url=False), key=lambda details: details["type"] not in _UNKNOWN
    ):
        keys, at = walk(schema, meant(details))
        if details["type"] in ("value_error", "option"):
            message = details["msg"].removeprefix("Value error, ")
        elif details["type"] in _UNKNOWN:
            message = (
                f"there is no '{details['loc'][-1]}'; known here: {', '.join(keys_of(schema, at))}"
            )
        elif details["type"].startswith("missing") and isinstance(details["loc"][-1], str):
            keys, message = keys[:-1], f"'{details['loc'][-1]}' is missing"
        else:
            message = f"expected {expected(at, schema.get('$defs', {}), error=details['type'])}"
        said = PydanticCustomError("option", "{message}", {"message": message})
        lines.append(InitErrorDetails(type=said, loc=(*place, *keys), input=details["input"]))
    return ValidationError.from_exception_data(error.title, lines)


def descriptions(target: Callable[..., Any]) -> dict[str, str]:
    """What the docstrings of `target`, its base classes and its module say of each parameter under `Args:`.

    The module's is of an option that several of its functions share; the function's own goes before it.
    """
    found: dict[str, str] = {}
    for documented in (
        inspect.getmodule(_function(target)),
        *reversed(getattr(target, "__mro__", (target,))),
    ):
        _, _, section = (inspect.getdoc(documented) or "").partition("\nArgs:\n")
        for entry in re.findall(
            r"^    (\w[\w, ]*): (.*(?:\n     +.*)*)", section.partition("\n\n")[0], re.MULTILINE
        ):
            found |= dict.fromkeys(entry[0].split(", "), " ".join(entry[1].split()))
    return found


def _function(target: Callable[..., Any]) -> Any:
    """The function that runs when `target` is called."""
    target = inspect.unwrap(target)
    if isinstance(target, type):
        return target.__init__  # type: ignore[misc]
    if hasattr(target, "func"):  # functools.partial
        return _function(target.func)
    return target if inspect.isroutine(target) else type(target).__call__


def _annotation(target: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The type of a parameter, read where its function is defined; where none is written that of a plain default."""
    if parameter.annotation is parameter.empty:
        return kind if (kind := type(parameter.default)) in (bool, int, float, str) else Any
    names = SimpleNamespace(__annotations__={"it": parameter.annotation})
    classes = (
        target.__mro__ if dataclasses.is_dataclass(target) and isinstance(target, type) else ()
    )
    owner = next(
        (c for c in classes if parameter.name in vars(c).get("__annotations__", {})), None
    )  # its field's
    there = (
        vars(sys.modules[owner.__module__])
        if owner
        else getattr(_function(target), "__globals__", {})
    )
    try:
        return typing.get_type_hints(names, there, include_extras=True)["it"]
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise OptionsError(
            f"option '{parameter.name}' has the type {parameter.annotation}, which cannot be read at run time "
            f"({error}); import it outside TYPE_CHECKING"
        ) from error
