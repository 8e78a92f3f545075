"""The batcher: sharing, caching, limits, and errors that reach only the requests concerned."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from retrieval.batcher import Batcher, Overloaded, answer_bytes, prometheus_text
from retrieval.corpus import Passage


class FakeIndex:
    """An index that finds the passages `query/0`, `query/1` and so on.

    The vector of a query is its letters. Searches wait while `gate` is cleared.
    """

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.searches: list[tuple[list[str], int]] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def encode(self, queries: list[str]) -> np.ndarray:
        self.encoded += queries
        self.threads.add(threading.get_ident())
        return np.array([list(query.encode().ljust(8)) for query in queries])

    def search(self, queries: list[str], vectors: np.ndarray, k: int) -> list[list[Passage]]:
        assert [bytes(row.tolist()).decode().strip() for row in vectors] == queries
        assert self.gate.wait(60)
        self.searches.append((queries, k))
        self.threads.add(threading.get_ident())
        if "bad" in queries:
            raise ValueError("bad query")
        return [[Passage(f"{query}/{i}", "x") for i in range(k)] for query in queries]


def run(batcher: Batcher, body: Callable[[], Awaitable[None]]) -> None:
    """Run `body` while the batcher runs."""

    async def main() -> None:
        running = asyncio.create_task(batcher.run())
        try:
            await body()
        finally:
            running.cancel()

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def ids(results: list[list[Passage]]) -> list[list[str]]:
    return [[passage.id for passage in passages] for passages in results]


def test_concurrent_requests_of_different_k_share_one_search() -> None:
    index = FakeIndex()
    batcher = Batcher(index.encode, index.search, max_wait_s=0.05)

    async def body() -> None:
        one, two = await asyncio.gather(
            batcher.submit(["a", "b", "a"], 1), batcher.submit(["b"], 3)
        )
        assert ids(one) == [["a/0"], ["b/0"], ["a/0"]]
        assert ids(two) == [["b/0", "b/1", "b/2"]]

    run(batcher, body)
    assert index.searches == [(["a", "b"], 3)]


def test_answers_are_cached_by_query_and_k_and_the_oldest_are_dropped() -> None:
    index = FakeIndex()
    # An answer of one passage takes 1.45 kB, so two fit.
    batcher = Batcher(index.encode, index.search, cache_mb=0.004)

    async def body() -> None:
        await batcher.submit(["a"], 1)
        await batcher.submit(["b"], 1)
        await batcher.submit(["a"], 1)  # from the cache: a is now more recent than b
        await batcher.submit(["c"], 1)  # drops b
        await batcher.submit(["a"], 1)
        await batcher.submit(["b"], 1)
        await batcher.submit(["b"], 2)
        await batcher.submit(["b"], 2, use_cache=False)

    run(batcher, body)
    expected = [("a", 1), ("b", 1), ("c", 1), ("b", 1), ("b", 2), ("b", 2)]
    assert index.searches == [([query], k) for query, k in expected]
    assert batcher.counts.cached == 2


def test_the_cache_is_bounded_by_bytes() -> None:
    index = FakeIndex()
    batcher = Batcher(index.encode, index.search, cache_mb=1.0)
    answer = [Passage("q/0", "x")] * 100
    fitting = 1_000_000 // answer_bytes(answer)

    async def body() -> None:
        for n in range(50):
            await batcher.submit([f"q{n}"], 100)
        await batcher.submit(["q49"], 100, use_cache=False)

    run(batcher, body)
    assert batcher.cache_bytes == fitting * answer_bytes(answer)


def test_batches_are_bounded_and_each_stage_has_a_thread() -> None:
    index = FakeIndex()
    batcher = Batcher(index.encode, index.search, max_batch=4)

    async def body() -> None:
        await asyncio.gather(*(batcher.submit([f"q{n}"], 1) for n in range(10)))
        assert await batcher.submit([], 3) == []

    run(batcher, body)
    searched = [query for queries, _ in index.searches for query in queries]
    assert searched == [f"q{n}" for n in range(10)]
    assert max(len(queries) for queries, _ in index.searches) <= 4
    assert len(index.threads) == 2


def test_queries_are_encoded_while_others_are_searched() -> None:
    index = FakeIndex()
    index.gate.clear()
    batcher = Batcher(index.encode, index.search, max_batch=8, max_wait_s=0)

    async def body() -> None:
        first = asyncio.create_task(batcher.submit(["first"], 1))
        await until(lambda: batcher.counts.searches)
        others = asyncio.create_task(batcher.submit([f"q{n}" for n in range(9)], 1))
        await until(lambda: len(index.encoded) == 10)
        index.gate.set()
        await asyncio.gather(first, others)

    run(batcher, body)
    assert [len(queries) for queries, _ in index.searches] == [1, 8, 1]


def test_a_full_queue_turns_requests_away_and_recovers() -> None:
    index = FakeIndex()
    index.gate.clear()
    batcher = Batcher(index.encode, index.search, max_batch=1, max_queue=2)

    async def body() -> None:
        first = asyncio.create_task(batcher.submit(["a"], 1))
        await until(lambda: batcher.counts.searches and not batcher.queued)
        waiting = asyncio.create_task(batcher.submit(["b", "c"], 1))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 queries are waiting, at most 2 may"):
            await batcher.submit(["d"], 1)
        shared = asyncio.create_task(batcher.submit(["c"], 1))  # is already in the queue
        await asyncio.sleep(0)
        index.gate.set()
        assert ids(await shared) == [["c/0"]]
        assert ids(await first) == [["a/0"]]
        assert ids(await waiting) == [["b/0"], ["c/0"]]
        assert ids(await batcher.submit(["d"], 1)) == [["d/0"]]

    run(batcher, body)
    assert batcher.counts.rejected == 1


def test_an_error_reaches_its_requests_and_the_next_search_works() -> None:
    index = FakeIndex()
    batcher = Batcher(index.encode, index.search)

    async def body() -> None:
        with pytest.raises(ValueError, match="bad query"):
            await batcher.submit(["bad"], 1)
        assert ids(await batcher.submit(["good"], 1)) == [["good/0"]]

    run(batcher, body)


def test_a_cancelled_request_does_not_cancel_those_that_share_its_query() -> None:
    index = FakeIndex()
    index.gate.clear()
    batcher = Batcher(index.encode, index.search)

    async def body() -> None:
        leaving = asyncio.create_task(batcher.submit(["a"], 1))
        staying = asyncio.create_task(batcher.submit(["a"], 1))
        await until(lambda: batcher.counts.searches)
        leaving.cancel()
        await asyncio.sleep(0)
        index.gate.set()
        assert ids(await staying) == [["a/0"]]
        assert leaving.cancelled()

    run(batcher, body)


def test_a_late_answer_is_overload() -> None:
    index = FakeIndex()
    index.gate.clear()
    batcher = Batcher(index.encode, index.search, deadline_s=0.05)

    async def body() -> None:
        with pytest.raises(Overloaded, match=r"no answer within 0\.05 s"):
            await batcher.submit(["a"], 1)
        index.gate.set()

    run(batcher, body)


def test_a_query_that_no_request_waits_for_is_not_searched() -> None:
    index = FakeIndex()
    index.gate.clear()
    batcher = Batcher(index.encode, index.search, max_batch=1, max_wait_s=0)

    async def body() -> None:
        first = asyncio.create_task(batcher.submit(["a"], 1))
        await until(lambda: batcher.counts.searches and not batcher.queued)
        leaving = asyncio.create_task(batcher.submit(["b", "c"], 1))
        shared = asyncio.create_task(batcher.submit(["c"], 1))
        staying = asyncio.create_task(batcher.submit(["d"], 1))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.sleep(0)
        index.gate.set()
        assert ids(await shared) == [["c/0"]]
        assert ids(await first) == [["a/0"]]
        assert ids(await staying) == [["d/0"]]
        assert ids(await batcher.submit(["b"], 1)) == [["b/0"]]

    run(batcher, body)
    # Requests take turns, so d comes before c.
    assert [queries for queries, _ in index.searches] == [["a"], ["d"], ["c"], ["b"]]
    assert batcher.counts.dropped == 1


def test_a_long_request_does_not_delay_a_short_one() -> None:
    index = FakeIndex()
    index.gate.clear()
    batcher = Batcher(index.encode, index.search, max_batch=8, max_wait_s=0)

    async def body() -> None:
        long = asyncio.create_task(batcher.submit([f"q{n}" for n in range(400)], 1))
        await until(lambda: batcher.counts.searches)
        await asyncio.sleep(0.1)
        assert len(index.encoded) <= 2 + 8 + 2  # no more than the next searches take
        short = asyncio.create_task(batcher.submit(["s0", "s1"], 1))
        await asyncio.sleep(0)
        index.gate.set()
        assert ids(await short) == [["s0/0"], ["s1/0"]]
        assert batcher.counts.searched < 40
        assert not long.done()
        assert len(await long) == 400

    run(batcher, body)


def test_histograms_are_cumulative() -> None:
    index = FakeIndex()
    batcher = Batcher(index.encode, index.search)
    for size in (1, 2, 3, 300):
        batcher.batch_sizes.add(size)
    lines = prometheus_text(batcher).splitlines()
    assert 'retriever_batch_size_bucket{le="1"} 1' in lines
    assert 'retriever_batch_size_bucket{le="2"} 2' in lines
    assert 'retriever_batch_size_bucket{le="256"} 3' in lines
    assert 'retriever_batch_size_bucket{le="+Inf"} 4' in lines
    assert lines[-2:] == ["retriever_batch_size_sum 306", "retriever_batch_size_count 4"]
