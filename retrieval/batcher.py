"""Dynamic batching: many concurrent requests become few searches, while the next queries are encoded."""

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
from retrieval.wire import Where

FilteredQuery = tuple[str, Where]  # a query, of some passages or, with (), of all
QueryKey = tuple[FilteredQuery, int]  # with k
Made = TypeVar("Made")


class Overloaded(Exception):
    """The queue is full, or the answer did not come within the deadline: ask again later."""


@dataclass(slots=True)
class Counts:
    """What the batcher has done since it started."""

    searches: int = 0  # calls of the search function
    searched: int = 0  # (query, k) pairs those calls answered
    cached: int = 0  # pairs answered from the cache
    rejected: int = 0  # requests turned away because the queue was full
    late: int = 0  # requests whose deadline passed
    dropped: int = 0  # pairs that were not searched, because whoever asked had gone


class Histogram:
    """How many values were at most each bound, as Prometheus counts them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: of larger ones
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


LATENCIES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(eq=False)
class Batcher:
    """Two queues with a thread each, and a least-recently-used cache; `run` must be running for `submit` to finish.

    One thread encodes a few queries at a time, the other searches for all that are encoded by then: as long as
    queries come, it is never idle. Requests take turns, a pair each, so that a long one holds up no short one.
    `search` must give a query the same passages whatever it is batched with, and a
    smaller k a prefix of a larger one's answer: requests of different k share a batch.
    """

    encode: Callable[[list[str]], np.ndarray]  # queries -> [Q, dim], each row whatever its batch
    search: Callable[
        [list[FilteredQuery], np.ndarray, int], list[list[Passage]]
    ]  # with vectors and k
    _: KW_ONLY
    max_batch: int = 64
    max_wait_s: float = 0.002
    max_queue: int = 4096
    cache_mb: float = 256.0
    deadline_s: float = 30.0

    def __post_init__(self) -> None:
        self.counts = Counts()
        self._cache: OrderedDict[QueryKey, list[Passage]] = OrderedDict()
        self._cached_bytes = 0
        self.latency_s = Histogram(LATENCIES_S)  # of requests that were answered
        self.batches = Histogram(BATCHES)  # pairs in each search
        self._pending: dict[
            QueryKey, asyncio.Future[list[Passage]]
        ] = {}  # queued or being searched
        self._wanted: Counter[QueryKey] = Counter()  # requests that wait for a pair
        self._queue: deque[deque[QueryKey]] = deque()  # of each request what is not encoded yet
        self._encoded: deque[tuple[QueryKey, np.ndarray]] = deque()
        self._wake, self._wake_search, self._room = (
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
        )
        self._room.set()

    @property
    def queued(self) -> int:
        """Pairs that wait for a search."""
        return sum(map(len, self._queue)) + len(self._encoded)

    async def submit(
        self, queries: list[str], k: int, *, where: Where = (), use_cache: bool = True
    ) -> list[list[Passage]]:
        """Passages for each query, in order; raises Overloaded, or what the search raised."""
        began = asyncio.get_running_loop().time()
        keys = [((query, where), k) for query in queries]
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
            self._pending |= {key: asyncio.get_running_loop().create_future() for key in new}
            self._queue.append(deque(new))
            self._wake.set()
        futures = {key: self._pending[key] for key in missing}
        self._wanted.update(missing)
        try:
            if futures:
                # wait, unlike gather, leaves the futures alone when this caller is cancelled: others may share them.
                _, late = await asyncio.wait(futures.values(), timeout=self.deadline_s)
                if late:
                    self.counts.late += 1
                    raise Overloaded(f"no answer within {self.deadline_s:g} s")
        finally:
            for key in missing:
                self._wanted[key] -= 1
                if not self._wanted[key]:
                    del self._wanted[key]
        answers |= {key: future.result() for key, future in futures.items()}
        self.latency_s.add(asyncio.get_running_loop().time() - began)
        return [answers[key] for key in keys]

    async def run(self) -> None:
        """Searches for what is queued, until cancelled."""
        encoding, searching = (
            ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("encode", "search")
        )
        try:
            async with asyncio.TaskGroup() as stages:
                stages.create_task(self._encode_all(encoding))
                stages.create_task(self._search_all(searching))
        finally:  # what is under way ends by itself
            encoding.shutdown(wait=False)
            searching.shutdown(wait=False)

    async def _encode_all(self, thread: ThreadPoolExecutor) -> None:
        some = max(1, self.max_batch // 4)  # the search need not wait for all
        while True:
            await self._wake.wait()
            await self._room.wait()
            if self.queued < some:
                await asyncio.sleep(self.max_wait_s)
            keys = [key for key in self._next(some) if self._is_wanted(key)]
            if not self._queue:
                self._wake.clear()
            queries = list(dict.fromkeys(query for (query, _), _ in keys))
            vectors = await self._made(keys, thread, self.encode, queries)
            if vectors is not None:
                rows = dict(zip(queries, vectors, strict=True))
                self._encoded.extend((key, rows[key[0][0]]) for key in keys)
                self._wake_search.set()
                if (
                    len(self._encoded) > self.max_batch
                ):  # who comes next need not wait for more than these
                    self._room.clear()

    async def _search_all(self, thread: ThreadPoolExecutor) -> None:
        while True:
            await self._wake_search.wait()
            some = [self._encoded.popleft() for _ in range(min(self.max_batch, len(self._encoded)))]
            taken = [one for one in some if self._is_wanted(one[0])]
            self._room.set()
            if not self._encoded:
                self._wake_search.clear()
            if taken:
                await self._answer(taken, thread)

    def _next(self, most: int) -> list[QueryKey]:
        """Pairs to encode, of each request in turn."""
        taken: list[QueryKey] = []
        while self._queue and len(taken) < most:
            own = self._queue.popleft()
            taken.append(own.popleft())
            if own:
                self._queue.append(own)
        return taken

    def _is_wanted(self, key: QueryKey) -> bool:
        """Whether somebody waits for the pair still; else it is dropped."""
        if self._wanted[key] > 0:
            return True
        self.counts.dropped += 1
        self._pending.pop(key).cancel()
        return False

    async def _made(
        self,
        keys: list[QueryKey],
        thread: ThreadPoolExecutor,
        make: Callable[..., Made],
        *args: object,
    ) -> Made | None:
        """What `make` gives for some pairs; None if there are none, or if it fails, which is the callers' to see."""
        try:
            return (
                await asyncio.get_running_loop().run_in_executor(thread, make, *args)
                if keys
                else None
            )
        except Exception as error:  # the next batch may well work
            for key in keys:
                self._pending.pop(key).set_exception(error)
            return None

    async def _answer(
        self, taken: list[tuple[QueryKey, np.ndarray]], thread: ThreadPoolExecutor
    ) -> None:
        keys, rows = [key for key, _ in taken], {key[0]: row for key, row in taken}
        self.counts.searches += 1
        self.counts.searched += len(keys)
        self.batches.add(len(keys))
        most = max(k for _, k in keys)
        found = await self._made(
            keys, thread, self.search, list(rows), np.stack([*rows.values()]), most
        )
        if found is None:
            return
        passages = dict(zip(rows, found, strict=True))
        for key in keys:
            answer = passages[key[0]][: key[1]]
            self._pending.pop(key).set_result(answer)
            if key not in self._cache:
                self._cache[key] = answer
                self._cached_bytes += _size(answer)
        while self._cached_bytes > self.cache_mb * 1e6:
            self._cached_bytes -= _size(self._cache.popitem(last=False)[1])


def _size(answer: list[Passage]) -> int:
    """Bytes that an answer takes, with its query, about."""
    return 1000 + sum(sys.getsizeof(passage.contents) + 400 for passage in answer)


def prometheus(batcher: Batcher) -> str:
    """What a batcher has done, in Prometheus' text format."""
    lines = ["# TYPE retriever_queued gauge", f"retriever_queued {batcher.queued}"]
    for name, count in asdict(batcher.counts).items():
        lines += [f"# TYPE retriever_{name}_total counter", f"retriever_{name}_total {count}"]
    for name, made in (("latency_seconds", batcher.latency_s), ("batch_size", batcher.batches)):
        below = list(accumulate(made.counts))
        lines.append(f"# TYPE retriever_{name} histogram")
        for bound, count in zip(
            [*(f"{bound:g}" for bound in made.bounds), "+Inf"], below, strict=True
        ):
            lines.append(f'retriever_{name}_bucket{{le="{bound}"}} {count}')
        lines += [f"retriever_{name}_sum {made.total:g}", f"retriever_{name}_count {below[-1]}"]
    return "\n".join(lines) + "\n"
