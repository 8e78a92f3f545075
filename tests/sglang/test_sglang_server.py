"""Pauses, aborts, flushes, sleep and weight updates of a real SGLang server while it answers requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout.base.errors import EngineError
from rollout.engines.protocol import Tag
from rollout.engines.sglang import SGLANG_VERSION
from rollout.engines.sglang.engine import SGLangEngine
from rollout.records.trajectory import Completion, Sampling
from rollout.sync.transport import make_sender
from tests.contract.test_engines import (
    LOGPROB_TOLERANCE,
    generate_all,
    max_error,
    prompts,
    reference_logprobs,
    weights,
)
from tests.support.tiny import MAX_LENGTH, make_model

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

# Requests (prompt, sampling) that run for seconds
LONG_REQUESTS = [([7, i], Sampling(max_tokens=MAX_LENGTH - 2)) for i in range(6)]


@pytest.fixture
def engine(sglang_engine: SGLangEngine) -> SGLangEngine:
    """Return the engine with the weights of seed 0 and an empty cache."""
    asyncio.run(sglang_engine.load_weights(weights(0), 0))
    return sglang_engine


async def generate_during(engine: SGLangEngine, action: Callable[[], Any]) -> list[Completion]:
    """Send the long requests, await `action` while the server decodes them, and return their completions."""
    running = await start_long_requests(engine)
    await action()
    return await asyncio.gather(*running)


async def start_long_requests(engine: SGLangEngine) -> list[asyncio.Task[Completion]]:
    """Send the long requests; return when the server decodes all of them."""
    for _ in range(10):
        running = [
            asyncio.create_task(engine.generate(prompt, sampling))
            for prompt, sampling in LONG_REQUESTS
        ]
        while not any(task.done() for task in running):
            if await server_load(engine, "num_running_reqs") == len(LONG_REQUESTS):
                return running
        await asyncio.gather(*running)  # they ended before the server answered
    raise AssertionError("the server never decoded all long requests at a time")


async def server_load(engine: SGLangEngine, name: str) -> int:
    """Return a number of the server's load, summed over its ranks."""
    answer = await engine.fleet.replicas[0].client.call("/v1/loads")
    return sum(load[name] for load in answer["loads"])


def test_the_version_is_the_one_that_is_supported(engine: SGLangEngine) -> None:
    async def run() -> Any:
        client = engine.fleet.replicas[0].client
        assert await client.up()
        assert await client.has("/begin_weight_update")
        assert not await client.has("/get_weight_version")
        return await client.call("/server_info")

    assert asyncio.run(run())["version"] == SGLANG_VERSION


def test_running_replies_continue_with_new_weights(engine: SGLangEngine) -> None:
    completions = asyncio.run(generate_during(engine, lambda: engine.load_weights(weights(1), 1)))
    models = [make_model(0), make_model(1)]
    for (prompt, _), completion in zip(LONG_REQUESTS, completions, strict=True):
        first, second = completion.versions
        assert (first.version, second.version) == (0, 1)
        assert first.start == 0
        assert first.end == second.start
        assert second.end == len(completion.token_ids)
        assert 0 < second.start < second.end
        # The server computes all keys and values again after an update, so that the second span
        # has the log-probabilities of the new model alone.
        for model, span in zip(models, completion.versions, strict=True):
            tokens = slice(span.start, span.end)
            expected = reference_logprobs(model, prompt, completion.token_ids, 1.0)[tokens]
            assert completion.logprobs[tokens] == pytest.approx(
                expected.tolist(), abs=LOGPROB_TOLERANCE
            )


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_holds_replies_and_loses_nothing(engine: SGLangEngine, mode: str) -> None:
    async def pause() -> None:
        await engine.fleet.call_all("/pause_generation", {"mode": mode})
        tokens = await server_load(engine, "num_used_tokens")
        await asyncio.sleep(0.5)
        assert await server_load(engine, "num_used_tokens") == tokens
        await engine.fleet.call_all("/continue_generation", {})

    completions = asyncio.run(generate_during(engine, pause))
    for (prompt, _), completion in zip(LONG_REQUESTS, completions, strict=True):
        assert completion.finish_reason == "length"
        assert max_error(make_model(0), prompt, completion) < LOGPROB_TOLERANCE


