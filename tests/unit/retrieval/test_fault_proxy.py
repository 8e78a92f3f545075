"""Whatever is done to a server's answers on their way, the client's passages are those that were sent."""

from __future__ import annotations

import asyncio

import pytest

from retrieval.client import RetrievalClient
from retrieval.corpus import Passage
from tests.faults.proxy import NAMES, FaultProxy

pytestmark = pytest.mark.usefixtures("forked_programs")


async def found(url: str, queries: list[str]) -> tuple[list[list[Passage]], int]:
    """The passages of one query after the other, and how many requests it took."""
    async with RetrievalClient(url, patience_s=30) as client:
        return [await client.search(query, 2) for query in queries], client.posts


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_done_to_answers_the_passages_are_those_that_were_sent(
    server_url: str, name: str
) -> None:
    queries = ["Who lives in Amber Falls?", "Hugo Brandt", "mayor of Iron Bridge"]
    right, _ = asyncio.run(found(server_url, queries))
    with FaultProxy(server_url).running() as proxy:
        proxy.faulty = (name, 2)
        passages, posts = asyncio.run(found(proxy.url, queries))
    assert proxy.done[name] == 2
    assert passages == right
    assert posts == (3 if name == "delay" else 5)  # what was late was not asked again
