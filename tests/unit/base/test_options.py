"""Options are typed by the signature of the function that takes them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from rollout.base.errors import OptionsError
from rollout.base.lookup import UnknownName
from rollout.base.options import Registry, option_descriptions, options_model, validate_options
from rollout.rewards.penalties import invalid_reply

if TYPE_CHECKING:
    from decimal import Decimal

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prizes:
    """Rewards of a game."""

    win: float = 10.0
    fail: float = -5.0


def play(
    task: object,
    *,
    world: object,
    max_turns: Annotated[int, Field(ge=1)] = 5,
    temperature: Annotated[float, Field(gt=0)] = 1.0,
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=True)] = math.inf,
    order: Literal["sequential", "simultaneous"] = "sequential",
    scaled: bool = True,
    slips: Mapping[str, Share] | None = None,
    clip: tuple[float, float] | None = None,
    agents: Annotated[Sequence[str], Field(min_length=1)] = ("solver",),
    prizes: Prizes = Prizes(),
) -> dict[str, Any]:
    """Play.

    Args:
        max_turns: limit of one game,
            for each agent.
        scaled, clip: scale of the rewards.

    Returns:
        max_moves: nothing.
    """
    return {"task": task, "max_turns": max_turns}


PLAYS = Registry(
    kind="env", registered={"play": play}, takes=("task",), supplied=frozenset({"world"})
)


@pytest.mark.parametrize(
    ("options", "location", "kind"),
    [
        ({"max_turns": "5"}, "max_turns", "int_type"),
        ({"max_turns": -3}, "max_turns", "greater_than_equal"),
        ({"max_turns": 2.5}, "max_turns", "int_type"),
        ({"max_turns": True}, "max_turns", "int_type"),
        ({"max_turns": None}, "max_turns", "int_type"),
        ({"temperature": "hot"}, "temperature", "float_type"),
        ({"temperature": 0}, "temperature", "greater_than"),
        ({"temperature": math.inf}, "temperature", "finite_number"),
        ({"dual_clip": math.nan}, "dual_clip", "greater_than"),
        ({"order": "random"}, "order", "literal_error"),
        ({"scaled": "true"}, "scaled", "bool_type"),
        ({"slips": "often"}, "slips", "dict_type"),
        ({"slips": {"tool": 2}}, "slips.tool", "less_than_equal"),
        ({"clip": [1]}, "clip.1", "missing"),
        ({"clip": [1, 2, 3]}, "clip", "too_long"),
        ({"agents": "solver"}, "agents", "list_type"),
        ({"agents": []}, "agents", "too_short"),
        ({"agents": ["solver", 3]}, "agents.1", "string_type"),
        ({"prizes": {"win": "lots"}}, "prizes.win", "float_type"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_with_its_location(
    options: dict[str, Any], location: str, kind: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        PLAYS.arguments("play", options, location=("env", "options"))
    (error,) = caught.value.errors()
    assert ".".join(map(str, error["loc"])) == f"env.options.{location}"
    assert error["type"] == kind


def test_values_become_the_parameters_types() -> None:
    options = {
        "temperature": 1,
        "clip": [0, 1],
        "agents": ["a"],
        "prizes": {"win": 3},
        "dual_clip": math.inf,
    }
    values = PLAYS.arguments("play", options)
    assert values == {
        "temperature": 1.0,
        "clip": (0.0, 1.0),
        "agents": ["a"],
        "prizes": Prizes(win=3.0),
        "dual_clip": math.inf,
    }
    assert isinstance(values["temperature"], float)
    # Other options are left to the defaults of the function.
    assert list(values) == list(options)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"turns": 3},
            "env 'play' has no option 'turns'; its options: max_turns, temperature, dual_clip, order, scaled, slips, "
            "clip, agents, prizes",
        ),
        (
            {"world": 3},
            "env 'play' has no option 'world'; its options: max_turns, temperature, dual_clip, order, ",
        ),
        (
            {"slips": object()},
            "env 'play': an option is not a plain value (Unable to serialize unknown type: ",
        ),
    ],
)
def test_an_unknown_option_is_refused_with_the_known_options(
    options: dict[str, Any], line: str
) -> None:
    with pytest.raises(OptionsError) as caught:
        PLAYS.arguments("play", options)
    assert str(caught.value).startswith(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fines:
    """Fines in a game."""

    fail: float = 0.0
    late: float = 0.0


def sail(task: object, *, laps: int = 1, fines: Fines | None = None) -> None: ...


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"lap": 1}, "env 'sail' has no option 'lap'; its options: laps, fines; nearest: laps"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_nearest_option(
    options: dict[str, Any], line: str
) -> None:
    with pytest.raises(OptionsError) as caught:
        validate_options("env 'sail'", options_model(sail), options)
    assert str(caught.value) == line


def test_a_misspelt_option_of_a_group_is_refused_with_the_nearest_option() -> None:
    with pytest.raises(ValidationError) as caught:
        validate_options("env 'sail'", options_model(sail), {"fines": {"lat": 1}})
    assert caught.value.errors()[0]["msg"] == "unknown key; nearest: late"


def test_an_option_without_default_is_required() -> None:
    def shop(task: object, *, config: str) -> None: ...

    with pytest.raises(OptionsError, match=r"^env 'shop' needs option 'config'$"):
        validate_options("env 'shop'", options_model(shop), {})


async def relay(task: object) -> None: ...


def open_type(task: object, *, price: Decimal) -> None: ...


def other_names(environment: str, track: object, *, laps: int = 1) -> None: ...


def untyped(task, *, laps=1, colour, cars=()) -> None: ...  # type: ignore[no-untyped-def]


def wrong_default(task: object, *, laps: Annotated[int, Field(ge=1)] = 0) -> None: ...


def hidden(task: object, *, _laps: int = 1) -> None: ...


def shadowed(task: object, *, model_config: int = 1) -> None: ...


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "other_names",
            "env '{}:other_names' must take (task, *, ...), not (environment, track, *, laps=1)",
        ),
        ("relay", "env '{}:relay' must take (task, *, ...) and may not be async"),
        (
            "open_type",
            "env '{}:open_type': option 'price' has the type Decimal, which cannot be read at run time "
            "(name 'Decimal' is not defined); import it outside TYPE_CHECKING",
        ),
        ("hidden", "env '{}:hidden': '_laps' cannot be the name of an option; rename it"),
        (
            "shadowed",
            "env '{}:shadowed': 'model_config' cannot be the name of an option; rename it",
        ),
    ],
)
def test_a_user_function_that_cannot_be_used_is_refused(name: str, line: str) -> None:
    with pytest.raises(OptionsError) as caught:
        PLAYS.arguments(f"{__name__}:{name}", {})
    assert str(caught.value) == line.format(__name__)


def test_an_orchestra_must_be_async() -> None:
    orchestras = Registry(kind="orchestra", registered={}, takes=("task",), coroutine=True)
    assert asyncio.run(orchestras.find(f"{__name__}:relay")("x")) is None
    with pytest.raises(OptionsError, match="as an async function"):
        orchestras.find(f"{__name__}:play")


def test_options_of_user_functions_are_checked_too() -> None:
    with pytest.raises(ValidationError, match="valid integer"):
        PLAYS.arguments(f"{__name__}:play", {"max_turns": "5"})
    untyped_options = {"colour": 3, "cars": ["a"]}  # have neither a type nor a plain default
    options = {"laps": 2, **untyped_options}
    assert PLAYS.arguments(f"{__name__}:untyped", options) == options
    with pytest.raises(ValidationError, match="valid integer"):
        PLAYS.arguments(f"{__name__}:untyped", {"laps": "many", **untyped_options})


def test_the_default_of_a_user_function_is_checked_too() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        PLAYS.arguments(f"{__name__}:wrong_default", {})
    assert PLAYS.arguments(f"{__name__}:wrong_default", {"laps": 2}) == {"laps": 2}


def test_a_registry_can_be_closed_to_import_paths() -> None:
    closed = Registry(kind="loss", registered={"play": play}, takes=("task",), importable=False)
    with pytest.raises(UnknownName, match=r"^unknown loss 'a:b'; known: play$"):
        closed.find("a:b")


class Racer:
    """Class whose objects can be called, like some registered objects."""

    def __call__(self, task: object, *, laps: Annotated[int, Field(ge=1)] = 1) -> None: ...


@pytest.mark.parametrize(
    ("target", "options"),
    [
        (Racer(), {"laps": 0}),
        (partial(play, world=None), {"max_turns": 0}),
        (Prizes, {"win": "x"}),
    ],
    ids=["object", "partial", "class"],
)
def test_objects_partials_and_classes_have_options(
    target: Callable[..., Any], options: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match="1 validation error"):
        validate_options("it", options_model(target, frozenset({"world"})), options)


def test_descriptions_are_the_docstrings() -> None:
    assert option_descriptions(play) == {
        "max_turns": "limit of one game, for each agent.",
        "scaled": "scale of the rewards.",
        "clip": "scale of the rewards.",
    }


def test_a_module_describes_the_options_that_its_functions_share() -> None:
    description = option_descriptions(invalid_reply)["coef"]
    assert description == "size of the penalty of `invalid` or `overlong`."
    assert option_descriptions(invalid_reply)["rules"].startswith("names of the rules that ")
