"""HTTP application of the gateway: routes, keys, limits, and failures as errors of the APIs."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
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
from rollout.gateway.calls import GatewayCall
from rollout.gateway.completions import COMPLETIONS
from rollout.gateway.dialects import (
    ChatReply,
    ChatRequest,
    Dialect,
    StreamEvent,
    StreamStep,
)
from rollout.gateway.embeddings import EMBEDDINGS_PATH, parse_embeddings, render_embeddings
from rollout.gateway.errors import GatewayError
from rollout.gateway.messages import MESSAGES, parse_count
from rollout.gateway.responses import RESPONSES
from rollout.gateway.sessions import GatewaySession

DIALECTS = (COMPLETIONS, RESPONSES, MESSAGES)
MAX_CALL_BYTES = 16 << 20
_OFF_LOOP_BYTES = 64 << 10  # larger bodies are parsed on another thread
_RESPONSE_PATH = RESPONSES.path + "/{response}"
_COUNT_PATH = MESSAGES.path + "/count_tokens"
_MODELS_PATH = "/v1/models"
# In a URL before the dialect's path: the agent that answers, whatever model the call names.
_AGENT_PREFIX = "/a/{agent}"
# OpenAI's and Anthropic's clients send the number of earlier attempts in this header.
_RETRY_HEADER = "x-stainless-retry-count"
_HTTP_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_CLIENT_CLOSED_REQUEST = 499


class ChatBackend(Protocol):
    """Object that answers calls: a trajectory's session or a served team."""

    @property
    def models(self) -> list[str]:
        """Model names that calls may use."""

    def agent(self, model: str) -> object:
        """Return the agent that answers under this model name; raise GatewayError if there is none."""

    async def start_call(self, request: ChatRequest) -> GatewayCall:
        """Start the reply to a call (see `GatewaySession.start_call`)."""

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of prompt tokens of a call; raise GatewayError if it is not known."""

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors of texts; raise GatewayError if there is no encoder."""

    def stored_reply(self, reply_id: str) -> ChatReply:
        """Return an earlier reply; raise GatewayError if it was not stored."""

    def abandon(self, call: GatewayCall) -> None:
        """Record that nobody waits for the reply any more."""

    def note_refusal(self, error: GatewayError) -> None:
        """Record that a call was refused."""


