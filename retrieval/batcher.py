"""Dynamic batching: queries of concurrent requests are encoded and searched together.

Encoding and searching have a thread each, so that one batch is encoded while the one before it is
searched.
"""

import asyncio
import sys
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, asdict, dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np

from retrieval.corpus import Passage

LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

QueryKey = tuple[str, int]  # a query and its k
_Result = TypeVar("_Result")


class Overloaded(Exception):
    """The queue is full, or the deadline has passed; the client should ask again later."""


@dataclass(slots=True)
class Counts:
    """Counters of a batcher since it started. A pair is a query with its k."""

    searches: int = 0  # calls of the search function
    searched: int = 0  # pairs that these calls answered
    cached: int = 0  # pairs answered from the cache
    rejected: int = 0  # requests turned away because the queue was full
    late: int = 0  # requests whose deadline passed
    dropped: int = 0  # pairs that were not searched, because all their clients had left


class Histogram:
    """Counts of values between bounds, and their sum.

    Attributes:
        bounds: upper bounds of the buckets, ascending; a value that equals a bound is below it.
        counts: number of values in each bucket, and last of those above all bounds; not cumulative.
        total: sum of the values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(eq=False)
class Batcher:
    """A queue of queries, two threads that encode and search them, and a least-recently-used cache.

    Answers are cached and shared by *pairs*: a query and its k.

    `run` must be running for `submit` to return. Requests take turns, one query each, so that a
    long request does not delay a short one.

    Requests with different k share a batch, which is searched with the largest k, and the answers
    are cut to the k of each query. The search function must allow both: its answer for a smaller k
    is a prefix of its answer for a larger one, and does not depend on the other queries of the
    batch.

    Args:
        encode: function from queries to their vectors, float32 `[Q, dim]`.
        search: function from queries, their vectors and k to the passages of each query.
        max_batch: most queries that are searched together.
        max_wait_s: time that the first query of a batch waits for others.
        max_queue: waiting queries above which requests are turned away.
        cache_mb: approximate size of the cache of answers, in MB.
        deadline_s: time after which a request is given up.
    """

    encode: Callable[[list[str]], np.ndarray]
    search: Callable[[list[str], np.ndarray, int], list[list[Passage]]]
    _: KW_ONLY
    max_batch: int = 64
    max_wait_s: float = 0.002
    max_queue: int = 4096
    cache_mb: float = 256.0
    deadline_s: float = 30.0

    def __post_init__(self) -> None:
        self.counts = Counts()
        self.latency_s = Histogram(LATENCY_BOUNDS_S)  # of answered requests
        self.batch_sizes = Histogram(BATCH_SIZE_BOUNDS)  # pairs of each search

        self._cache: OrderedDict[QueryKey, list[Passage]] = OrderedDict()
        self._cache_bytes = 0
        # Answers of pairs that are queued or being searched, and the number of requests that wait
        # for each.
        self._pending: dict[QueryKey, asyncio.Future[list[Passage]]] = {}
        self._waiting = Counter[QueryKey]()
        # Pairs that are not encoded yet, in one queue per request, and pairs that are not searched
        # yet.
        self._to_encode: deque[deque[QueryKey]] = deque()
        self._to_search: deque[tuple[QueryKey, np.ndarray]] = deque()
        self._has_work_to_encode = asyncio.Event()
        self._has_work_to_search = asyncio.Event()
        self._may_encode = asyncio.Event()  # cleared while a full batch waits for its search
        self._may_encode.set()

    @property
    def queued(self) -> int:
        """Number of pairs that wait to be encoded or searched."""
        return sum(map(len, self._to_encode)) + len(self._to_search)

    @property
    def cache_bytes(self) -> int:
        """Approximate size of the cached answers in bytes."""
        return self._cache_bytes

    async def submit(
        self, queries: list[str], k: int, *, use_cache: bool = True
    ) -> list[list[Passage]]:
        """Return the passages of each query.

        Raises:
            Overloaded: the queue is full, or the deadline passed.
            Exception: whatever the encode or the search function raised.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        keys = [(query, k) for query in queries]
        answers: dict[QueryKey, list[Passage]] = {}
        if use_cache:
            answers = {key: self._cache[key] for key in keys if key in self._cache}
            self.counts.cached += len(answers)
            for key in answers:
                self._cache.move_to_end(key)

        missing = [key for key in dict.fromkeys(keys) if key not in answers]
        new = [key for key in missing if key not in self._pending]
        if self.queued + len(new) > self.max_queue:
            self.counts.rejected += 1
            raise Overloaded(f"{self.queued} queries are waiting, at most {self.max_queue} may")
        if new:
            for key in new:
                self._pending[key] = loop.create_future()
            self._to_encode.append(deque(new))
            self._has_work_to_encode.set()

        if missing:
            futures = {key: self._pending[key] for key in missing}
            await self._wait_for(futures)
            answers |= {key: future.result() for key, future in futures.items()}
        self.latency_s.add(loop.time() - began)
        return [answers[key] for key in keys]

    async def _wait_for(self, futures: dict[QueryKey, asyncio.Future[list[Passage]]]) -> None:
        """Wait until all pairs are answered; raise Overloaded if the deadline passes."""
        self._waiting.update(futures.keys())
        try:
            # Unlike gather, wait does not cancel the futures, which other requests may share.
            _, late = await asyncio.wait(futures.values(), timeout=self.deadline_s)
            if late:
                self.counts.late += 1
                raise Overloaded(f"no answer within {self.deadline_s:g} s")
        finally:
            for key in futures:
                self._waiting[key] -= 1
                if self._waiting[key] == 0:
                    del self._waiting[key]

    async def run(self) -> None:
        """Encode and search what is queued, until cancelled."""
        encode_thread = ThreadPoolExecutor(1, thread_name_prefix="encode")
        search_thread = ThreadPoolExecutor(1, thread_name_prefix="search")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._encode_batches(encode_thread))
                tasks.create_task(self._search_batches(search_thread))
        finally:
            encode_thread.shutdown(wait=False)
            search_thread.shutdown(wait=False)

    async def _encode_batches(self, thread: ThreadPoolExecutor) -> None:
        # Encode in smaller batches than are searched, so that the first search begins earlier.
        batch_size = max(1, self.max_batch // 4)
        while True:
            await self._has_work_to_encode.wait()
            await self._may_encode.wait()
            if self.queued < batch_size:
                await asyncio.sleep(self.max_wait_s)
            keys = [key for key in self._take_in_turn(batch_size) if self._is_wanted(key)]
            if not self._to_encode:
                self._has_work_to_encode.clear()
            if not keys:
                continue

            queries = list(dict.fromkeys(query for query, _ in keys))
            vectors = await self._run_in_thread(thread, keys, self.encode, queries)
            if vectors is None:
                continue
            vector_of_query = dict(zip(queries, vectors, strict=True))
            for key in keys:
                self._to_search.append((key, vector_of_query[key[0]]))
            self._has_work_to_search.set()
            if len(self._to_search) > self.max_batch:
                # Encode no more until a search has taken a batch of these, so that only about one full
                # batch waits.
                self._may_encode.clear()

    async def _search_batches(self, thread: ThreadPoolExecutor) -> None:
        while True:
            await self._has_work_to_search.wait()
            count = min(self.max_batch, len(self._to_search))
            encoded = [self._to_search.popleft() for _ in range(count)]
            batch = {key: vector for key, vector in encoded if self._is_wanted(key)}
            self._may_encode.set()
            if not self._to_search:
                self._has_work_to_search.clear()
            if batch:
                await self._search_batch(batch, thread)

    async def _search_batch(
        self, batch: dict[QueryKey, np.ndarray], thread: ThreadPoolExecutor
    ) -> None:
        self.counts.searches += 1
        self.counts.searched += len(batch)
        self.batch_sizes.add(len(batch))
        vector_of_query = {query: vector for (query, _), vector in batch.items()}
        queries = list(vector_of_query)
        vectors = np.stack(list(vector_of_query.values()))
        max_k = max(k for _, k in batch)
        results = await self._run_in_thread(
            thread, list(batch), self.search, queries, vectors, max_k
        )
        if results is None:
            return
        passages_of_query = dict(zip(queries, results, strict=True))
        for query, k in batch:
            answer = passages_of_query[query][:k]
            self._pending.pop((query, k)).set_result(answer)
            self._add_to_cache((query, k), answer)

    def _take_in_turn(self, count: int) -> list[QueryKey]:
        """Remove up to `count` pairs from the queue, one of each request in turn."""
        keys: list[QueryKey] = []
        while self._to_encode and len(keys) < count:
            request = self._to_encode.popleft()
            keys.append(request.popleft())
            if request:
                self._to_encode.append(request)
        return keys

    def _is_wanted(self, key: QueryKey) -> bool:
        """Return True if a request still waits for this query with its k; drop the query otherwise."""
        if self._waiting[key] > 0:
            return True
        self.counts.dropped += 1
        self._pending.pop(key).cancel()
        return False

    async def _run_in_thread(
        self,
        thread: ThreadPoolExecutor,
        keys: list[QueryKey],
        function: Callable[..., _Result],
        *args: object,
    ) -> _Result | None:
        """Call a function in a thread and return its result.

        If it raises, the pending answers of the pairs `keys` fail with the exception, and the result
        is None.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, function, *args)
        except Exception as error:  # fails this batch alone; the next one may succeed
            for key in keys:
                self._pending.pop(key).set_exception(error)
            return None

    def _add_to_cache(self, key: QueryKey, answer: list[Passage]) -> None:
        if key in self._cache:
            return
        self._cache[key] = answer
        self._cache_bytes += answer_bytes(answer)
        while self._cache_bytes > self.cache_mb * 1e6:
            _, oldest = self._cache.popitem(last=False)
            self._cache_bytes -= answer_bytes(oldest)


def answer_bytes(answer: list[Passage]) -> int:
    """Return approximately how many bytes a cached answer and its query take."""
    return 1000 + sum(sys.getsizeof(passage.contents) + 400 for passage in answer)


def prometheus_text(batcher: Batcher) -> str:
    """Return the counters and histograms of a batcher in Prometheus' text format."""
    lines = ["# TYPE retriever_queued gauge", f"retriever_queued {batcher.queued}"]
    for name, count in asdict(batcher.counts).items():
        lines += [f"# TYPE retriever_{name}_total counter", f"retriever_{name}_total {count}"]
    histograms = {"latency_seconds": batcher.latency_s, "batch_size": batcher.batch_sizes}
    for name, histogram in histograms.items():
        bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        cumulative = list(accumulate(histogram.counts))
        lines.append(f"# TYPE retriever_{name} histogram")
        for bound, count in zip(bounds, cumulative, strict=True):
            lines.append(f'retriever_{name}_bucket{{le="{bound}"}} {count}')
        lines.append(f"retriever_{name}_sum {histogram.total:g}")
        lines.append(f"retriever_{name}_count {cumulative[-1]}")
    return "\n".join(lines) + "\n"
