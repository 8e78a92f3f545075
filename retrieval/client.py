"""Retrieval client for agents and environments, without torch and FAISS; its servers, each with a circuit breaker."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from retrieval import wire
from retrieval.corpus import Passage, RetrievalError
from retrieval.wire import DEFAULT_TOPK, BadRequest, Where
from rollout.base.http import HttpClient, Refused, Unanswered, retried
from rollout.base.processes import say
from rollout.base.task_group import forget, of_loop, settle

__all__ = [
    "BadRequest",
    "NoRetriever",
    "Passage",
    "RetrievalClient",
    "RetrievalError",
    "RetrievalUnavailable",
]

POLL_S = 2.0  # between two looks for a server when none answers, about
POSTED = 256  # queries in one request; more go to several servers
BODY_ROOM = wire.MAX_BODY_BYTES - 1024  # bytes of queries in one request
BREAKS_AFTER = (
    3  # failures in a row that open a circuit; one connection that cannot be made does too
)
REST_S, MOST_REST_S = (
    0.5,
    30.0,
)  # how long a circuit stays open at first, doubled at every further failure, and at most
HEALTH_S = 5.0  # for an answer to /health
MEETS_S = 1.0  # between two looks into the folder of members
STALE_S = 30.0  # without a heartbeat after which a member is gone

Parsed = TypeVar("Parsed")
_Waiting = dict[
    tuple[str, int, Where], list[asyncio.Future[list[Passage]]]
]  # by query, k and filter
Balance = Literal["round_robin", "random", "least_loaded"]


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
        loop, waiting = asyncio.get_running_loop(), of_loop((self, "waiting"), _Waiting)
        if not waiting:
            loop.call_soon(self._flush, waiting)
        future: asyncio.Future[list[Passage]] = loop.create_future()
        waiting.setdefault(key, []).append(future)
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
        forget(self)

    async def __aenter__(self) -> RetrievalClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _flush(self, all_waiting: _Waiting) -> None:
        waiting = all_waiting.copy()
        all_waiting.clear()
        for k, where in sorted({(k, where) for _, k, where in waiting}):
            for queries in _bodies([query for query, *rest in waiting if rest == [k, where]]):
                task = asyncio.create_task(
                    self._deliver({one: waiting[one, k, where] for one in queries}, k, where)
                )
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _deliver(
        self, waiting: dict[str, list[asyncio.Future[list[Passage]]]], k: int, where: Where
    ) -> None:
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

    async def _request(
        self, method: str, path: str, body: object, parse: Callable[[bytes], Parsed]
    ) -> Parsed:
        """The parsed reply; raises RetrievalError if refused (4xx), RetrievalUnavailable if time or retries ran out.

        A failure while servers answer /health is the request's own: it is tried once more, and given up.
        """
        failures, trouble = 0, ""

        async def ask_each() -> Parsed:
            """The answer of the first server that gives one; each has its share of the time."""
            nonlocal trouble
            order = self._pool.order()
            failure = Unanswered("no server is known")
            for endpoint in order:
                self.posts += 1
                try:
                    return await endpoint.ask(
                        method, path, body, parse, timeout_s=self._timeout_s / len(order)
                    )
                except Unanswered as error:
                    failure, trouble = error, str(error)
            raise failure

        while True:
            trouble = "no reply"
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await retried(ask_each, retries=self._retries, note=self._count)
            except Refused as refusal:
                # what is wrong with a filter only a server of ours can see, and it is whoever asked that is wrong
                filtered = (
                    isinstance(body, dict)
                    and "where" in body
                    and str(refusal).startswith("status 422")
                )
                kind = BadRequest if filtered else RetrievalError
                raise kind(f"{self._pool}: {path} refused the request, {refusal}") from None
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
        """Whether no server answered, and now one does; NoRetriever where none did within the client's patience."""
        outage = of_loop((self, "outage"), asyncio.Lock)
        others_wait = outage.locked()
        async with outage:
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
                    say(
                        f"retriever: {self._pool} answers again after {time.monotonic() - began:.0f} s"
                    )
                    return True
        raise NoRetriever(
            f"retriever at {self._pool} is unavailable ({trouble}); is the server running?"
        )

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


