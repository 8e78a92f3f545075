"""Endpoints: the servers that a client asks, which of them is next, and which are left alone for a while."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, TypeVar

from mcore_mas.rollout.base.http import HttpClient, Unanswered

BREAKS_AFTER = 3  # failures in a row that open a circuit; one connection that cannot be made does too
REST_S, MOST_REST_S = 0.5, 30.0  # how long a circuit stays open at first, doubled at every further failure, and at most
HEALTH_S = 5.0  # for an answer to /health
MEETS_S = 1.0  # between two looks into the folder of members
STALE_S = 30.0  # without a heartbeat after which a member is gone

Parsed = TypeVar("Parsed")
Balance = Literal["round_robin", "random", "least_loaded"]


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
        self, method: str, path: str, body: object, parse: Callable[[bytes], Parsed], *, timeout_s: float
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
    "least_loaded": lambda endpoints, turn: sorted(_rotated(endpoints, turn), key=lambda one: one.under_way),
}


class EndpointPool:
    """The servers that are named, and those that say in a folder where they are (`--ready-file FOLDER/NAME.json`).

    Such a file has the server's URL and token, and changes as long as it lives: one that has not for STALE_S counts
    no more.
    """

    def __init__(
        self, urls: Iterable[str], *, members: Path | None = None, token: str | None = None, balance: Balance
    ) -> None:
        self._named = [Endpoint(url, token) for url in urls]
        self._members_folder, self._members = members, dict[tuple[str, str | None], Endpoint]()
        self._beats: dict[Path, tuple[int, float]] = {}  # of a file: its mtime, and when that was first seen
        self._met_at, self._turns, self._balance = -MEETS_S, 0, BALANCES[balance]

    def __str__(self) -> str:
        urls = ", ".join(endpoint.url for endpoint in self.endpoints)
        return urls or f"{self._members_folder} (no server has written its file there)"

    @property
    def endpoints(self) -> list[Endpoint]:
        """All of them as of now."""
        if self._members_folder and time.monotonic() - self._met_at >= MEETS_S:
            self._met_at = time.monotonic()
            written = dict(filter(None, map(self._read, sorted(self._members_folder.glob("*.json")))))
            self._members = {key: self._members.get(key, endpoint) for key, endpoint in written.items()}
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
        self._beats[path] = last = (beat, now if self._beats.get(path, (0, 0))[0] != beat else self._beats[path][1])
        return (key, Endpoint(*key)) if now - last[1] <= STALE_S else None
