"""What the real server does when it is paused, aborted, flushed, put to sleep, or given weights amid requests."""

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

LONG = [
    ([7, i], Sampling(max_tokens=MAX_LENGTH - 2)) for i in range(6)
]  # requests that run for seconds


@pytest.fixture
def engine(sglang_engine: SGLangEngine) -> SGLangEngine:
    """The server with the weights of seed 0, and nothing cached."""
    asyncio.run(sglang_engine.load_weights(weights(0), 0))
    return sglang_engine


async def amid(engine: SGLangEngine, act: Callable[[], Any]) -> list[Completion]:
    """What comes of the long requests if `act` is awaited while they run."""
    running = await started(engine)
    await act()
    return await asyncio.gather(*running)


async def started(engine: SGLangEngine) -> list[asyncio.Task[Completion]]:
    """The long requests, all of which are being computed."""
    for _ in range(10):
        running = [
            asyncio.create_task(engine.generate(prompt, sampling)) for prompt, sampling in LONG
        ]
        while not any(task.done() for task in running):
            if await decoding(engine):
                return running
        await asyncio.gather(*running)  # they were faster than the question
    raise AssertionError("the long requests were never seen running")


async def decoding(engine: SGLangEngine) -> bool:
    """Whether the server has answered nothing yet and computes."""
    said = await engine.fleet.replicas[0].client.call("/v1/loads")
    return sum(load["num_running_reqs"] for load in said["loads"]) == len(LONG)


def test_the_version_is_the_one_that_is_supported(engine: SGLangEngine) -> None:
    async def play() -> Any:
        client = engine.fleet.replicas[0].client
        assert await client.up()
        assert await client.has("/begin_weight_update")
        assert not await client.has("/get_weight_version")
        return await client.call("/server_info")

    assert asyncio.run(play())["version"] == SGLANG_VERSION


def test_running_replies_go_on_with_new_weights(engine: SGLangEngine) -> None:
    completions = asyncio.run(amid(engine, lambda: engine.load_weights(weights(1), 1)))
    old, new = make_model(0), make_model(1)
    for (prompt, _), completion in zip(LONG, completions, strict=True):
        first, second = completion.versions
        assert (first.version, second.version) == (0, 1)
        assert (
            0 == first.start < first.end == second.start < second.end == len(completion.token_ids)
        )
        for model, span in ((old, first), (new, second)):
            right = reference_logprobs(model, prompt, completion.token_ids, 1.0)[
                span.start : span.end
            ]
            # the second's keys and values too are the new weights': they are computed again
            assert completion.logprobs[span.start : span.end] == pytest.approx(
                right.tolist(), abs=LOGPROB_TOLERANCE
            )


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_holds_replies_and_loses_nothing(engine: SGLangEngine, mode: str) -> None:
    async def hold() -> None:
        await engine.fleet.call_all("/pause_generation", {"mode": mode})
        before = await tokens_made(engine)
        await asyncio.sleep(0.5)
        assert await tokens_made(engine) == before
        await engine.fleet.call_all("/continue_generation", {})

    for (prompt, _), completion in zip(LONG, asyncio.run(amid(engine, hold)), strict=True):
        assert completion.finish_reason == "length"
        assert max_error(make_model(0), prompt, completion) < LOGPROB_TOLERANCE


async def tokens_made(engine: SGLangEngine) -> int:
    """How many tokens of its requests the server holds."""
    said = await engine.fleet.replicas[0].client.call("/v1/loads")
    return sum(load["num_used_tokens"] for load in said["loads"])


def test_a_pause_that_aborts_ends_replies(engine: SGLangEngine) -> None:
    async def end() -> None:
        await engine.fleet.call_all("/pause_generation", {"mode": "abort"})
        await engine.fleet.call_all("/continue_generation", {})

    for (prompt, sampling), completion in zip(LONG, asyncio.run(amid(engine, end)), strict=True):
        assert completion.finish_reason == "abort"
        assert len(completion.token_ids) < sampling.max_tokens
        if completion.token_ids:
            assert max_error(make_model(0), prompt, completion) < LOGPROB_TOLERANCE


