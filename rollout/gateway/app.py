"""HTTP application of a gateway: routes, keys, limits, and failures as statuses in the caller's dialect."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollout.base.errors import EngineError, EnvError, PromptTooLong, Unusable
from rollout.base.event_loop import per_loop
from rollout.base.http_server import (
    BodyTooLarge,
    answering,
    has_token,
    listener_url,
    open_listener,
    read_body,
)
from rollout.gateway.completions import COMPLETIONS
from rollout.gateway.dialects import ChatReply, ChatRequest, Dialect, GatewayError, Growth
from rollout.gateway.messages import MESSAGES, parse_count
from rollout.gateway.responses import RESPONSES
from rollout.gateway.sessions import GatewayCall, GatewaySession

DIALECTS = (COMPLETIONS, RESPONSES, MESSAGES)
_COUNT = MESSAGES.path + "/count_tokens"
MAX_CALL_BYTES = 16 << 20
_RETRIES = "x-stainless-retry-count"  # with it the clients of OpenAI and Anthropic say how often they have asked before
_OFF_LOOP_BYTES = 64 << 10  # of a body, from which on another thread reads it
_AGENT = "/a/{agent}"  # in an address, before the dialect's path: who answers, whatever the call names as its model


class Answering(Protocol):
    """What answers calls: a trajectory's session."""

    @property
    def models(self) -> list[str]:
        """The names that calls may ask for."""

    def agent(self, model: str) -> object:
        """Who answers as `model`; GatewayError if nobody does."""

    async def ask(self, asked: ChatRequest) -> GatewayCall:
        """Have somebody reply (see `GatewaySession`)."""

    async def count(self, asked: ChatRequest) -> int:
        """How many tokens somebody would be asked with; GatewayError if nobody can say."""

    def unread(self, call: GatewayCall) -> None:
        """Nobody waits for the reply any more."""


@dataclass(slots=True)
class Entrance:
    """Who may come in."""

    find: Callable[[Request], Answering]  # what answers a request; raises GatewayError
    most_calls: int  # that are answered at a time
    calls: int = 0  # that are under way
    refused: bool = (
        False  # whether there were too many once: who asks again need not have been heard before
    )

    async def answer(self, dialect: Dialect, request: Request) -> Response:
        """Answer a call in its dialect."""
        session, asked = await self._read(dialect.parse, request)
        if request.headers.get(_RETRIES, "0") != "0" and not self.refused:
            asked = replace(asked, again=True)
        if self.calls >= self.most_calls:
            self.refused = True
            raise GatewayError(429, f"{self.calls} calls are under way, which is as many as may be")
        call = None
        self.calls += 1
        try:
            call = await session.ask(asked)
            if not await _awaited(request, session, call, asked.stream):
                return Response(status_code=499)  # nobody is there to read it
        finally:
            if call is not None and asked.stream and not call.task.done():
                call.task.add_done_callback(self._ended)
            else:
                self.calls -= 1
        if not asked.stream:
            return JSONResponse(dialect.render(call.whole()))
        if call.task.done():
            call.whole()  # what is wrong with it is a status
        return _Stream(_streamed(dialect, call, asked), session, call)

    async def count(self, request: Request) -> Response:
        """Say how many tokens Anthropic's Messages would be asked with."""
        session, asked = await self._read(parse_count, request)
        return JSONResponse({"input_tokens": await session.count(asked)})

    async def _read(
        self, parse: Callable[[bytes], ChatRequest], request: Request
    ) -> tuple[Answering, ChatRequest]:
        session = self.find(request)
        body = await read_body(request, MAX_CALL_BYTES)
        asked = await asyncio.to_thread(parse, body) if len(body) > _OFF_LOOP_BYTES else parse(body)
        if agent := request.path_params.get("agent"):
            asked = replace(asked, model=agent)
        return session, asked

    def _ended(self, task: asyncio.Task[ChatReply]) -> None:
        self.calls -= 1


async def _awaited(request: Request, session: Answering, call: GatewayCall, stream: bool) -> bool:
    """Wait until a reply is whole, or of a stream begins; False where the caller has gone before."""
    gone = asyncio.create_task(_gone(request))
    ready = asyncio.create_task(call.begun.wait()) if stream else call.task
    there = False
    try:
        await asyncio.wait({ready, gone}, return_when=asyncio.FIRST_COMPLETED)
        there = call.task.done() or call.begun.is_set()
    finally:  # cancelled where the caller's connection ends
        gone.cancel()
        if stream:
            ready.cancel()
        if not there:
            session.unread(call)
    return there


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Stream(StreamingResponse):
    """A reply as it grows; the caller may leave before its end."""

    def __init__(self, events: AsyncIterator[str], session: Answering, call: GatewayCall) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._session, self._call = session, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self._call.read:
                self._session.unread(self._call)


