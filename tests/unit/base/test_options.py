"""Options are typed by the signature of what takes them: one row for every kind of wrong value."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from rollout.base.options import (
    OptionsError,
    Registry,
    UnknownName,
    check_call,
    check_methods,
    checked,
    descriptions,
    lookup,
    offered,
    options_model,
)
from rollout.rewards.penalties import invalid_reply

if TYPE_CHECKING:
    from decimal import Decimal

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prizes:
    """What is won and lost."""

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
        max_turns: of one game, at most,
            of any agent.
        scaled, clip: how rewards are.

    Returns:
        max_moves: nothing.
    """
    return {"task": task, "max_turns": max_turns}


PLAYS = Registry(kind="env", known={"play": play}, takes=("task",), supplied=frozenset({"world"}))


@pytest.mark.parametrize(
    ("options", "place", "message"),
    [
        ({"max_turns": "5"}, "max_turns", "expected an integer of at least 1"),
        ({"max_turns": "five"}, "max_turns", "expected an integer of at least 1"),
        ({"max_turns": -3}, "max_turns", "expected an integer of at least 1"),
        ({"max_turns": 2.5}, "max_turns", "expected an integer of at least 1"),
        ({"max_turns": True}, "max_turns", "expected an integer of at least 1"),
        ({"max_turns": None}, "max_turns", "expected an integer of at least 1"),
        ({"temperature": "hot"}, "temperature", "expected a number above 0"),
        ({"temperature": 0}, "temperature", "expected a number above 0"),
        ({"temperature": math.inf}, "temperature", "expected a finite number above 0"),
        ({"dual_clip": math.nan}, "dual_clip", "expected a number above 1"),
        ({"order": "random"}, "order", "expected one of sequential, simultaneous"),
        ({"scaled": "true"}, "scaled", "expected true or false"),
        ({"slips": "often"}, "slips", "expected a mapping to numbers from 0 to 1 or null"),
        ({"slips": {"tool": 2}}, "slips.tool", "expected a number from 0 to 1"),
        ({"clip": [1]}, "clip", "expected a list of a number, a number or null"),
        ({"clip": [1, 2, 3]}, "clip", "expected a list of a number, a number or null"),
        ({"agents": "solver"}, "agents", "expected a list of texts, not empty"),
        ({"agents": []}, "agents", "expected a list of texts, not empty"),
        ({"agents": ["solver", 3]}, "agents.1", "expected text"),
        ({"prizes": {"win": "lots"}}, "prizes.win", "expected a number"),
        ({"prizes": {"won": 1.0}}, "prizes", "there is no 'won'; known here: win, fail"),
    ],
    ids=str,
)
def test_a_wrong_value_says_what_was_expected(
    options: dict[str, Any], place: str, message: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        PLAYS.arguments("play", options)
    (error,) = refused.value.errors()
    assert (".".join(map(str, error["loc"])), error["msg"]) == (place, message)


def test_values_become_the_parameters_types() -> None:
    given = {
        "temperature": 1,
        "clip": [0, 1],
        "agents": ["a"],
        "prizes": {"win": 3},
        "dual_clip": math.inf,
    }
    values = PLAYS.arguments("play", given)
    assert values == {
        "temperature": 1.0,
        "clip": (0.0, 1.0),
        "agents": ["a"],
        "prizes": Prizes(win=3.0),
        "dual_clip": math.inf,
    }
    assert isinstance(values["temperature"], float)
    assert list(values) == list(given)  # what is not given stays the function's own default


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
            "env 'play': an option is no plain value (Unable to serialize unknown type: ",
        ),
    ],
)
def test_an_option_that_is_not_there_is_named(options: dict[str, Any], line: str) -> None:
    with pytest.raises(OptionsError) as refused:
        PLAYS.arguments("play", options)
    assert str(refused.value).startswith(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fines:
    """What is paid."""

    fail: float = 0.0
    late: float = 0.0


def sail(
    task: object, *, laps: int = 1, prizes: Prizes = Prizes(), fines: Fines | None = None
) -> None: ...


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ("late", "; nearest: fines.late"),
        ("win", "; nearest: prizes.win"),
        ("fail", ""),
        ("lap", "; nearest: laps"),
    ],
)
def test_an_option_that_one_group_has_is_told_with_it(option: str, near: str) -> None:
    with pytest.raises(OptionsError) as refused:
        checked("env 'sail'", options_model(sail), {option: 1})
    assert (
        str(refused.value)
        == f"env 'sail' has no option '{option}'; its options: laps, prizes, fines{near}"
    )


def test_an_option_without_default_is_needed() -> None:
    def shop(task: object, *, config: str) -> None: ...

    with pytest.raises(OptionsError, match=r"^env 'shop' needs option 'config'$"):
        checked("env 'shop'", options_model(shop), {})


async def relay(task: object) -> None: ...


def open_type(task: object, *, price: Decimal) -> None: ...


def backwards(environment: str, task: object, *, laps: int = 1) -> None: ...


def unstarred(task: object, laps: int = 1) -> None: ...


