"""Objects that belong to one event loop, such as locks, semaphores and connections."""

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

_T = TypeVar("_T")

_values: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, Any]] = WeakKeyDictionary()


def per_loop(key: Hashable, make: Callable[[], _T]) -> _T:
    """Return the running event loop's object of this key; the first call makes it."""
    values = _values.setdefault(asyncio.get_running_loop(), {})
    if key not in values:
        values[key] = make()
    value: _T = values[key]
    return value


def drop_per_loop(owner: object) -> None:
    """Drop the running event loop's objects whose key is `owner`, or a tuple that begins with it."""
    values = _values.get(asyncio.get_running_loop(), {})
    for key in list(values):
        if key is owner or (isinstance(key, tuple) and key[0] is owner):
            del values[key]
