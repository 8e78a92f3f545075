"""Engines by name, and the engine of the tests that says what it is told to."""

from __future__ import annotations

import asyncio

import pytest
import torch

from rollout.base.errors import EngineError
from rollout.base.lookup import UnknownName
from rollout.engines.registry import ENGINES, engine_class
from rollout.records.trajectory import Completion, Sampling
from tests.support.scripted_engine import ScriptedEngine


def replies(engine: ScriptedEngine, *requests: tuple[list[int], Sampling]) -> list[Completion]:
    async def run() -> list[Completion]:
        return [await engine.generate(prompt, sampling) for prompt, sampling in requests]

    return asyncio.run(run())


def test_scripted_replies() -> None:
    engine = ScriptedEngine(lambda prompt, call: [*prompt, call, 7, 8])
    first, second = replies(engine, ([1, 2], Sampling(stop=(7,))), ([3], Sampling(max_tokens=2)))
    assert (first.token_ids, first.finish_reason) == ((1, 2, 0, 7), "stop")
    assert (second.token_ids, second.finish_reason) == ((3, 1), "length")
    assert first.logprobs == (0.0,) * 4
    asyncio.run(engine.load_weights([("a", torch.zeros(1))], 3))
    assert engine.loaded == [(3, ("a",))]
    (third,) = replies(engine, ([5], Sampling()))
    assert (third.token_ids, third.finish_reason) == ((5, 2, 7, 8), "stop")
    assert third.versions[0].version == 3
    with pytest.raises(EngineError, match=r"no reply to prompt \[4\]"):
        replies(ScriptedEngine({(1,): [2]}), ([4], Sampling()))


def test_engines_are_found_by_name() -> None:
    classes = {"HostedEngine", "LocalEngine", "ReplicatedEngine", "SGLangEngine"}
    assert {engine_class(name).__name__ for name in ENGINES} == classes
    with pytest.raises(
        UnknownName,
        match="unknown engine 'sglong'; nearest: sglang; known: embedded, embedded_local, embedded_replicas",
    ):
        engine_class("sglong")
