"""Faults of the network between a client and its server do not change the passages."""

from __future__ import annotations

import asyncio

import pytest

from retrieval.client import RetrievalClient
from retrieval.corpus import Passage
from tests.faults.proxy import NAMES, FaultProxy

pytestmark = pytest.mark.usefixtures("forked_programs")


async def search_all(url: str, queries: list[str]) -> tuple[list[list[Passage]], int]:
    """Return the passages of each query, one query after the other, and the number of requests."""
    async with RetrievalClient(url, patience_s=30) as client:
        return [await client.search(query, 2) for query in queries], client.posts


@pytest.mark.parametrize("fault", NAMES)
def test_passages_are_those_that_were_sent(server_url: str, fault: str) -> None:
    queries = ["Who lives in Amber Falls?", "Hugo Brandt", "mayor of Iron Bridge"]
    expected, _ = asyncio.run(search_all(server_url, queries))
    with FaultProxy(server_url).running() as proxy:
        proxy.faulty = (fault, 2)
        passages, posts = asyncio.run(search_all(proxy.url, queries))
    assert proxy.done[fault] == 2
    assert passages == expected
    assert posts == (3 if fault == "delay" else 5)  # a late answer is not asked for again
