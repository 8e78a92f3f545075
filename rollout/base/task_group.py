"""Task groups, deadlines and watchdogs: coroutines side by side, how long each may take, and who waits for what."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterable,
    Iterator,
)
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from rollout.base.errors import EngineError, EnvError

_T = TypeVar("_T")

_FRAMES = 4  # of code that blocks an event loop, the innermost last
PATIENCE_S = (
    10.0  # that a cancelled task has to clean up, before it is cancelled again and left behind
)


async def together(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Their results in order. The first exception, or a cancellation, ends the others before it goes on.

    `asyncio.gather` leaves the others running, and a task group wraps the exception in a group.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await cancel_tasks(tasks)
        raise


async def cancel_tasks(tasks: Iterable[asyncio.Future[Any]]) -> bool:
    """Cancel what still runs and wait for its end, at most `PATIENCE_S`; what it raises on the way out is dropped.

    Whoever ignores that is left behind, to be cancelled again until it ends: nobody's deadline waits for it.

    Returns:
        Whether all have ended.
    """
    tasks = set(tasks)
    if not tasks:
        return True
    for task in tasks:
        task.cancel()
        task.add_done_callback(_drop)
    try:
        await asyncio.wait(tasks, timeout=PATIENCE_S)
    except asyncio.CancelledError:  # who is told again tells them again
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=PATIENCE_S)
        raise
    finally:
        for task in tasks:
            _insist(task)
    return all(task.done() for task in tasks)


def _insist(task: asyncio.Future[Any]) -> None:
    """Cancel it now, and again after every `PATIENCE_S`, until it is done."""
    if not task.done():
        task.cancel()
        asyncio.get_running_loop().call_later(PATIENCE_S, _insist, task)


def _drop(task: asyncio.Future[Any]) -> None:
    """Have seen its exception, of which asyncio would complain otherwise."""
    if not task.cancelled():
        task.exception()


_made: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, Any]] = WeakKeyDictionary()


def of_loop(key: Hashable, make: Callable[[], _T]) -> _T:
    """What `make` made for `key` when the running event loop asked first: locks and semaphores belong to one loop."""
    made = _made.setdefault(asyncio.get_running_loop(), {})
    if key not in made:
        made[key] = make()
    found: _T = made[key]
    return found


def forget(owner: object) -> None:
    """Let go of what `of_loop` keeps for `owner` and the running event loop, by it or by tuples that begin with it."""
    made = _made.get(asyncio.get_running_loop(), {})
    for key in [
        key for key in made if key is owner or (isinstance(key, tuple) and key[0] is owner)
    ]:
        del made[key]


def settle(future: asyncio.Future[_T], outcome: _T | Exception) -> None:
    """Give whoever waits for `future` its outcome, unless it has gone."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


LEFT = "; it goes on though cancelled, and was left behind"


class Late(Exception):
    """Something took longer than it may."""

    def __init__(self, text: str, what: str = "") -> None:
        super().__init__(text)
        self.what = what  # `agent/<name>` or `tool/<env>.<method>`, under which it is counted


class LateCall(Late, EngineError):
    """An engine was still at a reply when its time was up."""


class LateTool(Late, EnvError):
    """An environment was still at work when its time was up."""


async def within(
    seconds: float | None, work: Awaitable[_T], late: Callable[[str], Late] = Late
) -> _T:
    """What `work` gives; it is cancelled when it takes longer than `seconds`, and left behind if it goes on still.

    Raises:
        Late: it did; what `late` makes of it.
    """
    if seconds is None:
        return await work
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
    finally:
        ended = await cancel_tasks([task])
    raise late(f"nothing came within {seconds:g} s" + ("" if ended else LEFT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Something that is waited for."""

    what: str
    since: float  # s, on the event loop's clock


Waits = Callable[
    [], list[Wait]
]  # everything that somebody waits for now; [] where that is nothing that is known


class Watchdog:
    """Looks at all collections of a run at once: one that queues behind another is no stall.

    A call, a tool or a trajectory that ends is progress. After `quiet_s` without any, one line for each of the `shown`
    that have waited longest goes to `say`, again after twice the time, four times, and so on until something ends.
    An event loop that is blocked for as long is told of from another thread.
    """

    def __init__(self, quiet_s: float, say: Callable[[str], None], *, shown: int = 5) -> None:
        self._quiet_s = quiet_s
        self._say = say
        self._shown = shown
        self._watched: dict[object, tuple[str, Waits]] = {}
        self._progress = 0.0  # when something began or ended last, as far as was seen
        self._patience = quiet_s
        self._timer: asyncio.TimerHandle | None = None
        self._alive, self._ended = (
            0.0,
            threading.Event(),
        )  # when the event loop was, and that nothing is watched

    @contextmanager
    def over(self, name: str, waits: Waits) -> Iterator[None]:
        """Watch, for the block, somebody who waits for what `waits` tells."""
        loop = asyncio.get_running_loop()
        key = object()  # two may have one name
        self._watched[key] = name, waits
        self._stir(loop.time())
        if self._timer is None:
            self._timer = loop.call_later(self._quiet_s / 4, self._look)
            self._alive, self._ended = time.monotonic(), threading.Event()
            watched = (threading.get_ident(), self._ended)
            threading.Thread(
                target=self._watch_loop, args=watched, name="pulse", daemon=True
            ).start()
        try:
            yield
        finally:
            del self._watched[key]
            self._stir(loop.time())
            if not self._watched and self._timer is not None:
                self._timer.cancel()
                self._ended.set()
                self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._alive = time.monotonic()
        found = [(name, waits()) for name, waits in self._watched.values()]
        # whoever waits for something new has got what it waited for before
        begun = max((wait.since for _, waits in found for wait in waits), default=0.0)
        self._stir(begun)
        quiet = now - self._progress
        if quiet >= self._patience:
            self._tell(found, quiet, now)
            self._patience = 2 * quiet
        self._timer = loop.call_later(self._quiet_s / 4, self._look)

    def _stir(self, at: float) -> None:
        if at > self._progress:
            self._progress, self._patience = at, self._quiet_s

    def _tell(self, found: list[tuple[str, list[Wait]]], quiet: float, now: float) -> None:
        def since(one: tuple[str, list[Wait]]) -> float:
            return min((wait.since for wait in one[1]), default=now)

        self._say(
            f"nothing has finished for {quiet:.0f} s; {len(found)} wait, those that have waited longest:"
        )
        for name, waits in sorted(found, key=since)[: self._shown]:
            what = ", ".join(f"{wait.what} for {now - wait.since:.0f} s" for wait in waits)
            self._say(f"  {name}: {what or 'the orchestra itself'}")
        if len(found) > self._shown:
            self._say(f"  and {len(found) - self._shown} more")

    def _watch_loop(self, thread: int, ended: threading.Event) -> None:
        """Tell from a thread of its own, until `ended`, of an event loop that blocks another."""
        patience = self._quiet_s
        while not ended.wait(self._quiet_s / 4):
            quiet = time.monotonic() - self._alive
            if quiet < self._quiet_s:
                patience = self._quiet_s
            elif quiet >= patience:
                patience = 2 * quiet
                frames = traceback.extract_stack(sys._current_frames().get(thread))[-_FRAMES:]
                where = " > ".join(
                    f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames
                )
                self._say(
                    f"the event loop has been blocked for {quiet:.0f} s, so that no deadline holds and nobody goes on, "
                    f"in {where}"
                )
