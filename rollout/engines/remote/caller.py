"""Calls of a frozen model: cache, budget, retries, deadline, equal questions asked once; its client in a team."""

import asyncio
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from rollout.base.async_tasks import cancel_tasks
from rollout.base.deadlines import LateCall
from rollout.base.errors import EngineError
from rollout.base.event_loop import drop_per_loop, per_loop
from rollout.base.http import Refused, Unanswered, retry
from rollout.base.text import valid_text
from rollout.engines import remote
from rollout.engines.policy_client import ChatState, PolicyReply
from rollout.engines.remote import Answer, Provider, RemoteConfig, RemoteError, ReplySettings
from rollout.engines.remote.ledger import BudgetExhausted, Kept, Ledger, Reservation, Spending
from rollout.models.tool_calls import in_words
from rollout.records.trajectory import EMPTY_COMPLETION, Message, Sampling

CALL_BACKOFF_S = 0.5  # mean of the first pause; doubles with each retry
_REPLY_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # fields of requests
TEMPLATE_TOKENS = 64  # that a chat template may add to a message


@dataclass(slots=True)
class Tally:
    """What asking on behalf of one agent took."""

    spent: Spending = field(default_factory=Spending)  # on requests sent, retries included
    seconds: float = 0.0  # over `answers`
    answers: int = 0
    cache_hits: int = 0  # answered without a request of its own

    def metrics(self) -> dict[str, float]:
        """By name; the mean seconds of an answer where there was one."""
        spent = self.spent
        found = {
            "calls": spent.calls,
            "tokens": spent.tokens,
            "cost": spent.nanos / 1e9,
            "cache_hits": self.cache_hits,
        }
        found |= {"latency_s": self.seconds / self.answers} if self.answers else {}
        return {name: float(value) for name, value in found.items()}


@dataclass(slots=True)
class _Flight:
    """One question that several may wait for; it ends when the last of them leaves."""

    task: asyncio.Task[Answer]
    waiting: int = 0


