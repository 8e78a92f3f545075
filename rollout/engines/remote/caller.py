"""Calls of a frozen model, with a cache of replies, a budget, retries and deadlines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rollout.base.async_tasks import cancel_tasks, retrieve_exception
from rollout.base.event_loop import drop_per_loop, per_loop
from rollout.base.http import Refused, Unanswered, retry
from rollout.base.text import valid_text
from rollout.engines.remote.config import RemoteConfig
from rollout.engines.remote.errors import RemoteError
from rollout.engines.remote.keys import read_key
from rollout.engines.remote.ledger import (
    BudgetExhausted,
    Ledger,
    LedgerReply,
    Reservation,
    Spending,
)
from rollout.engines.remote.protocol import Answer, Provider, ReplySettings
from rollout.engines.remote.registry import provider_class
from rollout.records.trajectory import Message

CALL_BACKOFF_S = 0.5  # mean of the first pause; doubles with each retry
# Fields of `RemoteConfig.request` that raise the limit of a reply's tokens.
_REPLY_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_TEMPLATE_TOKENS = 64  # upper bound of the tokens that a chat template adds to a message


@dataclass(slots=True)
class Tally:
    """Cost and speed of the calls for one agent.

    Attributes:
        spent: spending on requests that were sent, with retries.
        seconds: total time of the requests that were answered.
        answers: number of requests that were answered.
        cache_hits: number of replies that needed no request of their own.
    """

    spent: Spending = field(default_factory=Spending)
    seconds: float = 0.0
    answers: int = 0
    cache_hits: int = 0

    def metrics(self) -> dict[str, float]:
        """Return metrics by name; `latency_s`, the mean time of a request, only if one was answered."""
        metrics = {
            "calls": float(self.spent.calls),
            "tokens": float(self.spent.tokens),
            "cost": self.spent.cost_nanos / 1e9,
            "cache_hits": float(self.cache_hits),
        }
        if self.answers:
            metrics["latency_s"] = self.seconds / self.answers
        return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """Prompt of one reply.

    Attributes:
        agent: agent that the reply is for.
        tally: tally of this agent.
        deadline: time on the clock of time.monotonic() that no pause between retries may pass.
        digest: key of the reply in the ledger.
    """

    agent: str
    messages: Sequence[Message]
    settings: ReplySettings
    tally: Tally
    deadline: float
    digest: str


@dataclass(slots=True)
class _Flight:
    """Calls for one question, shared by all callers that ask it at the same time.

    Attributes:
        task: task that makes the calls; it is cancelled when no caller waits any more.
        waiting: number of callers that wait for the answer.
    """

    task: asyncio.Task[Answer]
    waiting: int = 0


@dataclass(slots=True)
class _LoopState:
    """State of a caller in one event loop.

    Attributes:
        provider: client of the vendor's API.
        slots: semaphore of `concurrency`.
        flights: questions that are being answered, by digest.
        tasks: tasks of flights, until they have ended.
        settled: event that is set once a call's reservation is settled, and then replaced by a new
            event.
    """

    provider: Provider
    slots: asyncio.Semaphore
    flights: dict[str, _Flight] = field(default_factory=dict)
    tasks: set[asyncio.Task[Answer]] = field(default_factory=set)
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Caller:
    """Client of a frozen model, with a cache, a budget, retries and deadlines.

    A caller may be used from several event loops one after another, but not from two at once.
    """

    def __init__(self, config: RemoteConfig, folder: Path) -> None:
        """Read the key, and open the ledger in `folder`.

        Raises:
            RemoteError: the key or the provider's library is missing, or the ledger cannot be
                opened.
        """
        self._config = config
        self._key = read_key(config.key_variable, config.key_file)
        self._provider_class = provider_class(config.provider)
        # The first event loop's provider is made here, so that a missing library is reported before
        # a run starts.
        self._first_provider: Provider | None = self._make_provider()
        self._ledger = Ledger(folder / "ledger.sqlite", config.budget)
        self._not_before = 0.0  # time.monotonic() before which the server wants no request

    def _make_provider(self) -> Provider:
        provider: Provider = self._provider_class(self._config, self._key)
        return provider

    @property
    def spent(self) -> Spending:
        """Spending over all starts of the run."""
        return self._ledger.spent

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[float]:
        """Wait for one of the `concurrency` slots; yield the deadline of the block.

        The deadline is a time.monotonic(), `deadline_s` after the slot was free. A block that takes
        longer ends with TimeoutError.
        """
        deadline_s = self._config.deadline_s
        async with self._state.slots, asyncio.timeout(deadline_s):
            yield time.monotonic() + deadline_s

    async def ask(
        self,
        agent: str,
        messages: Sequence[Message],
        settings: ReplySettings,
        tally: Tally,
        *,
        deadline: float = math.inf,
    ) -> Answer:
        """Return the model's reply for an agent. Concurrent equal questions are sent once.

        Args:
            agent: agent that the cost is recorded for.
            tally: tally of this agent, which is updated.
            deadline: time on the clock of time.monotonic() that no pause between retries may pass.

        Raises:
            Unanswered: there was no reply within the retries, or a pause would pass the deadline.
            Refused: the server refuses this prompt.
            BudgetExhausted: the call may cost more than the rest of the budget.
            RemoteError: the model cannot be used at all.
        """
        digest = self._digest(messages, settings)
        recorded = self._ledger.find(digest)
        if recorded is not None:
            tally.cache_hits += 1
            return recorded

        state = self._state
        flight = state.flights.get(digest)
        if flight is None:
            question = _Question(
                agent=agent,
                messages=messages,
                settings=settings,
                tally=tally,
                deadline=deadline,
                digest=digest,
            )
            flight = self._start_flight(state, question)
        else:
            tally.cache_hits += 1

        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if flight.waiting == 0:
                state.flights.pop(digest, None)
                flight.task.cancel()  # has no effect on a task that is done

    def _start_flight(self, state: _LoopState, question: _Question) -> _Flight:
        task = asyncio.create_task(self._answer(question))
        state.tasks.add(task)
        task.add_done_callback(state.tasks.discard)
        task.add_done_callback(retrieve_exception)
        flight = _Flight(task)
        state.flights[question.digest] = flight
        return flight

    async def aclose(self) -> None:
        """Cancel the running calls, and close the connections of this event loop and the ledger."""
        await cancel_tasks(self._state.tasks)
        await self._state.provider.aclose()
        drop_per_loop(self)
        self._ledger.close()

    @property
    def _state(self) -> _LoopState:
        return per_loop(self, self._make_state)

    def _make_state(self) -> _LoopState:
        provider = self._first_provider or self._make_provider()
        self._first_provider = None
        return _LoopState(provider, asyncio.Semaphore(self._config.concurrency))

    async def _answer(self, question: _Question) -> Answer:
        """Send requests until one is answered, or no retry is left."""
        calls = 0

        async def attempt() -> Answer:
            nonlocal calls
            await self._wait_as_server_asked(question.deadline)
            reservation = await self._reserve(question)
            calls += 1
            try:
                return await self._call(reservation, question)
            except Unanswered as error:
                not_before = time.monotonic() + error.retry_after_s
                self._not_before = max(self._not_before, not_before)
                raise

        retries = self._config.retries
        try:
            return await retry(
                attempt,
                retries=retries,
                backoff_s=CALL_BACKOFF_S,
                patience_s=question.deadline - time.monotonic(),
            )
        except Unanswered as error:
            reason = "the next try is due past the deadline"
            if calls > retries:
                reason = f"after {calls} calls"
            raise Unanswered(f"{error} ({reason})") from None

    async def _wait_as_server_asked(self, deadline: float) -> None:
        """Wait as long as the server asked; raise Unanswered if that passes the deadline."""
        while True:
            # Other calls may postpone this time meanwhile.
            wait_s = self._not_before - time.monotonic()
            if wait_s <= 0:
                return
            if time.monotonic() + wait_s > deadline:
                raise Unanswered(
                    f"the server asked to wait for {wait_s:.3g} s more", retry_after_s=wait_s
                )
            await asyncio.sleep(wait_s)

    async def _call(self, reservation: Reservation, question: _Question) -> Answer:
        """Send one request; settle its reservation in any case."""
        cost: Spending | None = None  # None: not known
        reply: LedgerReply | None = None
        start = time.monotonic()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                answer = await self._state.provider.complete(question.messages, question.settings)
            answer = replace(answer, text=self._redact(valid_text(answer.text)))
            cost = self._answer_cost(answer, reservation)
            reply = LedgerReply(digest=question.digest, model=self._config.model, answer=answer)
            question.tally.seconds += time.monotonic() - start
            question.tally.answers += 1
            return answer
        except TimeoutError:
            raise Unanswered(f"no answer within {self._config.timeout_s:g} s") from None
        except Unanswered as error:
            if error.unbilled:
                cost = Spending(calls=1)
            raise Unanswered(
                self._redact(str(error)),
                retry_after_s=error.retry_after_s,
                unbilled=error.unbilled,
            ) from None
        except Refused as error:
            cost = Spending(calls=1)
            raise Refused(self._redact(str(error))) from None
        except RemoteError as error:
            cost = Spending(calls=1)
            raise RemoteError(
                f"{self._name}: {self._redact(str(error))}; check key, model, url and quota"
            ) from None
        finally:
            self._ledger.settle(reservation, cost, reply)
            spent = reservation.max_cost if cost is None else cost
            question.tally.spent += spent
            # Wake the calls that wait for budget. Later calls wait for the next settlement.
            self._state.settled.set()
            self._state.settled = asyncio.Event()

    async def _reserve(self, question: _Question) -> Reservation:
        """Reserve the upper bound of a call's cost; wait while running calls may turn out cheaper."""
        max_cost = self._max_cost(question.messages, question.settings)
        while True:
            try:
                return self._ledger.reserve(question.agent, max_cost)
            except BudgetExhausted as error:
                if self._ledger.in_flight == 0:  # no reservation can become smaller any more
                    raise BudgetExhausted(f"{self._name}: {error}") from None
                await self._state.settled.wait()

    @property
    def _name(self) -> str:
        return f"{self._config.provider} '{self._config.model}'"

    def _redact(self, text: str) -> str:
        return text if self._key is None else self._key.redact(text)

    def _max_cost(self, messages: Sequence[Message], settings: ReplySettings) -> Spending:
        """Return an upper bound of a call's cost, as every token has at least one byte of UTF-8."""
        prompt_tokens = 0
        for message in messages:
            prompt_tokens += len(message.content.encode()) + _TEMPLATE_TOKENS
        reply_tokens = settings.max_tokens
        for name in _REPLY_LIMITS:
            limit = self._config.request.get(name)
            if isinstance(limit, int):
                reply_tokens = max(reply_tokens, limit)
        return self._call_cost(prompt_tokens, reply_tokens)

    def _answer_cost(self, answer: Answer, reservation: Reservation) -> Spending:
        """Return the cost of an answered call; its upper bound if the server counted no tokens."""
        if answer.prompt_tokens is None or answer.completion_tokens is None:
            return reservation.max_cost
        return self._call_cost(answer.prompt_tokens, answer.completion_tokens)

    def _call_cost(self, prompt_tokens: int, reply_tokens: int) -> Spending:
        return Spending(
            calls=1,
            tokens=prompt_tokens + reply_tokens,
            cost_nanos=self._config.prices.cost_nanos(prompt_tokens, reply_tokens),
        )

    def _digest(self, messages: Sequence[Message], settings: ReplySettings) -> str:
        """Return the SHA-256 of everything that decides a reply.

        The URL is not part of it, so that a server may move to another port.
        """
        chat = [{"role": message.role, "content": message.content} for message in messages]
        config = self._config
        request = [config.provider, config.model, config.request, asdict(settings), chat]
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