def test_a_pause_that_aborts_ends_replies(engine: SGLangEngine) -> None:
    async def abort_all() -> None:
        await engine.fleet.call_all("/pause_generation", {"mode": "abort"})
        await engine.fleet.call_all("/continue_generation", {})

    completions = asyncio.run(generate_during(engine, abort_all))
    for (prompt, sampling), completion in zip(LONG_REQUESTS, completions, strict=True):
        assert completion.finish_reason == "abort"
        assert len(completion.token_ids) < sampling.max_tokens
        if completion.token_ids:
            assert max_error(make_model(0), prompt, completion) < LOGPROB_TOLERANCE


def test_the_cache_can_only_be_flushed_when_nothing_runs(engine: SGLangEngine) -> None:
    prompt = prompts(1, seed=12, low=60)[0]
    generate_all(engine, [(prompt, Sampling(max_tokens=3))])

    async def flush_in_vain() -> None:
        with pytest.raises(EngineError, match=r"SGLang /flush_cache: status 400: "):
            await engine.fleet.call_all("/flush_cache", {})

    asyncio.run(generate_during(engine, flush_in_vain))
    (cached,) = generate_all(engine, [(prompt, Sampling(max_tokens=3))])
    # The last token of the prompt is computed again, for the logits of the first sampled one.
    assert cached.cached_tokens == len(prompt) - 1
    asyncio.run(engine.fleet.call_all("/flush_cache", {}))
    (fresh,) = generate_all(engine, [(prompt, Sampling(max_tokens=3))])
    assert fresh.cached_tokens == 0


def test_cancelled_requests_are_aborted(engine: SGLangEngine) -> None:
    async def is_idle_after_cancelling() -> bool:
        running = await start_long_requests(engine)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.gather(*engine.background)  # the aborts have been sent
        for _ in range(100):
            try:
                # The server refuses to flush its cache while it decodes a request.
                await engine.fleet.call_all("/flush_cache", {})
            except EngineError:
                await asyncio.sleep(0.01)
            else:
                return True
        return False

    assert asyncio.run(is_idle_after_cancelling())


@pytest.mark.parametrize("tags", [("weights", "kv_cache"), ("kv_cache",)])
def test_a_server_sleeps_and_wakes_by_tags(engine: SGLangEngine, tags: tuple[Tag, ...]) -> None:
    prompt = prompts(1, seed=13, low=60)[0]
    generate_all(engine, [(prompt, Sampling(max_tokens=3))])

    async def run() -> None:
        await engine.sleep(tags)
        # If the weights are not asleep, the engine must not call the server, which would crash.
        await engine.wake(("weights",))
        if "weights" in tags:
            await engine.load_weights(weights(2), 9)
        await engine.wake(("kv_cache",))
        await engine.wake()

    starts = engine.starts
    asyncio.run(run())
    (completion,) = generate_all(engine, [(prompt, Sampling(max_tokens=3))])
    assert completion.cached_tokens == 0
    version, model = (9, make_model(2)) if "weights" in tags else (0, make_model(0))
    assert completion.versions[0].version == version
    assert max_error(model, prompt, completion) < LOGPROB_TOLERANCE
    assert engine.starts == starts


def test_after_a_failed_update_the_next_one_is_complete(
    engine: SGLangEngine, shared_by_name: None
) -> None:
    prompt = prompts(1, seed=14)[0]
    engine.transport = "tensor"
    try:
        with_unknown_tensor = [*weights(4), ("model.extra.weight", torch.zeros(2))]
        with pytest.raises(EngineError, match=r"tensor 'model\.extra\.weight' is unknown"):
            asyncio.run(engine.load_weights(with_unknown_tensor, 5))
        asyncio.run(engine.load_weights(weights(5), 6))
    finally:
        engine.transport = "disk"
    (completion,) = generate_all(engine, [(prompt, Sampling(max_tokens=5))])
    assert completion.versions[0].version == 6
    assert max_error(make_model(5), prompt, completion) < LOGPROB_TOLERANCE


def test_tensors_outside_an_update_session_are_refused(
    engine: SGLangEngine, shared_by_name: None
) -> None:
    async def run() -> None:
        engine.transport = "tensor"
        route = await engine.begin_update()
        servers = replace(route.servers, sessions=False)  # as for versions without sessions
        sender = make_sender(replace(route, servers=servers))
        await asyncio.to_thread(sender.send, weights(1), 7)

    try:
        with pytest.raises(EngineError, match="must run between begin_weight_update"):
            asyncio.run(run())
    finally:
        engine.transport = "disk"
        asyncio.run(engine.fleet.call_all("/continue_generation", {}))
    (completion,) = generate_all(engine, [([1, 2], Sampling(max_tokens=3))])
    assert completion.versions[0].version == 0
    assert max_error(make_model(0), [1, 2], completion) < LOGPROB_TOLERANCE
