"""Dispatch loop between concurrent calls and an embedded engine."""

from __future__ import annotations

import asyncio
import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.base.async_tasks import set_outcome
from rollout.base.errors import EngineError
from rollout.engines.embedded.requests import NewTokens, Outcome, Report, Request
from rollout.engines.protocol import StreamingEngine, TokenCallback
from rollout.records.trajectory import Completion, Sampling

# An engine that has an open call with a prompt gets further calls with it, unless it has more open calls
# than another engine by more than this number.
_SAME_PROMPT_BONUS = 8


@dataclass(frozen=True, slots=True)
class _OpenCall:
    """A call of `stream` that waits for its completion."""

    request: Request
    future: asyncio.Future[Completion]
    on_tokens: TokenCallback | None


class Dispatcher(StreamingEngine):
    """Base of engines that collect concurrent calls and hand them over together in `exchange`."""

    def __init__(self) -> None:
        self._open: dict[int, _OpenCall] = {}  # by id of the request
        self._new: list[Request] = []  # requests that the engine does not have yet
        self._aborts: list[int] = []  # ids of requests that the engine must end
        self._ids = itertools.count()
        self._loop: asyncio.Task[None] | None = None  # task of `_run`

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_tokens: TokenCallback | None,
        adapter: int = 0,
    ) -> Completion:
        """Sample one completion; see `StreamingEngine`.

        Args:
            adapter: number of the adapter; 0 for none.
        """
        request = Request(
            id=next(self._ids),
            prompt_ids=list(prompt_ids),
            sampling=sampling,
            adapter=adapter,
            notify_every=0 if on_tokens is None else on_tokens.every,
        )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._open[request.id] = _OpenCall(request, future, on_tokens)
        self._new.append(request)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        self.interrupt_exchange()
        try:
            return await future
        except asyncio.CancelledError:
            self._aborts.append(request.id)
            self.interrupt_exchange()
            raise
        finally:
            self._open.pop(request.id, None)

    @abstractmethod
    async def exchange(self, requests: list[Request], aborts: list[int]) -> list[Report]:
        """Hand new requests and aborts to the engine, decode, and return its reports."""
        raise NotImplementedError

    def interrupt_exchange(self) -> None:
        """Ask a running `exchange` to return soon, because there are new requests or aborts."""

    def open_requests(self) -> list[Request]:
        """Return all open requests, to hand them to an engine that has lost them.

        The next `exchange` gets none of them as new ones.
        """
        self._new.clear()
        return [call.request for call in self._open.values()]

    def load(self, prompt_ids: Sequence[int]) -> int:
        """Return the number of open calls, less `_SAME_PROMPT_BONUS` if one has the same prompt.

        Equal prompts are computed once, so they should go to the same engine.
        """
        prompt = list(prompt_ids)
        has_prompt = any(call.request.prompt_ids == prompt for call in self._open.values())
        return len(self._open) - (_SAME_PROMPT_BONUS if has_prompt else 0)

    async def idle(self) -> bool:
        """Return True if no call is open and the engine has received all aborts.

        If no call is open, this waits until the engine has received the last aborts.
        """
        if self._loop is not None and not self._loop.done() and not self._open:
            await asyncio.wait([self._loop])
        return not self._open

    async def _run(self) -> None:
        """Exchange requests and reports with the engine until no call is open."""
        try:
            while self._open or self._aborts:
                requests, self._new = self._new, []
                aborts, self._aborts = self._aborts, []
                for request_id, result in await self.exchange(requests, aborts):
                    if request_id in self._open:
                        self._deliver(request_id, result)
                # Callers that got a completion run now, and may ask again.
                await asyncio.sleep(0)
        except EngineError as error:
            self._fail_open_calls(error)
        except Exception as error:
            # Nobody awaits this task, so the open calls must get the error.
            self._fail_open_calls(
                EngineError(f"the engine failed: {type(error).__name__}: {error}")
            )
            raise

    def _deliver(self, request_id: int, result: Outcome | NewTokens) -> None:
        """Set the outcome of an open call, or call its callback with new tokens."""
        call = self._open[request_id]
        if not isinstance(result, NewTokens):
            set_outcome(call.future, result)
        elif call.on_tokens is not None and not call.future.done():
            wants_more = call.on_tokens(result.position, result.token_ids)
            if not wants_more:
                self._aborts.append(request_id)

    def _fail_open_calls(self, error: EngineError) -> None:
        """Raise `error` in all open calls."""
        self._new.clear()
        for call in self._open.values():
            set_outcome(call.future, error)