@dataclass(slots=True)
class GatewayHandlers:
    """Handlers of the gateway's endpoints, which limit the number of calls in progress.

    Attributes:
        find_backend: returns the backend of an HTTP request; raises GatewayError if there is none.
        max_calls: number of calls that are answered concurrently.
        calls_in_progress: number of calls that are being answered.
        has_refused_calls: True once a call was refused because there were too many. From then on a
            retry may repeat a refused call, so it does not get the reply of an equal answered call.
    """

    find_backend: Callable[[Request], ChatBackend]
    max_calls: int
    calls_in_progress: int = 0
    has_refused_calls: bool = False

    async def answer(self, dialect: Dialect, http_request: Request) -> Response:
        """Answer a call in its dialect."""
        backend = self.find_backend(http_request)
        try:
            return await self._answer(dialect, backend, http_request)
        except GatewayError as error:
            backend.note_refusal(error)
            raise

    async def _answer(
        self, dialect: Dialect, backend: ChatBackend, http_request: Request
    ) -> Response:
        request = await self._read_call(dialect.parse, http_request)
        is_retry = http_request.headers.get(_RETRY_HEADER, "0") != "0"
        if is_retry and not self.has_refused_calls:  # otherwise it may repeat a refused call
            request = replace(request, is_retry=True)

        if self.calls_in_progress + request.choices > self.max_calls:
            self.has_refused_calls = True
            raise GatewayError(429, f"the limit of {self.max_calls} calls in progress is reached")

        calls: list[GatewayCall] = []
        self.calls_in_progress += request.choices
        try:
            await _start_calls(backend, request, calls)
            if not await _wait_for_replies(http_request, backend, calls, stream=request.stream):
                return Response(status_code=_CLIENT_CLOSED_REQUEST)
        finally:
            self._count_as_answered(request, calls)

        if not request.stream:
            return JSONResponse(dialect.render([call.result() for call in calls]))
        if calls[0].task.done():
            calls[0].result()  # raises an error while it can still be an HTTP status
        return _ReplyStream(dialect, request, backend, calls[0])

    async def count_tokens(self, http_request: Request) -> Response:
        """Return the number of prompt tokens of a call in Anthropic's Messages API."""
        backend = self.find_backend(http_request)
        request = await self._read_call(parse_count, http_request)
        return JSONResponse({"input_tokens": await backend.count_tokens(request)})

    async def embed(self, http_request: Request) -> Response:
        """Return the vectors of texts by the encoder of the run's retriever."""
        backend = self.find_backend(http_request)
        request = parse_embeddings(await read_body(http_request, MAX_CALL_BYTES))
        return JSONResponse(render_embeddings(request, await backend.embed(request.texts)))

    async def list_models(self, http_request: Request) -> Response:
        """Return the models that calls may use."""
        models = [_render_model(name) for name in self.find_backend(http_request).models]
        return JSONResponse({"object": "list", "data": models, "has_more": False})

    async def show_model(self, http_request: Request) -> Response:
        """Return one model; raise GatewayError if there is none of this name."""
        name = http_request.path_params["model"]
        self.find_backend(http_request).agent(name)
        return JSONResponse(_render_model(name))

    async def show_response(self, http_request: Request) -> Response:
        """Return an earlier reply of the Responses API; raise GatewayError if it was not stored."""
        backend = self.find_backend(http_request)
        reply_id = http_request.path_params["response"].removeprefix("resp_")
        return JSONResponse(RESPONSES.render([backend.stored_reply(reply_id)]))

    async def refuse(self, http_request: Request) -> Response:
        """Refuse a request to a path that the gateway does not have."""
        api_paths = [dialect.path for dialect in DIALECTS]
        paths = ", ".join([*api_paths, _COUNT_PATH, EMBEDDINGS_PATH, _MODELS_PATH])
        path = http_request.url.path[:200]
        raise GatewayError(
            404, f"there is no endpoint {http_request.method} {path}; paths of the gateway: {paths}"
        )

    async def _read_call(
        self, parse: Callable[[bytes], ChatRequest], http_request: Request
    ) -> ChatRequest:
        body = await read_body(http_request, MAX_CALL_BYTES)
        if len(body) > _OFF_LOOP_BYTES:
            request = await asyncio.to_thread(parse, body)
        else:
            request = parse(body)
        agent = http_request.path_params.get("agent")
        if agent:
            request = replace(request, model=agent)
        return request

    def _count_as_answered(self, request: ChatRequest, calls: Sequence[GatewayCall]) -> None:
        """Take the calls of a request off those in progress: now, or once a stream is sampled."""
        if calls and request.stream and not calls[0].task.done():
            calls[0].task.add_done_callback(self._on_stream_sampled)  # a stream has one call
        else:
            self.calls_in_progress -= request.choices

    def _on_stream_sampled(self, task: asyncio.Task[ChatReply]) -> None:
        self.calls_in_progress -= 1


async def _start_calls(
    backend: ChatBackend, request: ChatRequest, calls: list[GatewayCall]
) -> None:
    """Start a call for each choice; abandon those that have started if another one cannot.

    Args:
        calls: list to which the started calls are added.
    """
    try:
        for number in range(request.choices):
            seed = request.seed
            if seed is not None:
                seed += number  # equal seeds would give equal choices
            calls.append(await backend.start_call(replace(request, seed=seed)))
    except BaseException:
        for call in calls:
            backend.abandon(call)
        raise


