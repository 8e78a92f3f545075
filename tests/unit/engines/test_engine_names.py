"""Engines by name, and the scripted engine of the tests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.base.errors import EngineError
from rollout.engines import EngineConfig
from rollout.engines.build import EngineRequest, build_engines
from rollout.records.trajectory import Completion, Sampling
from tests.support.own_engine import OWN_ENGINE
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


def test_an_unknown_engine_is_refused_with_the_nearest_name() -> None:
    message = "unknown engine 'sglong'; nearest: sglang; known: embedded, sglang"
    with pytest.raises(ValueError, match=message):
        EngineConfig(name="sglong")


def test_an_engine_class_of_the_users_own_gets_its_sizes_and_its_placement(tmp_path: Path) -> None:
    config = EngineConfig(name=OWN_ENGINE, slots=3, max_length=9)
    request = EngineRequest(
        policies=["solver"], model=tmp_path, config=config, log_folder=tmp_path, trained=True
    )
    (engine,) = build_engines(request)
    assert engine.arguments == (str(tmp_path), 3, 9, None)
    (placed,) = build_engines(replace(request, placements=[{"num_gpus": 1}]))
    assert placed.arguments == (str(tmp_path), 3, 9, {"num_gpus": 1})


@pytest.mark.parametrize("name", ["embedded", OWN_ENGINE])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("python", "python"),
        ("urls", ["http://127.0.0.1:1"]),
        ("members", "servers"),
        ("key_file", "key"),
        ("tp", 2),
        ("options", {"dtype": "half"}),
        ("environment", {"A": "1"}),
        ("compare_servers", False),
        ("timeout_s", 5.0),
        ("start_s", 5.0),
    ],
)
def test_settings_of_servers_are_refused_for_an_engine_without_servers(
    name: str, key: str, value: Any
) -> None:
    EngineConfig(name="sglang", **{"python": "python", key: value})
    message = f"{key}: only for SGLang's servers, and name is '{name}'; set name: sglang, or leave"
    with pytest.raises(ValueError, match=message):
        EngineConfig(name=name, **{key: value})


def test_defaults_of_server_settings_may_be_written_for_any_engine() -> None:
    written = EngineConfig(
        name="embedded", tp=1, urls=(), options={}, compare_servers=True, timeout_s=None
    )
    assert written == EngineConfig(name="embedded")


def test_an_engine_class_of_the_users_own_has_no_replicas() -> None:
    message = f"replicas: engine '{OWN_ENGINE}' is made once for each policy; leave this out"
    with pytest.raises(ValueError, match=message):
        EngineConfig(name=OWN_ENGINE, replicas=2)


def test_router_replay_needs_an_engine_that_records_experts() -> None:
    message = (
        "router_replay: '.*:OwnEngine' does not say which experts it chose; use embedded or sglang"
    )
    with pytest.raises(ValueError, match=message):
        EngineConfig(name=OWN_ENGINE, router_replay=True)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": OWN_ENGINE}, "does not say that it follows grammars"),
        (
            {"name": "sglang", "python": "python", "options": {"grammar-backend": "xgrammar"}},
            "remove options.grammar-backend",
        ),
        (
            {"name": "sglang", "python": "python", "options": {"reasoning_parser": "qwen3"}},
            "options.reasoning-parser",
        ),
    ],
)
def test_grammars_need_an_engine_whose_masks_the_trainer_knows(
    settings: dict[str, Any], problem: str
) -> None:
    EngineConfig(**settings)
    with pytest.raises(ValueError, match=problem):
        EngineConfig(**settings, grammar=True)
