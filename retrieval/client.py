"""Retrieval client for agents and environments: asynchronous, without torch and FAISS."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mcore_mas.retrieval import wire
from mcore_mas.retrieval.corpus import Passage, RetrievalError
from mcore_mas.retrieval.endpoints import Balance, EndpointPool, Parsed
from mcore_mas.retrieval.wire import DEFAULT_TOPK, BadRequest, Where
from mcore_mas.rollout.base.http import Refused, Unanswered, retried
from mcore_mas.rollout.base.processes import say
from mcore_mas.rollout.base.task_group import settle

__all__ = ["BadRequest", "NoRetriever", "Passage", "RetrievalClient", "RetrievalError", "RetrievalUnavailable"]

POLL_S = 2.0  # between two looks for a server when none answers, about
POSTED = 256  # queries in one request; more go to several servers
BODY_ROOM = wire.MAX_BODY_BYTES - 1024  # bytes of queries in one request


class RetrievalUnavailable(RetrievalError):
    """The retriever gave no usable answer within the deadline and the retries."""


class NoRetriever(RetrievalUnavailable):
    """No endpoint answered anything, for as long as the client has patience."""


class RetrievalClient:
    """Searches retrieval servers; calls made in one event-loop tick share a POST.

    A request that one server does not answer goes to the next, and is tried again with pauses. When no server answers
    even /health, callers wait until one does, and `say` tells so once. A client may be used from one event loop after
    another (`asyncio.run` per step), never from two at once.
    """

    def __init__(
        self,
        *urls: str,
        members: Path | None = None,
        balance: Balance = "least_loaded",
        timeout_s: float = 30.0,
        retries: int = 4,
        patience_s: float = 0.0,
        token_file: Path | None = None,
        revive: Callable[[], object] | None = None,
    ) -> None:
        """Set up; nothing is sent.

        Args:
            members: folder where further servers say where they are (`--ready-file` in it).
            balance: which server is asked first, a key of BALANCES.
            timeout_s: of a request with its retries, while servers answer.
            retries: further rounds through the servers.
            patience_s: how long callers wait for a server when none answers.
            token_file: the bearer token of `urls`, if they have one.
            revive: called when no server answers, such as a sidecar's.
        """
        self.posts = 0  # requests sent, retries included
        self.retried = 0  # of these, further rounds
        self.outages = 0  # times that no server answered
        token = token_file.read_text().strip() if token_file else None
        self._pool = EndpointPool(urls, members=members, token=token, balance=balance)
        self._timeout_s, self._retries, self._patience_s = timeout_s, retries, patience_s
        self._revive = revive
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[tuple[str, int, Where], list[asyncio.Future[list[Passage]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def search(
        self, query: str, k: int = DEFAULT_TOPK, where: Mapping[str, str | list[str]] | None = None
    ) -> list[Passage]:
        """The `min(k, corpus size)` best passages, best first, with scores; with `where` of those that are so.

        Raises BadRequest for a query the server would refuse (empty, over 2000 characters, k outside 1..100) and
        RetrievalUnavailable when there is no answer in time: never an empty list, unless no passage is as `where` says.
        Servers of others know no `where`.
        """
        key = (wire.check_query(query), wire.check_topk(k), wire.check_where(where))
        loop = self._enter_loop()
        if not self._waiting:
            loop.call_soon(self._flush)
        future: asyncio.Future[list[Passage]] = loop.create_future()
        self._waiting.setdefault(key, []).append(future)
        return await future

    async def passages(self, id: str, around: int = 0) -> list[Passage]:
        """A passage by its id with up to `around` neighbours of its document on each side; [] if there is none.

        Raises BadRequest and RetrievalUnavailable like `search`. Servers of others have no passages by id.
        """
        body = {"ids": [wire.check_query(id, "id")], "around": min(max(around, 0), wire.MAX_AROUND)}
        return await self._request("POST", "/passages", body, wire.parse_passages)

    async def info(self) -> dict[str, Any]:
        """What the server says about its index: encoder, ntotal, sha256 and counts."""
        return await self._request("GET", "/info", None, _parse_info)

    async def aclose(self) -> None:
        """Closes the connections of the running event loop."""
        await self._pool.aclose()

    async def __aenter__(self) -> RetrievalClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _enter_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._waiting, self._tasks, self._outage = loop, {}, set(), asyncio.Lock()
        return loop

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for k, where in sorted({(k, where) for _, k, where in waiting}):
            for queries in _bodies([query for query, *rest in waiting if rest == [k, where]]):
                task = asyncio.create_task(self._deliver({one: waiting[one, k, where] for one in queries}, k, where))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _deliver(self, waiting: dict[str, list[asyncio.Future[list[Passage]]]], k: int, where: Where) -> None:
        body = {"queries": list(waiting), "topk": k, "return_scores": True}
        body |= {"where": dict(where)} if where else {}
        parse = partial(wire.parse_response, queries=len(waiting), topk=k, least=int(not where))
        results: Sequence[list[Passage] | Exception]
        try:
            results = await self._request("POST", "/retrieve", body, parse)
        except Exception as error:  # raised where each caller awaits
            results = [error] * len(waiting)
        for futures, found in zip(waiting.values(), results, strict=True):
            for future in futures:
                settle(future, list(found) if isinstance(found, list) else found)

    async def _request(self, method: str, path: str, body: object, parse: Callable[[bytes], Parsed]) -> Parsed:
        """The parsed reply; raises RetrievalError if refused (4xx), RetrievalUnavailable if time or retries ran out.

        A failure while servers answer /health is the request's own: it is tried once more, and given up.
        """
        self._enter_loop()
        failures, trouble = 0, ""

        async def ask_each() -> Parsed:
            """The answer of the first server that gives one; each has its share of the time."""
            nonlocal trouble
            order = self._pool.order()
            failure = Unanswered("no server is known")
            for endpoint in order:
                self.posts += 1
                try:
                    return await endpoint.ask(method, path, body, parse, timeout_s=self._timeout_s / len(order))
                except Unanswered as error:
                    failure, trouble = error, str(error)
            raise failure

        while True:
            trouble = "no reply"
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await retried(ask_each, retries=self._retries, note=self._count)
            except Refused as refusal:
                raise RetrievalError(f"{self._pool}: {path} refused the request, {refusal}") from None
            except TimeoutError:
                trouble = f"deadline of {self._timeout_s:g} s passed, last trouble: {trouble}"
            except Unanswered:
                pass
            if await self._waited_out(trouble):
                continue
            failures += 1
            if failures == 2:
                raise RetrievalUnavailable(f"retriever at {self._pool} is unavailable ({trouble})")

    async def _waited_out(self, trouble: str) -> bool:
        """Whether no server answered, and now one does.

        Raises:
            NoRetriever: none did within the client's patience.
        """
        others_wait = self._outage.locked()
        async with self._outage:
            if await self._pool.alive():
                return others_wait
            began, self.outages = time.monotonic(), self.outages + 1
            if self._patience_s:
                waits = f"the run waits at most {self._patience_s:g} s"
                say(f"retriever: no server answers ({trouble}): {self._pool}; {waits}")
            while time.monotonic() - began < self._patience_s:
                if self._revive:
                    self._revive()
                await asyncio.sleep(random.uniform(0.5, 1.5) * POLL_S)
                if await self._pool.alive():
                    say(f"retriever: {self._pool} answers again after {time.monotonic() - began:.0f} s")
                    return True
        raise NoRetriever(f"retriever at {self._pool} is unavailable ({trouble}); is the server running?")

    def _count(self) -> None:
        self.retried += 1


def _bodies(queries: list[str]) -> Iterator[list[str]]:
    """The queries in runs that each fit one request: its number of queries and its bytes."""
    run: list[str] = []
    room = BODY_ROOM
    for query in queries:
        size = len(json.dumps(query).encode()) + 1
        if run and (len(run) == POSTED or size > room):
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
