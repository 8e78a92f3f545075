"""HTTP application of the retrieval server: routes, limits and errors."""

import asyncio
import contextlib
import hmac
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrieval import wire
from retrieval.batcher import Batcher, Overloaded, prometheus_text
from retrieval.corpus import Passage
from retrieval.searcher import Searcher
from retrieval.wire import DEFAULT_TOPK, BadRequest, PassagesRequest, SearchRequest

READ_DEADLINE_S = 10.0  # time within which the body of a request must arrive

Handler = Callable[[Request], Awaitable[Response]]
_Result = TypeVar("_Result")


class _BodyTooLarge(Exception):
    """A request has more than MAX_BODY_BYTES."""


class _BodyTooLate(Exception):
    """A request was not complete within READ_DEADLINE_S."""


class BodyDeadline:
    """ASGI middleware that answers 408 if a body does not arrive in time; uvicorn waits forever."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = asyncio.get_running_loop().time() + READ_DEADLINE_S
        body_complete = scope["type"] != "http"

        async def receive_in_time() -> Message:
            nonlocal body_complete
            if body_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise _BodyTooLate from None
            body_complete = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, receive_in_time, send)
        except _BodyTooLate:
            text = f"the request did not arrive within {READ_DEADLINE_S:g} s"
            await _error(408, text, {"Connection": "close"})(scope, receive, send)


def build_app(
    searcher: Searcher,
    batcher: Batcher,
    token: str | None = None,
    on_startup: Callable[[], object] = lambda: None,
) -> Starlette:
    """Return the ASGI application that answers from an index.

    Args:
        token: bearer token that all routes except /health and /openapi.json require.
        on_startup: called when the application begins to answer.
    """
    index = searcher.index
    canary = index.corpus[0].title
    expected = searcher([canary], DEFAULT_TOPK)
    openapi = wire.openapi()
    # Large answers are serialised one at a time, since several would leave the event loop no time.
    serialising = asyncio.Lock()

    async def retrieve(request: Request) -> Response:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise BadRequest("the content type is not application/json")
        search = wire.parse_request(SearchRequest, await _read_body(request))
        results = await _while_connected(request, batcher.submit(search.all_queries, search.k))
        if sum(map(len, results)) <= wire.LARGE_ANSWER:
            return _render(results, search.return_scores)
        async with serialising:
            return await asyncio.to_thread(_render, results, search.return_scores)

    async def passages(request: Request) -> Response:
        body = wire.parse_request(PassagesRequest, await _read_body(request))
        results = await asyncio.to_thread(
            lambda: [index.corpus.around(id, body.around) for id in body.ids]
        )
        return _render(results, return_scores=False)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(_: Request) -> Response:
        results = await batcher.submit([canary], DEFAULT_TOPK, use_cache=False)
        correct = results == expected
        return JSONResponse({"ready": correct}, status_code=200 if correct else 503)

    async def info(_: Request) -> Response:
        counts = asdict(batcher.counts)
        return JSONResponse({**asdict(index.manifest), "counts": counts, "pid": os.getpid()})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(prometheus_text(batcher), media_type="text/plain; version=0.0.4")

    async def describe(_: Request) -> Response:
        return JSONResponse(openapi)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        searching = asyncio.create_task(batcher.run())
        on_startup()
        yield
        searching.cancel()

    return Starlette(
        lifespan=lifespan,
        middleware=[Middleware(BodyDeadline)],
        routes=[
            Route("/retrieve", _guarded(retrieve, token), methods=["POST"]),
            Route("/passages", _guarded(passages, token), methods=["POST"]),
            Route("/health", health),
            Route("/openapi.json", describe),
            Route("/ready", _guarded(ready, token)),
            Route("/info", _guarded(info, token)),
            Route("/metrics", _guarded(metrics, token)),
        ],
    )


async def _read_body(request: Request) -> bytes:
    """Return the body of a request.

    A body that is too large is read to its end, because a client that is still sending does not see
    the answer.
    """
    body = bytearray()
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= wire.MAX_BODY_BYTES:
            body += part
    if size > wire.MAX_BODY_BYTES:
        raise _BodyTooLarge
    return bytes(body)


def _render(results: list[list[Passage]], return_scores: bool) -> Response:
    return JSONResponse(wire.render_response(results, return_scores))


async def _while_connected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of `work`; cancel it and raise ClientDisconnect if the client hangs up.

    The body of the request must have been read.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()


def _guarded(handler: Handler, token: str | None) -> Handler:
    """Return a handler that requires the token, and converts exceptions to HTTP statuses."""

    async def answer(request: Request) -> Response:
        if token is not None:
            received = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(received.encode(), token.encode()):
                return _error(401, "a bearer token is required")
        try:
            return await handler(request)
        except BadRequest as error:
            return _error(422, str(error))
        except _BodyTooLarge:
            return _error(413, f"the body is over {wire.MAX_BODY_BYTES} bytes")
        except ClientDisconnect:
            return Response(status_code=499)  # for the log; the client is gone
        except Overloaded as error:
            return _error(503, str(error), {"Retry-After": "1"})

    return answer


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status_code=status, headers=headers)