def untyped(task, *, laps=1, colour, cars=()) -> None: ...  # type: ignore[no-untyped-def]


def misset(task: object, *, laps: Annotated[int, Field(ge=1)] = 0) -> None: ...


def hidden(task: object, *, _laps: int = 1) -> None: ...


def shadowed(task: object, *, model_config: int = 1) -> None: ...


def yielding(task: object) -> Iterator[object]:
    yield task


number = 3


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "backwards",
            "env '{}:backwards' must take (task, *, ...), not (environment, task, *, laps=1)",
        ),
        ("unstarred", "env '{}:unstarred' must take (task, *, ...), not (task, laps=1)"),
        ("relay", "env '{}:relay' must take (task, *, ...) and may not be async"),
        ("yielding", "env '{}:yielding' must take (task, *, ...) and may not yield"),
        ("number", "env '{}:number' must take (task, *, ...); it is of type int"),
        (
            "open_type",
            "env '{}:open_type': option 'price' has the type Decimal, which cannot be read at run time "
            "(name 'Decimal' is not defined); import it outside TYPE_CHECKING",
        ),
        ("hidden", "env '{}:hidden': '_laps' cannot be the name of an option; call it otherwise"),
        (
            "shadowed",
            "env '{}:shadowed': 'model_config' cannot be the name of an option; call it otherwise",
        ),
    ],
)
def test_an_own_function_with_another_signature_is_refused(name: str, line: str) -> None:
    with pytest.raises(OptionsError) as refused:
        PLAYS.arguments(f"{__name__}:{name}", {})
    assert str(refused.value) == line.format(__name__)


def test_an_orchestra_must_be_async() -> None:
    orchestras = Registry(kind="orchestra", known={}, takes=("task",), coroutine=True)
    assert asyncio.run(orchestras.find(f"{__name__}:relay")("x")) is None
    with pytest.raises(
        OptionsError,
        match=r"orchestra '.*:play' must take \(task, \*, \.\.\.\) as an async function",
    ):
        orchestras.find(f"{__name__}:play")


def test_own_functions_are_typed_too() -> None:
    with pytest.raises(ValidationError, match="expected an integer of at least 1"):
        PLAYS.arguments(f"{__name__}:play", {"max_turns": "5"})
    some = {"colour": 3, "cars": ["a"]}  # where neither a type nor a plain default is written
    assert PLAYS.arguments(f"{__name__}:untyped", {"laps": 2, **some}) == {"laps": 2, **some}
    with pytest.raises(ValidationError, match="expected an integer"):
        PLAYS.arguments(f"{__name__}:untyped", {"laps": "many", **some})
    with pytest.raises(
        ValidationError, match="expected an integer of at least 1"
    ):  # its own default
        PLAYS.arguments(f"{__name__}:misset", {})
    assert PLAYS.arguments(f"{__name__}:misset", {"laps": 2}) == {"laps": 2}


class Task: ...


class Group: ...


def ordered(task: Task, team: object, env: Any) -> None: ...


def swapped(env, team, task) -> None: ...  # type: ignore[no-untyped-def]


def mistyped(task: int, team: str, env: float) -> None: ...


def relabelled(group: Task, who, place) -> None: ...  # type: ignore[no-untyped-def]


def of_a_group(it: Group) -> None: ...


def of_turns(turns: Sequence[int], scale: float = 1.0) -> None: ...


@pytest.mark.parametrize(
    ("found", "takes", "given", "trouble"),
    [
        (ordered, ("task", "team", "env"), None, None),
        (relabelled, ("task", "team", "env"), None, None),  # its type goes before its name
        (
            swapped,
            ("task", "team", "env"),
            None,
            "must take (task, team, env, *, ...), not (env, team, task)",
        ),
        (
            mistyped,
            ("task", "team", "env"),
            None,
            "must take (task, team, env, *, ...), and its 'task' is of type int",
        ),
        (lambda group: 1, ("turns",), None, "must take (turns, *, ...), not (group)"),
        (of_a_group, ("turns",), None, "must take (turns, *, ...), and its 'it' is of type Group"),
        (of_a_group, ("group",), None, None),
        (of_turns, ("turns",), None, "must take (turns, *, ...), not (turns, scale=1.0)"),
        (of_turns, ("turns",), (), None),
        (of_turns, ("turns",), ("scale",), None),
        (of_turns, ("turns",), ("size",), "must take (turns, *, size), not (turns, scale=1.0)"),
        (lambda *all: 1, ("text",), (), None),
        (lambda *, size: 1, ("text",), (), "must take (text), not (*, size)"),
        (str, ("text",), (), None),  # whose signature nobody knows
        (relay, ("text",), (), "must take (text), not (task)"),
    ],
)
def test_arguments_agree_by_number_name_and_type(
    found: Any, takes: tuple[str, ...], given: tuple[str, ...] | None, trouble: str | None
) -> None:
    if trouble is None:
        check_call("it", found, takes, given=given)
        return
    with pytest.raises(OptionsError) as refused:
        check_call("it", found, takes, given=given)
    assert str(refused.value) == f"it {trouble}"