class Endpoint:
    """One server: its connections, the requests under way, and a circuit breaker.

    The circuit opens after failures in a row, for a time that doubles with each; then one more request tries it.
    A server that is busy (503 with Retry-After) has not failed.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.http = HttpClient(url, token=token)
        self.url = self.http.url
        self.under_way = 0
        self._failures = 0
        self._rests_until = 0.0  # s, monotonic

    @property
    def resting(self) -> bool:
        """Whether its circuit is open."""
        return time.monotonic() < self._rests_until

    async def ask(
        self,
        method: str,
        path: str,
        body: object,
        parse: Callable[[bytes], Parsed],
        *,
        timeout_s: float,
    ) -> Parsed:
        """The parsed answer; one that `parse` rejects with ValueError is a failure of the server.

        Raises:
            Unanswered: there is none that can be used.
            Refused: the server takes no such request.
        """
        self.under_way += 1
        try:
            reply = await self.http.send(method, path, body, timeout_s=timeout_s)
            answer = parse(reply.succeeded().content)
        except Unanswered as error:
            if not error.retry_after_s:
                self._failed(unreachable=error.unbilled)
            raise
        except ValueError as error:
            self._failed()
            raise Unanswered(f"malformed reply: {error}") from None
        finally:
            self.under_way -= 1
        self._failures = 0
        return answer

    async def alive(self) -> bool:
        """Whether anything answers, whatever it says: foreign servers have no /health."""
        try:
            return (await self.http.send("GET", "/health", timeout_s=HEALTH_S)).status < 500
        except Unanswered:
            return False

    def _failed(self, *, unreachable: bool = False) -> None:
        self._failures = max(self._failures + 1, BREAKS_AFTER * unreachable)
        if self._failures >= BREAKS_AFTER:
            rest_s = min(REST_S * 2 ** (self._failures - BREAKS_AFTER), MOST_REST_S)
            self._rests_until = time.monotonic() + rest_s * random.uniform(0.5, 1.5)


def _rotated(endpoints: list[Endpoint], turn: int) -> list[Endpoint]:
    first = turn % len(endpoints)
    return endpoints[first:] + endpoints[:first]


# (endpoints, how many requests there were) -> the order in which they are tried
BALANCES: dict[Balance, Callable[[list[Endpoint], int], list[Endpoint]]] = {
    "round_robin": _rotated,
    "random": lambda endpoints, _: random.sample(endpoints, len(endpoints)),
    "least_loaded": lambda endpoints, turn: sorted(
        _rotated(endpoints, turn), key=lambda one: one.under_way
    ),
}


class EndpointPool:
    """The servers that are named, and those that say in a folder where they are (`--ready-file FOLDER/NAME.json`).

    Such a file has the server's URL and token, and changes as long as it lives: one that has not for STALE_S counts
    no more.
    """

    def __init__(
        self,
        urls: Iterable[str],
        *,
        members: Path | None = None,
        token: str | None = None,
        balance: Balance,
    ) -> None:
        self._named = [Endpoint(url, token) for url in urls]
        self._members_folder, self._members = members, dict[tuple[str, str | None], Endpoint]()
        self._beats: dict[
            Path, tuple[int, float]
        ] = {}  # of a file: its mtime, and when that was first seen
        self._met_at, self._turns, self._balance = -MEETS_S, 0, BALANCES[balance]

    def __str__(self) -> str:
        urls = ", ".join(endpoint.url for endpoint in self.endpoints)
        return urls or f"{self._members_folder} (no server has written its file there)"

    @property
    def endpoints(self) -> list[Endpoint]:
        """All of them as of now."""
        if self._members_folder and time.monotonic() - self._met_at >= MEETS_S:
            self._met_at = time.monotonic()
            written = dict(
                filter(None, map(self._read, sorted(self._members_folder.glob("*.json"))))
            )
            self._members = {
                key: self._members.get(key, endpoint) for key, endpoint in written.items()
            }
        return [*self._named, *self._members.values()]

    def order(self) -> list[Endpoint]:
        """Whom to try for one request, the best first; those that rest only if all do."""
        endpoints = self.endpoints
        able = [endpoint for endpoint in endpoints if not endpoint.resting] or endpoints
        self._turns += 1
        return self._balance(able, self._turns - 1) if able else []

    async def alive(self) -> bool:
        """Whether one of them answers."""
        for endpoint in self.endpoints:
            if await endpoint.alive():
                return True
        return False

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        for endpoint in self.endpoints:
            await endpoint.http.aclose()

    def _read(self, path: Path) -> tuple[tuple[str, str | None], Endpoint] | None:
        """The member that a file names; None if it is being written, is something else, or has no heartbeat any more.

        Changes are timed by this machine's clock: that of the file system may be another.
        """
        try:
            beat, said = path.stat().st_mtime_ns, json.loads(path.read_bytes())
            key = (str(said["url"]), said.get("token"))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        now = time.monotonic()
        self._beats[path] = last = (
            beat,
            now if self._beats.get(path, (0, 0))[0] != beat else self._beats[path][1],
        )
        return (key, Endpoint(*key)) if now - last[1] <= STALE_S else None
