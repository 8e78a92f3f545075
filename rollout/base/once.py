"""Calls of a trajectory that a death does not repeat: answers of tools and verifiers are on record, and said again."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import cache
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


class CallRecord(Protocol):
    """Answers of before, as plain values, and what keeps those of now."""

    def answer(self, key: str) -> Any:
        """What was answered to the call of this key, None if that is not known."""

    def keep_answer(self, key: str, answer: object) -> None:
        """Keep an answer."""


# of the trajectory that is played: its record, how the key of a call begins, and how often each was made
_playing: ContextVar[tuple[CallRecord, Callable[[], str], Counter[str]] | None] = ContextVar("playing", default=None)


def put_on_record(record: CallRecord | None, place: Callable[[], str]) -> None:
    """Keep what `once` is answered from here on in this task and those it starts; `place` says where a call is made."""
    _playing.set(None if record is None else (record, place, Counter()))


async def once(kind: Any, call: Callable[[], Awaitable[T]], *asked: object) -> T:
    """What `call` answers, an instance of `kind`, or what it answered to the same question before a death.

    A call that was under way when the run died is made again, and so is one that raised.
    """
    if (playing := _playing.get()) is None:
        return await call()
    record, place, made = playing
    question = f"{place()} {hashlib.blake2b(repr((kind, asked)).encode('utf-8', 'replace'), digest_size=8).hexdigest()}"
    made[question] += 1
    key = f"{question} {made[question]}"
    if (before := record.answer(key)) is not None:
        told: T = _adapter(kind).validate_python(before)
        return told
    answer = await call()
    record.keep_answer(key, answer)
    return answer


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