async def _wait_for_replies(
    http_request: Request, backend: ChatBackend, calls: Sequence[GatewayCall], *, stream: bool
) -> bool:
    """Wait until all replies are complete, or until a stream has its first output.

    Returns:
        False if the caller has closed the connection before; the calls are then abandoned.
    """
    disconnected = asyncio.create_task(_wait_for_disconnect(http_request))
    awaited = calls[0].has_output.wait() if stream else _wait_until_done(calls)
    ready: asyncio.Task[object] = asyncio.create_task(awaited)
    has_reply = False
    try:
        await asyncio.wait({ready, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        has_output = stream and calls[0].has_output.is_set()
        has_reply = has_output or all(call.task.done() for call in calls)
    finally:  # also if this handler is cancelled because the connection has ended
        disconnected.cancel()
        ready.cancel()
        if not has_reply:
            for call in calls:
                backend.abandon(call)
    return has_reply


async def _wait_until_done(calls: Sequence[GatewayCall]) -> None:
    await asyncio.wait([call.task for call in calls])


async def _wait_for_disconnect(http_request: Request) -> None:
    while True:
        message = await http_request.receive()
        if message["type"] == "http.disconnect":
            return


class _ReplyStream(StreamingResponse):
    """A reply as server-sent events; the call is abandoned if its reader leaves before the end."""

    def __init__(
        self, dialect: Dialect, request: ChatRequest, backend: ChatBackend, call: GatewayCall
    ) -> None:
        self._dialect = dialect
        self._request = request
        self._backend = backend
        self._call = call
        self._is_complete = False
        super().__init__(self._events(), media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self._is_complete:
                self._backend.abandon(self._call)

    async def _events(self) -> AsyncIterator[str]:
        """Yield the text of the events; a failure is the last event."""
        dialect = self._dialect
        previous = None
        events_sent = 0
        try:
            async for reply in self._call.snapshots():
                step = StreamStep(previous=previous, reply=reply, events_sent=events_sent)
                events = list(dialect.stream(step, self._request))
                # One write for all: asyncio logs warnings about several writes to a closed
                # connection.
                yield "".join(_render_event(event) for event in events)
                previous = reply
                events_sent += len(events)
            yield dialect.end_of_stream
            self._is_complete = True
        except Exception as error:
            body = dialect.render_error(_gateway_error(error))
            yield _render_event(StreamEvent("error", {"type": "error", **body}))


def _render_event(event: StreamEvent) -> str:
    data = f"data: {json.dumps(event.data, ensure_ascii=False)}\n\n"
    return f"event: {event.name}\n{data}" if event.name else data


def _gateway_error(error: Exception) -> GatewayError:
    """Return the error that the program gets for a failure; raise unexpected failures again."""
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, ClientDisconnect):
        return GatewayError(400, "the connection was closed before the end of the body")
    if isinstance(error, BodyTooLarge):
        return GatewayError(413, str(error))
    if isinstance(error, PromptTooLong):
        return GatewayError(400, str(error), "context_length_exceeded")
    if isinstance(error, (EngineError, EnvError, Unusable)):
        return GatewayError(503, "there is no reply, because the trajectory has failed")
    raise error


def _with_error_responses(
    handler: Callable[[Request], Awaitable[Response]], dialect: Dialect | None
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler: convert its exceptions to HTTP error responses.

    Args:
        handler: handler of one route.
        dialect: API whose error format is used; None: choose it by the request's headers.
    """

    async def answer(http_request: Request) -> Response:
        try:
            return await handler(http_request)
        except Exception as failure:
            error = _gateway_error(failure)
            api = dialect
            if api is None:
                is_anthropic = "anthropic-version" in http_request.headers
                api = MESSAGES if is_anthropic else COMPLETIONS
            # Clients of OpenAI and Anthropic retry by default; a retry helps only after 429.
            headers = {"Retry-After": "1"} if error.status == 429 else {"x-should-retry": "false"}
            body = api.render_error(error)
            return JSONResponse(body, status_code=error.status, headers=headers)

    return answer


def _render_model(name: str) -> dict[str, object]:
    """Return a model with the fields that OpenAI's API has and those that Anthropic's API has."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "mcore-mas"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def gateway_app(handlers: GatewayHandlers, prefix: str) -> Starlette:
    """Return the HTTP application.

    Args:
        handlers: handlers of the endpoints.
        prefix: beginning of all paths, such as "/s/{session}"; `handlers.find_backend` reads the
            path parameters in it.
    """
    routes = []

    def add_route(
        path: str,
        handler: Callable[[Request], Awaitable[Response]],
        dialect: Dialect | None,
        methods: list[str],
    ) -> None:
        routes.append(Route(path, _with_error_responses(handler, dialect), methods=methods))

    for base in (prefix, prefix + _AGENT_PREFIX):
        for dialect in DIALECTS:
            answer = partial(handlers.answer, dialect)
            add_route(base + dialect.path, answer, dialect, ["POST"])
        add_route(base + _COUNT_PATH, handlers.count_tokens, MESSAGES, ["POST"])
        add_route(base + _RESPONSE_PATH, handlers.show_response, RESPONSES, ["GET"])
        add_route(base + EMBEDDINGS_PATH, handlers.embed, COMPLETIONS, ["POST"])
        add_route(base + _MODELS_PATH, handlers.list_models, dialect=None, methods=["GET"])
        add_route(
            base + _MODELS_PATH + "/{model:path}",
            handlers.show_model,
            dialect=None,
            methods=["GET"],
        )
    add_route("/{path:path}", handlers.refuse, dialect=None, methods=_HTTP_METHODS)
    return Starlette(routes=routes)


@dataclass(frozen=True, slots=True)
class _OpenSession:
    """A session that the gateway answers for, and the key that its calls must carry."""

    key: str
    session: GatewaySession


class Gateway:
    """HTTP server on loopback for the trajectories of one event loop.

    Each trajectory has a separate URL and key.
    """

    def __init__(self, max_calls: int = 16384) -> None:
        self.url = ""  # "" while the gateway does not listen
        self._sessions: dict[str, _OpenSession] = {}  # by the name in their URLs
        handlers = GatewayHandlers(self._find_session, max_calls)
        self._app = gateway_app(handlers, "/s/{session}")
        self._users = 0
        self._lock = asyncio.Lock()
        self._listening = AsyncExitStack()
        self._failure = ""  # reason why the server has ended

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Gateway]:
        """Return a context in which the gateway listens; it closes when its last user has left."""
        async with self._lock:
            if not self.url:
                listener = open_listener("127.0.0.1", 0)
                self.url = listener_url(listener)
                await self._listening.enter_async_context(
                    answering(self._app, listener, self._fail_sessions)
                )
            self._users += 1
        try:
            yield self
        finally:
            self._users -= 1
            async with self._lock:
                if not self._users:
                    self.url = ""
                    self._failure = ""
                    await self._listening.aclose()

    @asynccontextmanager
    async def serve_session(self, session: GatewaySession) -> AsyncIterator[tuple[str, str]]:
        """Return a context in which the gateway answers for a session; yield its URL and key."""
        name = secrets.token_urlsafe(12)
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[name] = _OpenSession(key, session)
        if self._failure:
            session.fail(EngineError(self._failure))
        try:
            yield f"{self.url}/s/{name}", key
        finally:
            del self._sessions[name]
            await session.close()

    def _find_session(self, http_request: Request) -> GatewaySession:
        entry = self._sessions.get(http_request.path_params["session"])
        if entry is None or not has_token(http_request, entry.key):
            raise GatewayError(401, "there is no such session, or the key is not its key")
        return entry.session

    def _fail_sessions(self, reason: str) -> None:
        """Fail open sessions, and those that open before the last user has left."""
        self._failure = f"gateway: {reason}"
        for entry in self._sessions.values():
            entry.session.fail(EngineError(self._failure))


def shared_gateway() -> AbstractAsyncContextManager[Gateway]:
    """Return a context with the running event loop's gateway, which listens while it has users."""
    return per_loop("gateway", Gateway).running()
