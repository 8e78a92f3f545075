"""Servers of one engine are compared with each other after an update."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rollout.base.errors import EngineError
from rollout.engines.sglang.weight_check import WeightCheck


class Server:
    """A replica and its client in one: a server that returns these checksums, one mapping a rank."""

    def __init__(self, number: int, *checksums: dict[str, str], available: bool = True) -> None:
        self.client = self
        self.url = f"http://127.0.0.1:{number}"
        self.checksums = checksums
        self.available = available
        self.requests = 0

    async def has(self, path: str) -> bool:
        return self.available and path == "/weights_checker"

    async def call(self, path: str, body: dict[str, str]) -> Any:
        assert (path, body) == ("/weights_checker", {"action": "checksum"})
        self.requests += 1
        return {"ranks": [{"checksums": checksums} for checksums in self.checksums]}


def check(servers: Sequence[Any], lines: list[str] | None = None) -> WeightCheck:
    """Check servers after an update to version 4; append the lines of the check to `lines`."""
    if lines is None:
        lines = []
    weight_check = WeightCheck(tell=lines.append)
    weight_check.begin_update()
    for server in servers:
        asyncio.run(weight_check.check(server, 4))
    return weight_check


def test_servers_with_the_same_weights_pass() -> None:
    ranks = {"norm": "1", "qkv": "2"}, {"norm": "1", "qkv": "3"}
    servers = [Server(number, *ranks) for number in (1, 2)]
    weight_check = check(servers)
    weight_check.begin_update()
    for server in servers:  # another update has other checksums
        server.checksums = ({"norm": "5"}, {"norm": "5"})
    for server in servers:
        asyncio.run(weight_check.check(server, 5))  # type: ignore[arg-type]
    assert [server.requests for server in servers] == [2, 2]


def test_a_tensor_that_differs_is_named() -> None:
    first = Server(1, {"norm": "1", "qkv": "2"}, {"norm": "1", "qkv": "3"})
    other = Server(2, {"norm": "1", "qkv": "2"}, {"norm": "1", "qkv": "2"})
    with pytest.raises(
        EngineError,
        match=r"tensor 'qkv' of rank 1 at version 4 is not the same in the servers at "
        r"http://127.0.0.1:1 and http://127.0.0.1:2",
    ):
        check([first, other])
    with pytest.raises(EngineError, match="tensor 'norm' and 1 more of rank 0"):
        check([first, Server(2, {}, {})])


def test_servers_with_other_numbers_of_ranks_are_not_compared() -> None:
    two_ranks = Server(1, {"norm": "1"}, {"norm": "1"})
    one_rank = Server(2, {"norm": "2"})
    check([two_ranks, one_rank])
    assert [two_ranks.requests, one_rank.requests] == [1, 1]
    with pytest.raises(EngineError, match="tensor 'norm' of rank 0 at version 4"):
        check([Server(3, {"norm": "3"}), one_rank])


def test_servers_without_checksums_are_mentioned_once() -> None:
    lines: list[str] = []
    server = Server(1, available=False)
    check([server, server], lines)
    assert server.requests == 0
    assert lines == ["SGLang: the server has no /weights_checker; its weights are not compared"]