class World:
    def reset(self, task: object) -> str:
        return ""

    @staticmethod
    async def step(action: str, *more: str) -> None: ...


class Proxy:
    def __getattr__(self, name: str) -> Any: ...


class NoStep(World):
    step = None  # type: ignore[assignment]


class NoTask(World):
    def reset(self) -> str:  # type: ignore[override]
        return ""


class Waits(World):
    async def reset(self, task: object) -> str:  # type: ignore[override]
        return ""


@pytest.mark.parametrize("made", [lambda kind: kind, lambda kind: kind()], ids=["class", "object"])
@pytest.mark.parametrize(
    ("kind", "trouble"),
    [
        (World, None),
        (NoStep, "it lacks a method step; expected reset(task) and async step(action)"),
        (NoTask, "it: its method reset must take (task), not ()"),
        (Waits, "it: its method reset must take (task) and may not be async"),
    ],
)
def test_methods_are_called_as_they_are(
    made: Callable[[type], Any], kind: type, trouble: str | None
) -> None:
    methods = {"reset": ("task",), "async step": ("action",)}
    check_methods("it", Proxy(), methods)
    if trouble is None:
        check_methods("it", made(kind), methods)
        return
    with pytest.raises(OptionsError) as refused:
        check_methods("it", made(kind), methods)
    assert str(refused.value) == trouble


def test_a_registry_may_take_its_own_names_only() -> None:
    closed = Registry(kind="loss", known={"play": play}, takes=("task",), own=False)
    with pytest.raises(UnknownName, match=r"^unknown loss 'a:b'; known: play$"):
        closed.find("a:b")


class Racer:
    """A callable object, as some registries hold."""

    def __call__(self, task: object, *, laps: Annotated[int, Field(ge=1)] = 1) -> None: ...


@pytest.mark.parametrize(
    "target", [Racer(), partial(play, world=None), Prizes], ids=["object", "partial", "class"]
)
def test_whatever_can_be_called_has_options(target: Callable[..., Any]) -> None:
    options = (
        {"laps": 0}
        if isinstance(target, Racer)
        else {"max_turns": 0}
        if target is not Prizes
        else {"win": "x"}
    )
    with pytest.raises(ValidationError, match="expected"):
        checked("it", options_model(target, frozenset({"world"})), options)


def test_descriptions_are_the_docstrings() -> None:
    how = "how rewards are."
    assert descriptions(play) == {
        "max_turns": "of one game, at most, of any agent.",
        "scaled": how,
        "clip": how,
    }


def test_a_module_describes_what_its_functions_share() -> None:
    assert descriptions(invalid_reply)["coef"] == "size of the penalty."
    assert descriptions(invalid_reply)["rules"].startswith("names in VALIDITY_RULES by agent;")


def test_a_name_may_be_offered_by_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "theirs-1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (told / "entry_points.txt").write_text(
        "[mcore_mas.task_generator]\nsums = math:fsum\nlost = math:nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    offered.cache_clear()
    try:
        assert lookup("task generator", "sums", {"own": sum}) is math.fsum
        assert lookup("task generator", "own", {"own": sum}) is sum
        with pytest.raises(UnknownName, match="unknown env 'sums'"):
            lookup("env", "sums", {})
        with pytest.raises(UnknownName, match="task generator 'math:nothing' cannot be imported"):
            lookup("task generator", "lost", {})
    finally:
        offered.cache_clear()


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("my_taem.world:Env", "No module named 'my_taem'; nearest: my_team"),
        ("my_team.wrold:Env", "No module named 'my_team.wrold'; nearest: world"),
        ("my_team.world.Env:step", "'my_team.world' is not a package"),
        ("my_team.world:Evn", "module 'my_team.world' has no attribute 'Evn'; nearest: Env"),
        ("my_team.broken:Env", "No module named 'my_team.wrld'; nearest: world"),
        ("my_team.raises:Env", "RuntimeError: boom twice"),
        ("my_team.stale:Env", "cannot import name 'Steps' from 'mcore_mas' .*; nearest: Step"),
    ],
)
def test_an_import_path_that_is_misspelt_has_a_nearest_one(
    path: str, near: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_team").mkdir()  # without __init__.py, as docs/own_team.md has its folder
    (tmp_path / "my_team" / "world.py").write_text("class Env: ...\n")
    (tmp_path / "my_team" / "broken.py").write_text("from my_team.wrld import Env\n")
    (tmp_path / "my_team" / "raises.py").write_text("raise RuntimeError('boom\\ntwice')\n")
    (tmp_path / "my_team" / "stale.py").write_text("from mcore_mas import Steps\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownName, match=f"^env '{path}' cannot be imported: .*{near}$"):
        lookup("env", path, {})


def test_an_import_path_of_before_says_where_its_module_is_now(
    tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "of_before.py").write_text("from rollout.teams import roles\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("rollout.orchestras.search:search_team", "of_before:relay"):
        with pytest.raises(UnknownName, match=r"No module named 'rollout'; it is rollout now$"):
            lookup("orchestra", name, {})
