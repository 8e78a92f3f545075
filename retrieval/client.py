"""The asynchronous retrieval client that agents and environments use; imports no torch and no FAISS."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from retrieval.corpus import Passage, RetrievalError
from retrieval.sidecar import RetrieverSidecar
from retrieval.wire import (
    DEFAULT_TOPK,
    MAX_BODY_BYTES,
    MAX_QUERIES,
    BadRequest,
    check_query,
    check_topk,
    parse_response,
)

__all__ = [
    "BadRequest",
    "Passage",
    "RetrievalClient",
    "RetrievalError",
    "RetrievalUnavailable",
    "RetrieverSidecar",
    "probe",
]

BACKOFF_S = 0.1  # mean of the first pause; doubles with each retry
MAX_BACKOFF_S = 5.0
BODY_ROOM = MAX_BODY_BYTES - 1024  # bytes of queries in one request

Reply = TypeVar("Reply")


class RetrievalUnavailable(RetrievalError):
    """The retriever gave no usable answer within the deadline and the retries."""


class RetrievalClient:
    """Searches a retrieval server; calls made in one event-loop tick share a POST.

    A client may be used from one event loop after another (`asyncio.run` per step), never from two at once.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0, retries: int = 4, token_file: Path | None = None) -> None:
        """`timeout_s` bounds a call with all its retries; `token_file` holds the server's bearer token, if any."""
        self.url = url.rstrip("/")
        self.posts = 0  # requests sent, retries included
        self.retried = 0  # of these, retries
        self._timeout_s = timeout_s
        self._retries = retries
        self._headers = {"Authorization": f"Bearer {token_file.read_text().strip()}"} if token_file else {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient | None = None
        self._waiting: dict[tuple[str, int], list[asyncio.Future[list[Passage]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def search(self, query: str, k: int = DEFAULT_TOPK) -> list[Passage]:
        """The `min(k, corpus size)` best passages, best first, with scores.

        Raises BadRequest for a query the server would refuse (empty, over 2000 characters, k outside 1..100) and
        RetrievalUnavailable when there is no answer in time: never an empty list.
        """
        key = (check_query(query), check_topk(k))
        loop = self._enter_loop()
        if not self._waiting:
            loop.call_soon(self._flush)
        future: asyncio.Future[list[Passage]] = loop.create_future()
        self._waiting.setdefault(key, []).append(future)
        return await future

    async def info(self) -> dict[str, Any]:
        """What the server says about its index: encoder, ntotal, sha256 and counts."""
        self._enter_loop()
        return await self._request("GET", "/info", None, _parse_info)

    async def aclose(self) -> None:
        """Closes the connections of the running event loop."""
        if self._http is not None:
            await self._http.aclose()
            self._http = self._loop = None

    async def __aenter__(self) -> "RetrievalClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _enter_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._waiting, self._tasks = {}, set()
            # trust_env off: a proxy variable must not send loopback traffic elsewhere.
            self._http = httpx.AsyncClient(
                base_url=self.url, headers=self._headers, trust_env=False, timeout=self._timeout_s
            )
        return loop

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for k in sorted({k for _, k in waiting}):
            for queries in _bodies([query for query, its_k in waiting if its_k == k]):
                task = asyncio.create_task(self._deliver({query: waiting[query, k] for query in queries}, k))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _deliver(self, waiting: dict[str, list[asyncio.Future[list[Passage]]]], k: int) -> None:
        body = {"queries": list(waiting), "topk": k, "return_scores": True}
        try:
            results = await self._request(
                "POST", "/retrieve", body, partial(parse_response, queries=len(waiting), topk=k)
            )
        except Exception as error:  # raised where each caller awaits
            for future in (future for futures in waiting.values() for future in futures if not future.done()):
                future.set_exception(error)
            return
        for futures, passages in zip(waiting.values(), results, strict=True):
            for future in (future for future in futures if not future.done()):
                future.set_result(list(passages))

    async def _request(self, method: str, path: str, body: object, parse: Callable[[bytes], Reply]) -> Reply:
        """The parsed reply; raises RetrievalError if refused (4xx), RetrievalUnavailable if time or retries ran out.

        A reply that `parse` rejects with ValueError counts as a failure of the server and is retried like one.
        """
        trouble = "no reply"
        try:
            async with asyncio.timeout(self._timeout_s):
                for attempt in range(self._retries + 1):
                    self.posts += 1
                    self.retried += attempt > 0
                    pause_s = random.uniform(0, 2) * min(BACKOFF_S * 2**attempt, MAX_BACKOFF_S)
                    try:
                        reply = await self._connection().request(method, path, json=body)
                        if reply.status_code == 200:
                            return parse(reply.content)
                        trouble = f"status {reply.status_code}: {reply.text[:200]}"
                        if reply.status_code < 500 and reply.status_code != 429:
                            raise RetrievalError(f"{self.url}{path} refused the request, {trouble}")
                        pause_s = max(pause_s, _retry_after_s(reply))
                    except httpx.TransportError as error:
                        trouble = str(error) or type(error).__name__
                    except ValueError as error:
                        trouble = f"malformed reply: {error}"
                    if attempt < self._retries:
                        await asyncio.sleep(pause_s)
        except TimeoutError:
            trouble = f"deadline of {self._timeout_s:g} s passed, last trouble: {trouble}"
        raise RetrievalUnavailable(f"retriever at {self.url} is unavailable ({trouble}); is the server running?")

    def _connection(self) -> httpx.AsyncClient:
        assert self._http is not None
        return self._http


def probe(server: str | RetrieverSidecar, sample: Sequence[Passage], k: int = DEFAULT_TOPK) -> dict[str, Any]:
    """Asks a server for each sample passage by its title, one after the other.

    Returns `n`, `k`, `recall_at_1` and `recall_at_k` (fractions; a hit is a passage with that title),
    `latency_ms_median`, `latency_ms_max`, `ntotal` and `encoder` (its name). Raises RetrievalUnavailable, and
    RetrievalError on an empty sample or a sidecar that is not running.
    """
    url = server.url if isinstance(server, RetrieverSidecar) else server
    if url is None or not sample:
        raise RetrievalError("probe needs a running server and at least one passage")
    return asyncio.run(_probe(url, sample, k))


async def _probe(url: str, sample: Sequence[Passage], k: int) -> dict[str, Any]:
    latency_ms, ranks = [], []
    async with RetrievalClient(url) as client:
        info = await client.info()
        for passage in sample:
            start = time.perf_counter()
            titles = [found.title for found in await client.search(passage.title, k)]
            latency_ms.append(1000 * (time.perf_counter() - start))
            ranks.append(titles.index(passage.title) if passage.title in titles else k)
    return {
        "n": len(sample),
        "k": k,
        "recall_at_1": sum(rank == 0 for rank in ranks) / len(ranks),
        "recall_at_k": sum(rank < k for rank in ranks) / len(ranks),
        "latency_ms_median": round(statistics.median(latency_ms), 3),
        "latency_ms_max": round(max(latency_ms), 3),
        "ntotal": info["ntotal"],
        "encoder": info["encoder"]["name"],
    }


def _bodies(queries: list[str]) -> Iterator[list[str]]:
    """The queries in runs that each fit one request: its number of queries and its bytes."""
    run: list[str] = []
    room = BODY_ROOM
    for query in queries:
        size = len(json.dumps(query).encode()) + 1
        if run and (len(run) == MAX_QUERIES or size > room):
            yield run
            run, room = [], BODY_ROOM
        run.append(query)
        room -= size
    if run:
        yield run


def _parse_info(body: bytes) -> dict[str, Any]:
    info = json.loads(body)
    if not isinstance(info, dict):
        raise ValueError("expected an object")
    return info


def _retry_after_s(reply: httpx.Response) -> float:
    value = reply.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0
