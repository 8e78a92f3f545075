"""The embedded CPU engine in a Ray actor of its own, reached in few, large calls."""

from __future__ import annotations

import asyncio
import itertools
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from rollout.engines.local import settle
from rollout.engines.protocol import Completion, EngineError, Sampling, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor

_BUDGET_S = 0.02  # of decoding per call: new requests wait at most this long, or a few times it when none ends

Ask = tuple[int, Sequence[int], tuple[Any, ...]]  # request id, prompt ids, Sampling's fields
Answer = tuple[int, str, tuple[Any, ...]]  # request id, error text, Completion's fields
Bucket = list[tuple[str, np.ndarray]]  # (Hugging Face name, full tensor)


class _Host:
    """What runs inside the actor."""

    def __init__(self, folder: str, max_length: int, rows: int, version: int, threads: int) -> None:
        import torch

        from rollout.engines.embedded import EmbeddedEngine

        torch.set_num_threads(threads)
        self._core = EmbeddedEngine.from_folder(folder, max_length=max_length, rows=rows, version=version)

    def exchange(self, asks: list[Ask], aborts: list[int], budget_s: float) -> list[Answer]:
        """Take new requests and decode for about `budget_s`; longer, but at most five times, while none has ended."""
        for request_id, prompt_ids, fields in asks:
            self._core.submit(request_id, prompt_ids, Sampling(**dict(zip(Sampling.__slots__, fields, strict=True))))
        self._core.abort(aborts)
        try:
            return self._decode(budget_s)
        except Exception:
            self._core.reset()
            raise

    def _decode(self, budget_s: float) -> list[Answer]:
        began = time.monotonic()
        answers: list[Answer] = []
        while self._core.has_work:
            for request_id, outcome in self._core.step():
                if isinstance(outcome, EngineError):
                    answers.append((request_id, str(outcome), ()))
                else:
                    spans = tuple((span.version, span.start, span.end) for span in outcome.versions)
                    reply = (outcome.token_ids, outcome.logprobs, outcome.finish_reason, spans, outcome.cached_tokens)
                    answers.append((request_id, "", reply))
            elapsed = time.monotonic() - began
            if (answers and elapsed >= budget_s) or elapsed >= 5 * budget_s:
                break
        return answers

    def load(self, buckets: Sequence[Any], version: int) -> str:
        """Replace all weights by the tensors of `buckets` (Ray references to `Bucket`s); "" or what is wrong."""
        try:
            self._core.load_weights(_tensors(buckets), version)
        except EngineError as error:
            return str(error)
        return ""

    def stats(self) -> dict[str, float]:
        """The counters of the engine, `rollout.engines.embedded.Stats` by field name."""
        return asdict(self._core.stats)


class HostedEngine:
    """An engine in a process of its own; Ray must be running.

    Concurrent `generate` calls travel together: each call to the actor brings what is new and takes what is done.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        max_length: int,
        rows: int = 192,
        version: int = 0,
        threads: int = 1,
        num_cpus: float = 0,
    ) -> None:
        """Start the actor on the Hugging Face model in `folder`; `num_cpus` is what Ray sets aside for it.

        Raises:
            EngineError: Ray is not running. What is wrong with the folder comes with the first call.
        """
        if not ray.is_initialized():
            raise EngineError("Ray is not running; call ray.init before making a hosted engine")
        host = ray.remote(_Host).options(num_cpus=num_cpus)
        self._host: Any = host.remote(str(folder), max_length, rows, version, threads)
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._asks: list[Ask] = []
        self._aborts: list[int] = []
        self._ids = itertools.count()
        self._pump: asyncio.Task[None] | None = None
        self.exchanges = 0  # calls made to the actor for generations

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion.

        Raises:
            EngineError: the request cannot be served, or the actor has died.
        """
        request_id = next(self._ids)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        self._asks.append((request_id, list(prompt_ids), tuple(getattr(sampling, name) for name in Sampling.__slots__)))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        try:
            return await future
        except asyncio.CancelledError:
            self._aborts.append(request_id)
            raise
        finally:
            self._waiting.pop(request_id, None)

    async def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by local tensors, one copy of which travels to the actor.

        Raises:
            EngineError: a tensor is missing, unknown or of another shape (the old weights stay), or the actor has died.
        """
        bucket = [(name, tensor.detach().float().numpy()) for name, tensor in tensors]
        await self.load_weights_from([ray.put(bucket)], version)

    async def load_weights_from(self, refs: Sequence[ray.ObjectRef[Bucket]], version: int) -> None:
        """Replace all weights by those in Ray's object store; their bytes do not pass through this process.

        Each reference holds a list of (Hugging Face name, full tensor as numpy array); together they are all tensors.

        Raises:
            EngineError: as `load_weights`.
        """
        problem = await self._call(self._host.load, list(refs), version)
        if problem:
            raise EngineError(problem)

    async def stats(self) -> dict[str, float]:
        """Counters of the engine since it started: tokens and CPU seconds by kind of work."""
        counters: dict[str, float] = await self._call(self._host.stats)
        return counters

    def close(self) -> None:
        """End the actor; what still waits gets an EngineError."""
        ray.kill(self._host)

    async def _call(self, method: Any, *arguments: Any) -> Any:
        try:
            return await method.remote(*arguments)
        except ray.exceptions.RayError as error:
            raise EngineError(f"the engine's actor failed: {_reason(error)}") from error

    async def _run(self) -> None:
        try:
            while self._waiting or self._aborts:
                asks, self._asks = self._asks, []
                aborts, self._aborts = self._aborts, []
                self.exchanges += 1
                for request_id, problem, fields in await self._call(self._host.exchange, asks, aborts, _BUDGET_S):
                    outcome = EngineError(problem) if problem else _completion(*fields)
                    settle(self._waiting.get(request_id), outcome)
                await asyncio.sleep(0)  # whoever got an answer may now ask again
                self._waiting = {key: future for key, future in self._waiting.items() if not future.done()}
        except EngineError as error:
            self._asks.clear()
            for future in self._waiting.values():
                settle(future, error)


def _completion(
    token_ids: tuple[int, ...],
    logprobs: tuple[float, ...],
    reason: str,
    spans: tuple[tuple[int, int, int], ...],
    cached: int,
) -> Completion:
    versions = tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in spans)
    return Completion(
        token_ids=token_ids, logprobs=logprobs, finish_reason=reason, versions=versions, cached_tokens=cached
    )


def _tensors(refs: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    import torch

    for ref in refs:
        for name, array in ray.get(ref):
            with warnings.catch_warnings():
                # Arrays in Ray's store are read-only; they are only copied from.
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                yield name, torch.from_numpy(array)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