async def _streamed(dialect: Dialect, call: GatewayCall, asked: ChatRequest) -> AsyncIterator[str]:
    """The events of a stream; a failure is the last of them."""

    def written(name: str, data: object) -> str:
        return (
            f"event: {name}\n" if name else ""
        ) + f"data: {json.dumps(data, ensure_ascii=False)}\n\n"

    before, sent = None, 0
    try:
        async for reply in call.replies():
            events = list(dialect.stream(Growth(before=before, now=reply, sent=sent), asked))
            # in one write: asyncio complains where several follow each other to a caller who has gone
            yield "".join(written(name, data) for name, data in events)
            before, sent = reply, sent + len(events)
        yield dialect.last
        call.read = True
    except Exception as error:
        yield written("error", {"type": "error", **dialect.error(_told(error))})


def _told(error: Exception) -> GatewayError:
    """What a program is told of an error; of anything but those that are expected nothing, it is raised again."""
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, ClientDisconnect):
        return GatewayError(400, "the body ended too early")  # told to nobody
    if isinstance(error, BodyTooLarge):
        return GatewayError(413, str(error))
    if isinstance(error, PromptTooLong):
        return GatewayError(400, str(error), "context_length_exceeded")
    if isinstance(error, (EngineError, EnvError, Unusable)):
        return GatewayError(503, "no reply can be had: the trajectory has failed")
    raise error


def _guarded(
    handler: Callable[[Request], Awaitable[Response]], dialect: Dialect | None
) -> Callable[..., object]:
    """The handler with its failures as statuses, in its dialect; None: in the caller's."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            told = _told(error)
            headers = {"Retry-After": "1"} if told.status == 429 else {"x-should-retry": "false"}
            spoken = MESSAGES if "anthropic-version" in request.headers else COMPLETIONS
            body = (dialect or spoken).error(told)
            return JSONResponse(body, status_code=told.status, headers=headers)

    return answer


def _model(name: str) -> dict[str, object]:
    """A model, as OpenAI's and Anthropic's APIs write it."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "mcore-mas"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def gateway_app(entrance: Entrance, prefix: str) -> Starlette:
    """The HTTP application; its addresses begin with `prefix`, whose parameters `entrance.find` reads."""

    async def models(request: Request) -> Response:
        listed = [_model(name) for name in entrance.find(request).models]
        return JSONResponse({"object": "list", "data": listed, "has_more": False})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        entrance.find(request).agent(name)
        return JSONResponse(_model(name))

    async def nowhere(request: Request) -> Response:
        paths = ", ".join([*(dialect.path for dialect in DIALECTS), _COUNT])
        raise GatewayError(
            404, f"nothing answers {request.method} {request.url.path[:200]}; known: {paths}"
        )

    routes = []
    for place in (prefix, prefix + _AGENT):
        for dialect in DIALECTS:
            call = _guarded(partial(entrance.answer, dialect), dialect)
            routes.append(Route(place + dialect.path, call, methods=["POST"]))
        routes.append(Route(place + _COUNT, _guarded(entrance.count, MESSAGES), methods=["POST"]))
        routes.append(Route(place + "/v1/models", _guarded(models, None)))
        routes.append(Route(place + "/v1/models/{model:path}", _guarded(model, None)))
    every = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    return Starlette(
        routes=[*routes, Route("/{path:path}", _guarded(nowhere, None), methods=every)]
    )


class Gateway:
    """A gateway on loopback for the trajectories of one event loop, each behind an address and a key of its own."""

    def __init__(self, most_calls: int = 16384) -> None:
        self.url = ""
        self._open: dict[str, tuple[str, GatewaySession]] = {}  # key and session, by name
        self._app = gateway_app(Entrance(self._find, most_calls), "/s/{session}")
        self._users, self._lock = 0, asyncio.Lock()
        self._listening = AsyncExitStack()
        self._failure = ""  # why the server has ended

    def _find(self, request: Request) -> GatewaySession:
        key, session = self._open.get(request.path_params["session"], ("", None))
        if session is None or not has_token(request, key):
            raise GatewayError(401, "no such session, or not its key")
        return session

    def _fail(self, reason: str) -> None:
        """Fail the trajectories of all open sessions, and of those that open until the gateway is not used any more."""
        self._failure = f"gateway: {reason}"
        for _, session in self._open.values():
            session.fail(EngineError(self._failure))

    @asynccontextmanager
    async def opened(self, session: GatewaySession) -> AsyncIterator[tuple[str, str]]:
        """Have the gateway answer for a session until the block ends; its address and key."""
        name, key = secrets.token_urlsafe(12), f"sk-{secrets.token_urlsafe(24)}"
        self._open[name] = key, session
        if self._failure:
            session.fail(EngineError(self._failure))
        try:
            yield f"{self.url}/s/{name}", key
        finally:
            del self._open[name]
            await session.close()

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[Gateway]:
        """Listen at least until the block ends: from the first user's coming to the last one's going."""
        async with self._lock:
            if not self.url:
                listener = open_listener("127.0.0.1", 0)
                self.url = listener_url(listener)
                await self._listening.enter_async_context(
                    answering(self._app, listener, self._fail)
                )
            self._users += 1
        try:
            yield self
        finally:
            self._users -= 1
            async with self._lock:
                if not self._users:
                    self.url = self._failure = ""
                    await self._listening.aclose()


def shared_gateway() -> AbstractAsyncContextManager[Gateway]:
    """The gateway of the running event loop, which listens as long as somebody uses it."""
    return per_loop("gateway", Gateway).in_use()
