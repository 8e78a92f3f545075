"""Check before a run that it can call the functions and methods of a user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollout.base.errors import OptionsError
from rollout.base.signatures import check_call, check_methods


def plays(task: object, team: object, env: object) -> None: ...


def other_names(job, crew, world) -> None: ...  # type: ignore[no-untyped-def]


def has_options(task: object, *, laps: int = 1) -> None: ...


def needs_more(task: object, laps: int) -> None: ...


def scales(turns: object, scale: float = 1.0) -> None: ...


async def waits(task: object) -> None: ...


def yields(task: object) -> Iterator[object]:
    yield task


@pytest.mark.parametrize(
    ("target", "arguments", "settings", "message"),
    [
        (plays, ("task", "team", "env"), {}, None),
        (other_names, ("task", "team", "env"), {}, None),
        (has_options, ("task",), {}, None),
        (needs_more, ("task",), {}, "must take (task, *, ...), not (task, laps)"),
        (plays, ("turns",), {}, "must take (turns, *, ...), not (task, team, env)"),
        (3, ("task",), {}, "must take (task, *, ...); it is of type int"),
        (scales, ("turns",), {"keywords": ()}, None),
        (scales, ("turns",), {"keywords": ("scale",)}, None),
        (
            scales,
            ("turns",),
            {"keywords": ("size",)},
            "must take (turns, *, size), not (turns, scale=1.0)",
        ),
        (lambda *values: 1, ("text",), {"keywords": ()}, None),
        (
            lambda *, size: 1,
            ("text",),
            {"keywords": ()},
            "must take (text), not (*, size)",
        ),
        (str, ("text",), {"keywords": ()}, None),  # its signature cannot be read
        (waits, ("task",), {"coroutine": True}, None),
        (waits, ("task",), {}, "must take (task, *, ...) and may not be async"),
        (
            has_options,
            ("task",),
            {"coroutine": True},
            "must take (task, *, ...) as an async function",
        ),
        (yields, ("task",), {"generator": True}, None),
        (yields, ("task",), {}, "must take (task, *, ...) and may not yield"),
    ],
)
def test_a_call_that_fails_is_refused(
    target: Any, arguments: tuple[str, ...], settings: dict[str, Any], message: str | None
) -> None:
    if message is None:
        check_call("it", target, arguments, **settings)
        return
    with pytest.raises(OptionsError) as caught:
        check_call("it", target, arguments, **settings)
    assert str(caught.value) == f"it {message}"


class World:
    def reset(self, task: object) -> str:
        return ""

    @staticmethod
    async def step(action: str, *more: str) -> None: ...


class Proxy:
    def __init__(self) -> None:
        self.read: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.read.append(name)


class NoStep(World):
    step = None  # type: ignore[assignment]


class NoTask(World):
    def reset(self) -> str:  # type: ignore[override]
        return ""


class AsyncReset(World):
    async def reset(self, task: object) -> str:  # type: ignore[override]
        return ""


METHODS = {"reset": ("task",), "async step": ("action",)}


@pytest.mark.parametrize("make", [lambda kind: kind, lambda kind: kind()], ids=["class", "object"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoStep, "it lacks a method step; expected reset(task) and async step(action)"),
        (NoTask, "it: its method reset must take (task), not ()"),
        (AsyncReset, "it: its method reset must take (task) and may not be async"),
    ],
)
def test_a_method_that_is_missing_or_cannot_be_called_is_refused(
    make: Callable[[type], Any], kind: type, message: str
) -> None:
    with pytest.raises(OptionsError) as caught:
        check_methods("it", make(kind), METHODS)
    assert str(caught.value) == message


@pytest.mark.parametrize("target", [World, World()], ids=["class", "object"])
def test_only_an_object_with_all_methods_is_accepted(target: Any) -> None:
    check_methods("it", target, METHODS)
    with pytest.raises(OptionsError, match=r"it lacks a method jump; expected .* and jump\(task\)"):
        check_methods("it", target, {**METHODS, "jump": ("task",)})


def test_an_object_that_makes_its_attributes_is_accepted_without_reading_them() -> None:
    proxy = Proxy()
    check_methods("it", proxy, METHODS)
    assert proxy.read == []
