"""The batcher: sharing, caching, bounds, and errors that reach exactly those who asked."""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from retrieval import batcher as batcher_module
from retrieval.batcher import Batcher, Overloaded, prometheus
from retrieval.corpus import Passage
from retrieval.wire import Where


class Search:
    """Passage i of a query is `query/i`, its vector its letters; remembers its calls."""

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.calls: list[tuple[list[str], int]] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def encode(self, queries: list[str]) -> np.ndarray:
        self.encoded += queries
        self.threads.add(threading.get_ident())
        return np.array([[*query.encode().ljust(8)] for query in queries])

    def search(
        self, asked: list[tuple[str, Where]], vectors: np.ndarray, k: int
    ) -> list[list[Passage]]:
        queries = [query for query, where in asked if not where]
        assert [bytes(row.tolist()).decode().strip() for row in vectors] == queries
        assert self.gate.wait(10)
        self.calls.append((queries, k))
        self.threads.add(threading.get_ident())
        if "bad" in queries:
            raise ValueError("bad query")
        return [[Passage(f"{query}/{i}", "x") for i in range(k)] for query in queries]


def run(batcher: Batcher, body: Callable[[], Awaitable[None]]) -> None:
    async def both() -> None:
        searching = asyncio.create_task(batcher.run())
        try:
            await body()
        finally:
            searching.cancel()

    asyncio.run(both())


def ids(results: list[list[Passage]]) -> list[list[str]]:
    return [[passage.id for passage in passages] for passages in results]


def test_concurrent_requests_of_different_k_share_one_search() -> None:
    search = Search()
    batcher = Batcher(search.encode, search.search, max_wait_s=0.05)

    async def body() -> None:
        one, two = await asyncio.gather(
            batcher.submit(["a", "b", "a"], 1), batcher.submit(["b"], 3)
        )
        assert ids(one) == [["a/0"], ["b/0"], ["a/0"]]
        assert ids(two) == [["b/0", "b/1", "b/2"]]

    run(batcher, body)
    assert search.calls == [(["a", "b"], 3)]


def test_answers_are_cached_by_query_and_k_and_the_oldest_go() -> None:
    search = Search()
    batcher = Batcher(
        search.encode, search.search, cache_mb=0.004
    )  # an answer of one passage is 1.45 kB

    async def body() -> None:
        await batcher.submit(["a"], 1)
        await batcher.submit(["b"], 1)
        await batcher.submit(["a"], 1)  # from the cache: a is now younger than b
        await batcher.submit(["c"], 1)  # b goes
        await batcher.submit(["a"], 1)
        await batcher.submit(["b"], 1)
        await batcher.submit(["b"], 2)
        await batcher.submit(["b"], 2, use_cache=False)

    run(batcher, body)
    assert search.calls == [(["a"], 1), (["b"], 1), (["c"], 1), (["b"], 1), (["b"], 2), (["b"], 2)]
    assert batcher.counts.cached == 2


def test_the_cache_is_bounded_by_bytes_however_long_answers_are() -> None:
    search = Search()
    batcher = Batcher(search.encode, search.search, cache_mb=1.0)  # 100 passages are 46 kB

    async def body() -> None:
        for n in range(50):
            await batcher.submit([f"q{n}"], 100)
        await batcher.submit(["q49"], 100, use_cache=False)
        assert batcher._cached_bytes == sum(map(batcher_module._size, batcher._cache.values()))

    run(batcher, body)
    assert len(batcher._cache) == 1_000_000 // (
        1000 + 100 * (400 + sys.getsizeof("x"))
    )  # 21, of Python 3.12 22


def test_batches_are_bounded_and_each_stage_has_a_thread() -> None:
    search = Search()
    batcher = Batcher(search.encode, search.search, max_batch=4)

    async def body() -> None:
        await asyncio.gather(*(batcher.submit([f"q{n}"], 1) for n in range(10)))
        assert await batcher.submit([], 3) == []

    run(batcher, body)
    assert [query for queries, _ in search.calls for query in queries] == [
        f"q{n}" for n in range(10)
    ]
    assert max(len(queries) for queries, _ in search.calls) <= 4
    assert len(search.threads) == 2


def test_queries_are_encoded_while_others_are_searched() -> None:
    search = Search()
    search.gate.clear()
    batcher = Batcher(search.encode, search.search, max_batch=8, max_wait_s=0)

    async def body() -> None:
        first = asyncio.create_task(batcher.submit(["first"], 1))
        while not batcher.counts.searches:
            await asyncio.sleep(0.001)
        others = asyncio.create_task(batcher.submit([f"q{n}" for n in range(9)], 1))
        while len(search.encoded) < 10:
            await asyncio.sleep(0.001)
        search.gate.set()
        await asyncio.gather(first, others)

    run(batcher, body)
    assert [len(queries) for queries, _ in search.calls] == [1, 8, 1]


