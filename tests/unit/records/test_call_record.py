"""Recorded calls are not repeated; their results are read back."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollout.environments.protocol import ToolCall
from rollout.records.call_record import CallRecord
from rollout.records.collection_log import CollectionLog


def test_results_are_read_back_and_failed_calls_are_repeated(tmp_path: Path) -> None:
    results = {
        ToolCall: ToolCall(tool="t", query="{}", result="\u2028\0", failed=True),
        tuple[str, bool]: ("x", True),
        dict[str, bool]: {"a": False},
        list[str]: [],
        type(None): None,
    }
    calls: list[Any] = []

    async def play() -> list[Any]:
        async def call(kind: Any) -> Any:
            calls.append(kind)
            return results[kind]

        async def broken() -> str:
            calls.append("broken")
            raise ValueError

        async def no_text() -> bytes:
            calls.append("no text")
            return b"\xff"

        record = CallRecord(CollectionLog(tmp_path / "log"), "3/t/0")
        recorded = [await record.once(kind, partial(call, kind), str(kind)) for kind in results]
        with pytest.raises(ValueError):
            await record.once(str, broken, "broken")
        await record.once(bytes, no_text, "no text")
        return recorded

    assert asyncio.run(play()) == list(results.values()) == asyncio.run(play())
    assert calls == [*results, "broken", "no text", "broken", "no text"]


def test_equal_calls_differ_by_order_trajectory_and_branch(tmp_path: Path) -> None:
    call_count = 0

    async def count() -> int:
        nonlocal call_count
        call_count += 1
        return call_count

    async def play() -> list[int]:
        log = CollectionLog(tmp_path / "log")
        first, other = CallRecord(log, "3/t/0"), CallRecord(log, "3/t/1")
        branch = first.for_branch(lambda: "0.1")
        records = (first, first, other, branch, branch)
        return [await record.once(int, count, "send", {"to": "a"}) for record in records]

    assert asyncio.run(play()) == [1, 2, 3, 4, 5] == asyncio.run(play())


def test_without_a_log_every_call_is_made() -> None:
    async def play() -> list[int]:
        calls: list[int] = []

        async def call() -> int:
            calls.append(1)
            return len(calls)

        record = CallRecord()
        return [await record.once(int, call, "send") for _ in range(2)]

    assert asyncio.run(play()) == [1, 2]
