"""Client of retrieval servers; it loads without torch, FAISS and NumPy."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import tenacity

from retrieval import wire
from retrieval.corpus import Passage, RetrievalError
from retrieval.regular_files import read_regular_text
from retrieval.wire import DEFAULT_TOPK, BadRequest

__all__ = [
    "BadRequest",
    "NoRetriever",
    "Passage",
    "RetrievalClient",
    "RetrievalError",
    "RetrievalUnavailable",
]

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.4  # upper bound of the first random pause between attempts; it doubles each time
LONGEST_PAUSE_S = 10.0
SKIP_S = 10.0  # time for which a server that could not be reached is skipped, if there are others
POLL_S = 2.0  # pause between two rounds of /health while no server answers
HEALTH_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 100  # concurrent requests at each server
MAX_POST_QUERIES = 256  # queries in one request; more are sent in several requests
MAX_POST_BYTES = wire.MAX_BODY_BYTES - 1024  # bytes of queries in one request
SHOWN_CHARS = 200  # length of a shown error message of a server
BUSY_STATUSES = (408, 425, 429)  # statuses below 500 after which another attempt may succeed

Parsed = TypeVar("Parsed")
_Query = tuple[str, int]  # a query and its k


class RetrievalUnavailable(RetrievalError):
    """The servers gave no usable answer within the deadline of a request."""


class NoRetriever(RetrievalUnavailable):
    """No server answered /health within the patience of the client."""


class _Unanswered(Exception):
    """An attempt got no usable answer, but the next one may succeed."""


class _NoServer(Exception):
    """A server could not be reached, and none answers /health."""


@dataclass(eq=False)
class _Endpoint:
    """Server of the client, which is skipped for a while after it could not be reached."""

    url: str
    skipped_until: float = 0.0  # on the clock time.monotonic()

    @property
    def is_skipped(self) -> bool:
        return time.monotonic() < self.skipped_until


@dataclass(eq=False)
class _LoopState:
    """Connections, waiting searches and locks, which belong to one event loop."""

    loop: asyncio.AbstractEventLoop
    http: httpx.AsyncClient
    slots: dict[_Endpoint, asyncio.Semaphore]
    waiting: dict[_Query, list[asyncio.Future[list[Passage]]]] = field(default_factory=dict)
    outage: asyncio.Lock = field(default_factory=asyncio.Lock)
    given_up: int = 0  # number of outages that outlasted the patience of the client
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class RetrievalClient:
    """Asynchronous client of one or several retrieval servers over the same index.

    Searches with the same k that start in the same iteration of the event loop share a POST. Requests go to the
    servers in turn. A request without a usable answer is sent again, to the next server, until
    `timeout_s` has passed. If no server answers /health, all requests wait up to `patience_s` for
    one; a warning is logged when the wait begins, and another when a server answers again.

    A client may be used from one event loop after another, such as one `asyncio.run` per training
    step, but not from two at once.

    Attributes:
        posts: requests sent, including repeated ones.
        retried: repeated requests among them.
        outages: number of times at which no server answered /health.
    """

    def __init__(
        self,
        *urls: str,
        timeout_s: float = 30.0,
        patience_s: float = 0.0,
        token_file: Path | None = None,
        revive: Callable[[], object] | None = None,
    ) -> None:
        """Store the settings; nothing is sent.

        Args:
            urls: base URLs of the servers.
            timeout_s: deadline of one request including its repetitions. Time without any server does
                not count, nor does the wait for a connection while MAX_CONNECTIONS other requests are
                under way at the same server.
            patience_s: time to wait for a server when none answers.
            token_file: file with the bearer token of the servers, if they have one.
            revive: called repeatedly while no server answers; it may restart one.
        """
        self.posts = 0
        self.retried = 0
        self.outages = 0
        self._endpoints = [_Endpoint(url.rstrip("/")) for url in urls]
        self._turns = itertools.count()
        self.timeout_s = timeout_s
        self.patience_s = patience_s
        self._revive = revive
        self._headers = {}
        if token_file is not None:
            self._headers["Authorization"] = f"Bearer {read_regular_text(token_file).strip()}"
        self._loop_state: _LoopState | None = None

    def __str__(self) -> str:
        return ", ".join(endpoint.url for endpoint in self._endpoints)

    async def search(self, query: str, k: int = DEFAULT_TOPK) -> list[Passage]:
        """Return the `min(k, corpus size)` best passages with their scores, best first.

        Raises:
            BadRequest: the query is empty or longer than 2000 characters, or k is not in 0..100; 0
                stands for DEFAULT_TOPK.
            RetrievalUnavailable: there was no usable answer in time.
        """
        key = (wire.check_query(query), wire.check_topk(k))
        state = self._state()
        if not state.waiting:
            state.loop.call_soon(self._send_waiting, state)
        future: asyncio.Future[list[Passage]] = state.loop.create_future()
        state.waiting.setdefault(key, []).append(future)
        return await future

    async def passages(self, id: str, around: int = 0) -> list[Passage]:
        """Return the passage with this id and up to `around` neighbours on each side, at most 5.

        Neighbours have the same title. The list is empty if no passage has this id. Only servers of
        this package know passages by id.

        Raises:
            BadRequest: the id is empty or too long.
            RetrievalUnavailable: there was no usable answer in time.
        """
        body = {"ids": [wire.check_query(id, "id")], "around": min(max(around, 0), wire.MAX_AROUND)}
        return await self._request("POST", "/passages", body, wire.parse_passages)

    async def info(self) -> dict[str, Any]:
        """Return the server's manifest of its index, its counts and its process id."""
        return await self._request("GET", "/info", body=None, parse=_parse_info)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        state = self._loop_state
        self._loop_state = None
        if state is not None and state.loop is asyncio.get_running_loop():
            await state.http.aclose()

    async def __aenter__(self) -> RetrievalClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _state(self) -> _LoopState:
        """Return the state of the running event loop, and drop that of an earlier one."""
        loop = asyncio.get_running_loop()
        if self._loop_state is None or self._loop_state.loop is not loop:
            http = httpx.AsyncClient(
                headers=self._headers,
                timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
                # The slots limit connections, so that /health never waits for a search.
                limits=httpx.Limits(max_keepalive_connections=MAX_CONNECTIONS),
                trust_env=False,  # neither queries nor the token go through a proxy
            )
            slots = {endpoint: asyncio.Semaphore(MAX_CONNECTIONS) for endpoint in self._endpoints}
            self._loop_state = _LoopState(loop, http, slots)
        return self._loop_state

    def _send_waiting(self, state: _LoopState) -> None:
        """Start requests for all searches of this iteration of the event loop, grouped by k."""
        waiting = state.waiting
        state.waiting = {}
        for k in sorted({k for _, k in waiting}):
            for queries in _split_queries([query for query, query_k in waiting if query_k == k]):
                futures = [waiting[query, k] for query in queries]
                task = state.loop.create_task(self._deliver(queries, k, futures))
                state.tasks.add(task)
                task.add_done_callback(state.tasks.discard)

    async def _deliver(
        self, queries: list[str], k: int, futures: list[list[asyncio.Future[list[Passage]]]]
    ) -> None:
        """Send one request, and give its answers or its exception to the waiting searches."""
        body = {"queries": queries, "topk": k, "return_scores": True}
        parse = partial(wire.parse_response, query_count=len(queries), topk=k)
        try:
            answers = await self._request("POST", "/retrieve", body, parse)
        except Exception as error:
            for future in itertools.chain(*futures):
                if not future.done():  # a cancelled search is done
                    future.set_exception(error)
            return
        for passages, waiting in zip(answers, futures, strict=True):
            for future in waiting:
                if not future.done():
                    future.set_result(list(passages))

    async def _request(
        self, method: str, path: str, body: object, parse: Callable[[bytes], Parsed]
    ) -> Parsed:
        """Return the parsed answer of the first server that gives a usable one."""

        waits_s: list[float] = []  # for a connection, before each attempt

        def count_retry(_: tenacity.RetryCallState) -> None:
            self.retried += 1

        def is_late(state: tenacity.RetryCallState) -> bool:
            return (state.seconds_since_start or 0.0) - sum(waits_s) >= self.timeout_s

        attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_Unanswered),
            wait=tenacity.wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            stop=is_late,
            before_sleep=count_retry,
            reraise=True,
        )
        while True:
            try:
                return await attempts(self._attempt, method, path, body, parse, waits_s)
            except _NoServer as failure:
                waits_s.clear()  # the next call of `attempts` starts a new deadline
                await self._wait_for_server(str(failure))
            except _Unanswered as failure:
                raise RetrievalUnavailable(
                    f"retriever at {self} gave no usable answer to {path} within "
                    f"{self.timeout_s:g} s ({failure})"
                ) from None

    async def _attempt(
        self,
        method: str,
        path: str,
        body: object,
        parse: Callable[[bytes], Parsed],
        waits_s: list[float],
    ) -> Parsed:
        """Send a request to the next server; append the seconds that it has waited for a connection.

        Raises:
            RetrievalError: the server refused the request.
            _NoServer: this server could not be reached, and none answers /health.
            _Unanswered: there was no usable answer for another reason.
        """
        endpoint = self._next_endpoint()
        state = self._state()
        # A server that hangs leaves time to ask each of the others.
        timeout_s = self.timeout_s / len(self._endpoints)
        try:
            began = time.monotonic()
            async with state.slots[endpoint]:
                waits_s.append(time.monotonic() - began)
                async with asyncio.timeout(timeout_s):
                    self.posts += 1
                    reply = await state.http.request(method, endpoint.url + path, json=body)
        except (httpx.RequestError, TimeoutError) as error:
            problem = str(error) or type(error).__name__
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | TimeoutError):
                endpoint.skipped_until = time.monotonic() + SKIP_S
                if not await self._any_server_answers():
                    raise _NoServer(problem) from None
            raise _Unanswered(problem) from None

        if reply.status_code != 200:
            problem = f"status {reply.status_code}: {' '.join(reply.text[:SHOWN_CHARS].split())}"
            if reply.status_code >= 500 or reply.status_code in BUSY_STATUSES:
                raise _Unanswered(problem)
            raise RetrievalError(f"{endpoint.url}{path} refused the request, {problem}")
        try:
            return parse(reply.content)
        except ValueError as error:
            raise _Unanswered(f"malformed reply: {error}") from None

    def _next_endpoint(self) -> _Endpoint:
        """Return the next server in turn, among those that are not skipped, or among all if all are skipped."""
        if not self._endpoints:
            raise RetrievalError("a retrieval client needs the URL of at least one server")
        candidates = [endpoint for endpoint in self._endpoints if not endpoint.is_skipped]
        if not candidates:
            candidates = self._endpoints
        return candidates[next(self._turns) % len(candidates)]

    async def _any_server_answers(self) -> bool:
        """Return True if a server answers /health; servers of other makes answer with 404."""
        http = self._state().http
        for endpoint in self._endpoints:
            with suppress(httpx.RequestError, TimeoutError):
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    reply = await http.get(f"{endpoint.url}/health")
                if reply.status_code < 500:
                    return True
        return False

    async def _wait_for_server(self, problem: str) -> None:
        """Wait until a server answers /health.

        The first request of an outage polls, and the others wait for its result.

        Raises:
            NoRetriever: no server answered for `patience_s` from the first request on.
        """
        failure = NoRetriever(
            f"retriever at {self} is unavailable ({problem}); is the server running?"
        )
        state = self._state()
        given_up = state.given_up
        async with state.outage:
            if state.given_up > given_up:  # another request polled meanwhile, in vain
                raise failure
            if await self._any_server_answers():
                return
            began = time.monotonic()
            self.outages += 1
            if self.patience_s:
                logger.warning(
                    "retriever: no server answers (%s): %s; the run waits at most %g s",
                    problem,
                    self,
                    self.patience_s,
                )
            while time.monotonic() - began < self.patience_s:
                if self._revive is not None:
                    self._revive()
                await asyncio.sleep(POLL_S)
                if await self._any_server_answers():
                    waited_s = time.monotonic() - began
                    logger.warning("retriever: %s answers again after %.0f s", self, waited_s)
                    return
            state.given_up += 1
        raise failure


def _split_queries(queries: list[str]) -> Iterator[list[str]]:
    """Yield the queries in parts that fit one request, by their number and their bytes."""
    part: list[str] = []
    part_bytes = 0
    for query in queries:
        query_bytes = len(json.dumps(query).encode()) + 1
        if part and (len(part) == MAX_POST_QUERIES or part_bytes + query_bytes > MAX_POST_BYTES):
            yield part
            part = []
            part_bytes = 0
        part.append(query)
        part_bytes += query_bytes
    if part:
        yield part


def _parse_info(body: bytes) -> dict[str, Any]:
    info = json.loads(body)
    if not isinstance(info, dict):
        raise ValueError("expected an object")
    return info
