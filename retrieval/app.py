"""HTTP application of the retrieval server: routes, limits, and failures as statuses."""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import faiss
import torch
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from transformers.utils import logging as transformers_logging

from retrieval import wire
from retrieval.batcher import Batcher, Overloaded, prometheus
from retrieval.corpus import Passage
from retrieval.encoder import open_encoder
from retrieval.index import Index, Searcher, check_canary, read_manifest
from retrieval.wire import DEFAULT_TOPK, BadRequest
from rollout.base.http import DIGEST_HEADER, Result, content_digest
from rollout.base.http_server import BodyTooLarge, ClosingResponse, bears, read_body

_FAISS: Any = faiss  # whose stubs lack its settings
Handler = Callable[[HttpRequest], Awaitable[Response]]


def load_app(args: argparse.Namespace, token: str | None) -> Starlette:
    """Serve an index with its encoder, both checked, by the server's command line; sets this process's thread counts.

    Raises:
        RetrievalError: they do not belong together, or are not served in this way.
    """
    torch.set_num_threads(args.threads)
    faiss.omp_set_num_threads(args.threads)
    # queries * dimensions from which FAISS takes BLAS. Its own 128,000 is for many threads, and on one a
    # batch of 64 takes twelve times as long (facebookresearch/faiss#5109).
    _FAISS.cvar.distance_compute_blas_threshold = 800 * args.threads
    transformers_logging.disable_progress_bar()
    identity = read_manifest(args.index).encoder
    encoder = open_encoder(identity, args.encoder_folder).to(args.device) if identity else None
    known = encoder.identity if encoder else None
    index = Index.open(
        args.index, encoder=known, verify=args.verify, backend=args.backend, device=args.device
    )
    if encoder:
        check_canary(index, encoder)
    searcher = Searcher(index, encoder, args.ranking)
    limits = {
        name: getattr(args, name) for name in ("max_batch", "max_queue", "cache_mb", "deadline_s")
    }
    batcher = Batcher(
        searcher.encode, searcher.search, max_wait_s=args.max_wait_ms / 1000, **limits
    )
    return build_app(searcher, batcher, token)


def build_app(searcher: Searcher, batcher: Batcher, token: str | None) -> Starlette:
    """The HTTP application; with a token, all routes but /health and /openapi.json ask for `Authorization: Bearer`."""
    index = searcher.index
    canary = index.corpus[0].title
    expected = searcher([canary], DEFAULT_TOPK)
    one_at_a_time = asyncio.Lock()  # several would leave the event loop no time

    async def retrieve_route(request: HttpRequest) -> Response:
        if (
            request.headers.get("content-type", "").partition(";")[0].strip().lower()
            != "application/json"
        ):
            raise BadRequest("the content type is not application/json")
        wanted = wire.parse_request(
            wire.SearchRequest, await read_body(request, wire.MAX_BODY_BYTES)
        )
        where = wire.check_where(wanted.where)
        if where:  # what is wrong with a filter fails no others of its batch
            await asyncio.to_thread(index.rows_with, where)
        found = batcher.submit(wanted.asked, wanted.most, where=where)
        return await _written(
            await while_connected(request, found), wanted.return_scores, one_at_a_time
        )

    async def passages_route(request: HttpRequest) -> Response:
        wanted = wire.parse_request(
            wire.PassagesRequest, await read_body(request, wire.MAX_BODY_BYTES)
        )
        found = await asyncio.to_thread(
            lambda: [index.corpus.around(id, wanted.around) for id in wanted.ids]
        )
        return JSONResponse(wire.render_response(found, return_scores=False))

    async def health(_: HttpRequest) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(_: HttpRequest) -> Response:
        correct = await batcher.submit([canary], DEFAULT_TOPK, use_cache=False) == expected
        return JSONResponse({"ready": correct}, status_code=200 if correct else 503)

    async def info(_: HttpRequest) -> Response:
        return JSONResponse(
            {**asdict(index.manifest), "counts": asdict(batcher.counts), "pid": os.getpid()}
        )

    async def metrics(_: HttpRequest) -> Response:
        return PlainTextResponse(prometheus(batcher), media_type="text/plain; version=0.0.4")

    document = wire.openapi()

    async def describe(_: HttpRequest) -> Response:
        return JSONResponse(document)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        searching = asyncio.create_task(batcher.run())
        yield
        searching.cancel()

    return Starlette(
        lifespan=lifespan,
        routes=[
            Route("/retrieve", _guarded(retrieve_route, token), methods=["POST"]),
            Route("/passages", _guarded(passages_route, token), methods=["POST"]),
            Route("/health", health),
            Route("/openapi.json", describe),
            Route("/ready", _guarded(ready, token)),
            Route("/info", _guarded(info, token)),
            Route("/metrics", _guarded(metrics, token)),
        ],
    )


async def _written(
    results: list[list[Passage]], return_scores: bool, one_at_a_time: asyncio.Lock
) -> Response:
    """The answer; a large one is written beside the event loop."""

    def written() -> Response:
        return JSONResponse(wire.render_response(results, return_scores))

    if sum(map(len, results)) <= wire.LARGE_ANSWER:
        return written()
    async with one_at_a_time:
        return await asyncio.to_thread(written)


async def while_connected(request: HttpRequest, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` gives; it is cancelled when whoever asked hangs up. The request's body must have been read.

    Raises:
        ClientDisconnect: it did.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


def _guarded(handler: Handler, token: str | None) -> Handler:
    """The handler behind the token, with its typed failures as HTTP statuses."""

    async def answer(request: HttpRequest) -> Response:
        if token is not None and not bears(request, token):
            return _error(401, "a bearer token is required")
        try:
            answered = await handler(request)
            answered.headers[DIGEST_HEADER] = content_digest(bytes(answered.body))
            return answered
        except BadRequest as error:
            return _error(422, str(error))
        except BodyTooLarge as error:
            return ClosingResponse({"error": str(error)})
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Overloaded as error:
            return _error(503, str(error), {"Retry-After": "1"})

    return answer


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status_code=status, headers=headers)