def test_a_full_queue_turns_requests_away_and_recovers() -> None:
    search = Search()
    search.gate.clear()
    batcher = Batcher(search.encode, search.search, max_batch=1, max_queue=2)

    async def body() -> None:
        first = asyncio.create_task(batcher.submit(["a"], 1))
        await asyncio.sleep(0.02)  # a is being searched, the queue is empty
        waiting = asyncio.create_task(batcher.submit(["b", "c"], 1))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 queries are waiting, at most 2 may"):
            await batcher.submit(["d"], 1)
        shared = asyncio.create_task(batcher.submit(["c"], 1))  # already queued: takes no room
        await asyncio.sleep(0)
        search.gate.set()
        assert ids(await shared) == [["c/0"]]
        assert ids(await first + await waiting + await batcher.submit(["d"], 1)) == [
            ["a/0"],
            ["b/0"],
            ["c/0"],
            ["d/0"],
        ]

    run(batcher, body)
    assert batcher.counts.rejected == 1


def test_an_error_reaches_its_callers_and_the_next_search_works() -> None:
    search = Search()
    batcher = Batcher(search.encode, search.search)

    async def body() -> None:
        with pytest.raises(ValueError, match="bad query"):
            await batcher.submit(["bad"], 1)
        assert ids(await batcher.submit(["good"], 1)) == [["good/0"]]

    run(batcher, body)


def test_a_cancelled_caller_does_not_cancel_those_who_share_its_query() -> None:
    search = Search()
    search.gate.clear()
    batcher = Batcher(search.encode, search.search)

    async def body() -> None:
        leaving, staying = (asyncio.create_task(batcher.submit(["a"], 1)) for _ in range(2))
        await asyncio.sleep(0.02)
        leaving.cancel()
        await asyncio.sleep(0)
        search.gate.set()
        assert ids(await staying) == [["a/0"]]
        assert leaving.cancelled()

    run(batcher, body)


def test_a_late_answer_is_overload() -> None:
    search = Search()
    search.gate.clear()
    batcher = Batcher(search.encode, search.search, deadline_s=0.05)

    async def body() -> None:
        with pytest.raises(Overloaded, match=r"no answer within 0\.05 s"):
            await batcher.submit(["a"], 1)
        search.gate.set()

    run(batcher, body)


def test_what_nobody_waits_for_any_more_is_not_searched() -> None:
    search = Search()
    search.gate.clear()
    batcher = Batcher(search.encode, search.search, max_batch=1, max_wait_s=0)

    async def body() -> None:
        first = asyncio.create_task(batcher.submit(["a"], 1))
        while batcher.queued or not batcher.counts.searches:
            await asyncio.sleep(0.001)
        leaving, shared, staying = (
            asyncio.create_task(batcher.submit(q, 1)) for q in (["b", "c"], ["c"], ["d"])
        )
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.sleep(0)
        search.gate.set()
        assert ids(await shared) == [["c/0"]]
        assert (ids(await first), ids(await staying)) == ([["a/0"]], [["d/0"]])
        assert ids(await batcher.submit(["b"], 1)) == [["b/0"]]

    run(batcher, body)
    assert [queries for queries, _ in search.calls] == [
        ["a"],
        ["d"],
        ["c"],
        ["b"],
    ]  # requests take turns
    assert batcher.counts.dropped == 1


def test_a_long_request_holds_up_no_short_one() -> None:
    search = Search()
    search.gate.clear()
    batcher = Batcher(search.encode, search.search, max_batch=8, max_wait_s=0)

    async def body() -> None:
        long = asyncio.create_task(batcher.submit([f"q{n}" for n in range(400)], 1))
        while not batcher.counts.searches:
            await asyncio.sleep(0.001)
        for _ in range(100):  # of the long one no more is encoded than the next searches take
            await asyncio.sleep(0.001)
        assert len(search.encoded) <= 2 + 8 + 2
        short = asyncio.create_task(batcher.submit(["s0", "s1"], 1))
        await asyncio.sleep(0)
        search.gate.set()
        assert ids(await short) == [["s0/0"], ["s1/0"]]
        assert batcher.counts.searched < 40 and not long.done()
        assert len(await long) == 400

    run(batcher, body)


def test_histograms_count_as_prometheus_does() -> None:
    search = Search()
    batcher = Batcher(search.encode, search.search)
    for value in (1, 2, 3, 300):
        batcher.batches.add(value)
    lines = prometheus(batcher).splitlines()
    assert 'retriever_batch_size_bucket{le="1"} 1' in lines
    assert 'retriever_batch_size_bucket{le="2"} 2' in lines
    assert 'retriever_batch_size_bucket{le="256"} 3' in lines
    assert 'retriever_batch_size_bucket{le="+Inf"} 4' in lines
    assert lines[-2:] == ["retriever_batch_size_sum 306", "retriever_batch_size_count 4"]