def test_the_cache_is_flushed_when_nothing_runs(engine: SGLangEngine) -> None:
    prompt = prompts(1, seed=12, low=60)[0]
    generate_all(engine, [(prompt, Sampling(max_tokens=3))])

    async def refused() -> None:
        with pytest.raises(EngineError, match=r"SGLang /flush_cache: status 400: "):
            await engine.fleet.call_all("/flush_cache", {})

    asyncio.run(amid(engine, refused))
    (cached,) = generate_all(engine, [(prompt, Sampling(max_tokens=3))])
    assert cached.cached_tokens == len(prompt) - 1  # the last token gives the logits of the first
    asyncio.run(engine.fleet.call_all("/flush_cache", {}))
    (fresh,) = generate_all(engine, [(prompt, Sampling(max_tokens=3))])
    assert fresh.cached_tokens == 0


def test_who_is_cancelled_is_aborted(engine: SGLangEngine) -> None:
    async def play() -> None:
        running = await started(engine)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.gather(*engine.background)  # the aborts have been sent
        for _ in range(100):
            try:
                return await engine.fleet.call_all(
                    "/flush_cache", {}
                )  # refused while anything runs
            except EngineError:
                await asyncio.sleep(0.01)
        raise AssertionError("what was cancelled runs on")

    asyncio.run(play())


@pytest.mark.parametrize("tags", [("weights", "kv_cache"), ("kv_cache",)])
def test_a_server_sleeps_and_wakes_by_tags(engine: SGLangEngine, tags: tuple[Tag, ...]) -> None:
    prompt = prompts(1, seed=13, low=60)[0]
    generate_all(engine, [(prompt, Sampling(max_tokens=3))])

    async def play() -> None:
        await engine.sleep(tags)
        await engine.wake(
            ("weights",)
        )  # where it did not sleep, the server is not asked: it would die of it
        if "weights" in tags:
            await engine.load_weights(weights(2), 9)
        await engine.wake(("kv_cache",))
        await engine.wake()

    starts = engine.starts
    asyncio.run(play())
    (completion,) = generate_all(engine, [(prompt, Sampling(max_tokens=3))])
    assert completion.cached_tokens == 0
    assert completion.versions[0].version == (9 if "weights" in tags else 0)
    assert (
        max_error(make_model(2 if "weights" in tags else 0), prompt, completion) < LOGPROB_TOLERANCE
    )
    assert engine.starts == starts


def test_a_push_that_fails_is_told_and_the_next_is_whole(
    engine: SGLangEngine, shared_by_name: None
) -> None:
    prompt = prompts(1, seed=14)[0]
    engine.transport = "tensor"
    try:
        with pytest.raises(EngineError, match=r"tensor 'model\.extra\.weight' is unknown"):
            asyncio.run(
                engine.load_weights([*weights(4), ("model.extra.weight", torch.zeros(2))], 5)
            )
        asyncio.run(engine.load_weights(weights(5), 6))
    finally:
        engine.transport = "disk"
    (completion,) = generate_all(engine, [(prompt, Sampling(max_tokens=5))])
    assert completion.versions[0].version == 6
    assert max_error(make_model(5), prompt, completion) < LOGPROB_TOLERANCE


def test_tensors_outside_a_session_are_refused(engine: SGLangEngine, shared_by_name: None) -> None:
    async def play() -> None:
        engine.transport = "tensor"
        route = await engine.begin_update()
        servers = replace(route.servers, sessions=False)  # as for versions without sessions
        sender = make_sender(replace(route, servers=servers))
        await asyncio.to_thread(sender.send, weights(1), 7)

    try:
        with pytest.raises(EngineError, match="must run between begin_weight_update"):
            asyncio.run(play())
    finally:
        engine.transport = "disk"
        asyncio.run(engine.fleet.call_all("/continue_generation", {}))
    (completion,) = generate_all(engine, [([1, 2], Sampling(max_tokens=3))])
    assert completion.versions[0].version == 0
    assert max_error(make_model(0), [1, 2], completion) < LOGPROB_TOLERANCE