@dataclass(slots=True)
class _Live:
    """What belongs to one event loop."""

    provider: Provider
    slots: asyncio.Semaphore
    flights: dict[str, _Flight] = field(default_factory=dict)
    tasks: set[asyncio.Task[Answer]] = field(
        default_factory=set
    )  # of flights, until they have settled
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Caller:
    """A frozen model that can be asked; used from one event loop after another, never from two at once."""

    def __init__(self, config: RemoteConfig, folder: Path) -> None:
        """Read the key and open the ledger in `folder`; RemoteError if there is no key, no library or no ledger."""
        self._config = config
        self._key = remote.read_key(config.key_variable, config.key_file)
        self._make = partial(remote.provider_class(config.provider), config, self._key)
        self._spare = [
            self._make()
        ]  # now, so that a missing library is known now; the first event loop's
        self._ledger = Ledger(folder / "ledger.sqlite", config.budget)
        self._not_before = 0.0  # time.monotonic() until which the server asked everyone to wait

    @property
    def spent(self) -> Spending:
        """Everything the ledger was ever charged."""
        return self._ledger.spent

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[float]:
        """A place among `concurrency` that ask, until the time.monotonic() that is yielded; TimeoutError after that."""
        async with self._live.slots, asyncio.timeout(self._config.deadline_s):
            yield time.monotonic() + self._config.deadline_s

    async def ask(
        self,
        agent: str,
        messages: Sequence[Message],
        settings: ReplySettings,
        tally: Tally,
        *,
        deadline: float = math.inf,
    ) -> Answer:
        """The model's reply on behalf of `agent`; `deadline` is a time.monotonic() past which no pause may reach.

        Raises:
            Unanswered: no reply within the retries, or before a pause would pass the deadline.
            Refused: the server refuses this prompt.
            BudgetExhausted: the call might cost more than is left.
            RemoteError: the model cannot be used at all.
        """
        digest = self._digest(messages, settings)
        found = self._ledger.find(digest)
        if found is not None:
            tally.cache_hits += 1
            return found
        live = self._live
        flights = live.flights
        flight = flights.get(digest)
        if flight is None:
            task = asyncio.create_task(
                self._fetch(agent, digest, messages, settings, tally, deadline)
            )
            live.tasks.add(task)
            task.add_done_callback(live.tasks.discard)
            task.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # somebody has looked
            flight = flights[digest] = _Flight(task)
        else:
            tally.cache_hits += 1
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                flights.pop(digest, None)
                flight.task.cancel()  # does nothing to one that is done

    async def aclose(self) -> None:
        """End what is in flight and close the connections and the ledger."""
        await cancel_tasks(self._live.tasks)
        await self._live.provider.aclose()
        drop_per_loop(self)
        self._ledger.close()

    @property
    def _live(self) -> _Live:
        return per_loop(
            self,
            lambda: _Live(
                self._spare.pop() if self._spare else self._make(),
                asyncio.Semaphore(self._config.concurrency),
            ),
        )

    async def _fetch(
        self,
        agent: str,
        digest: str,
        messages: Sequence[Message],
        settings: ReplySettings,
        tally: Tally,
        deadline: float,
    ) -> Answer:
        calls = 0

        async def attempt() -> Answer:
            nonlocal calls
            while (
                wait := self._not_before - time.monotonic()
            ) > 0:  # another call may push it further meanwhile
                if time.monotonic() + wait > deadline:
                    raise Unanswered(
                        f"the server asked to wait for {wait:.3g} s more", retry_after_s=wait
                    )
                await asyncio.sleep(wait)
            reservation = await self._reserve(agent, self._worst(messages, settings))
            calls += 1
            try:
                return await self._call(reservation, digest, messages, settings, tally)
            except Unanswered as failure:
                self._not_before = max(self._not_before, time.monotonic() + failure.retry_after_s)
                raise

        retries, patience_s = self._config.retries, deadline - time.monotonic()
        try:
            return await retry(
                attempt, retries=retries, backoff_s=CALL_BACKOFF_S, patience_s=patience_s
            )
        except Unanswered as failure:
            why = (
                f"after {calls} calls"
                if calls > retries
                else "the next try is due past the deadline"
            )
            raise Unanswered(f"{failure} ({why})") from None

    async def _call(
        self,
        reservation: Reservation,
        digest: str,
        messages: Sequence[Message],
        settings: ReplySettings,
        tally: Tally,
    ) -> Answer:
        """One request, and its entry in the ledger whatever happens."""
        cost: Spending | None = None  # not known
        kept: Kept | None = None
        start = time.monotonic()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                answer = await self._live.provider.complete(messages, settings)
            answer = replace(answer, text=self._redact(valid_text(answer.text)))
            if answer.prompt_tokens is None or answer.completion_tokens is None:
                cost = reservation.worst  # the server did not say
            else:
                cost = self._spending(answer.prompt_tokens, answer.completion_tokens)
            kept = digest, self._config.model, answer
            tally.seconds += time.monotonic() - start
            tally.answers += 1
            return answer
        except TimeoutError:
            raise Unanswered(f"no answer within {self._config.timeout_s:g} s") from None
        except Unanswered as failure:
            cost = Spending(calls=1) if failure.unbilled else None
            raise Unanswered(
                self._redact(str(failure)),
                retry_after_s=failure.retry_after_s,
                unbilled=failure.unbilled,
            ) from None
        except Refused as refusal:
            cost = Spending(calls=1)
            raise Refused(self._redact(str(refusal))) from None
        except RemoteError as refusal:
            cost = Spending(calls=1)
            where = f"{self._config.provider} '{self._config.model}'"
            raise RemoteError(
                f"{where}: {self._redact(str(refusal))}; check key, model, url and quota"
            ) from None
        finally:
            self._ledger.settle(reservation, cost, kept)
            tally.spent += cost or reservation.worst
            self._live.settled.set()
            self._live.settled = asyncio.Event()

    async def _reserve(self, agent: str, worst: Spending) -> Reservation:
        while True:
            try:
                return self._ledger.reserve(agent, worst)
            except BudgetExhausted as exhausted:
                if not self._ledger.in_flight:  # nobody's worst case can turn into room any more
                    raise BudgetExhausted(
                        f"{self._config.provider} '{self._config.model}': {exhausted}"
                    ) from None
                await self._live.settled.wait()

    def _redact(self, text: str) -> str:
        return self._key.redact(text) if self._key else text

    def _worst(self, messages: Sequence[Message], settings: ReplySettings) -> Spending:
        """The most a call can cost: a token is at least one byte of UTF-8."""
        prompt = sum(len(message.content.encode()) + TEMPLATE_TOKENS for message in messages)
        asked = (self._config.request.get(name) for name in _REPLY_LIMITS)
        reply = max([settings.max_tokens, *(limit for limit in asked if isinstance(limit, int))])
        return self._spending(prompt, reply)

    def _spending(self, prompt: int, reply: int) -> Spending:
        return Spending(
            calls=1, tokens=prompt + reply, nanos=self._config.prices.nanos(prompt, reply)
        )

    def _digest(self, messages: Sequence[Message], settings: ReplySettings) -> str:
        """Of all that decides the reply; not of the URL, so that a server may move to another port."""
        config = self._config
        said = [{"role": message.role, "content": message.content} for message in messages]
        asked = [config.provider, config.model, config.request, asdict(settings), said]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


class RemoteClient:
    """Stands in a team's `players` where a policy's `Player` would. Its tokens are not known, so there are none.

    The seed of a call is part of what is kept of it: a run that goes on hears what it heard before.
    """

    def __init__(self, config: RemoteConfig, cache_folder: Path) -> None:
        """Read the key, and open the replies and the spending kept in `cache_folder` (see `Caller`)."""
        self._config, self._caller, self._tally = config, Caller(config, cache_folder), Tally()

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        """The model's reply (see `PolicyClient`), to a chat with tools in words. OpenAI's protocol has no `top_k`.

        Raises:
            EngineError: no reply within the retries and the deadline, or the server refuses the prompt.
            BudgetExhausted: the call might cost more than is left.
            RemoteError: the model cannot be used at all.
        """
        messages = in_words(messages, chat.tools if chat else ())
        settings = ReplySettings(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            top_p=sampling.top_p,
            seed=sampling.seed,
        )
        try:
            async with self._caller.turn() as deadline:
                answer = await self._caller.ask(
                    "external", messages, settings, self._tally, deadline=deadline
                )
        except TimeoutError:
            raise LateCall(
                f"{self._config.model}: no reply within {self._config.deadline_s:g} s"
            ) from None
        except (Unanswered, Refused) as failure:
            raise EngineError(f"{self._config.model}: {failure}") from failure
        silence = replace(EMPTY_COMPLETION, finish_reason=answer.finish_reason)
        return PolicyReply(
            text=answer.text, raw=answer.text, prompt_ids=(), completion=silence, trainable=False
        )

    def metrics(self) -> dict[str, float]:
        """What asking has taken since the last call of `metrics`."""
        tally, self._tally = self._tally, Tally()
        return tally.metrics()

    async def aclose(self) -> None:
        await self._caller.aclose()
