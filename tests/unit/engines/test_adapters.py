"""Rows of several adapters in one batch are what engines of the merged models give; weights come adapter by adapter."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.engines.adapters import AdapterEngine, adapter_engines
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.engines.embedded.engine import HostedEngine
from rollout.engines.embedded.settings import EmbeddedSettings
from rollout.models.architecture import Architecture, read_architecture
from rollout.models.fused_weights import AdapterShape, AdapterWeights
from rollout.models.tensors import read_tensors
from rollout.records.trajectory import Completion, Sampling, VersionSpan
from rollout.sync.transport import make_sender
from tests.support import reference
from tests.support.embedded import LOGPROB_TOLERANCE, drain

ATTENTION = ("q", "k", "v", "o")
SHAPES = [
    AdapterShape(rank=3, scale=2.0, targets=("q", "k", "v", "o", "gate", "up", "down")),
    AdapterShape(rank=5, scale=0.5, targets=("v", "up")),
    AdapterShape(rank=1, scale=1.0, targets=("q", "down")),
]


def drawn(shape: Architecture, adapter: AdapterShape, seed: int) -> dict[str, Tensor]:
    """Random tensors by PEFT name, of a size that changes what is sampled."""
    blank = AdapterWeights(shape, adapter, torch.empty(0, device="meta"))
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(size, generator=generator) * 0.2
        for name, (size, _) in blank.places.items()
    }


def merged(
    folder: Path, adapter: AdapterShape, tensors: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The model with W + scale · B A, summed in float64."""
    for name, weight in read_tensors(folder):
        peft = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{peft}A.weight" in tensors:
            a, b = (tensors[f"{peft}{half}.weight"].double() for half in "AB")
            weight = (weight.double() + adapter.scale * b @ a).float()
        yield name, weight


def put(
    engine: EmbeddedEngine,
    number: int,
    tensors: dict[str, Tensor],
    version: int,
    adapters: list[AdapterShape] = SHAPES,
) -> None:
    shape, adapter = engine.decoder.shape, adapters[number - 1]
    blank = AdapterWeights(shape, adapter, torch.empty(0, device="meta"))
    weights = AdapterWeights(shape, adapter, torch.empty(blank.elements))
    weights.fill(tensors.items())
    engine.adopt_adapter(number, weights, version)


def on_base(folder: Path, adapters: list[AdapterShape] = SHAPES, **settings: Any) -> EmbeddedEngine:
    decoder = CachedDecoder(read_architecture(folder), 96, adapters=adapters)
    decoder.load(read_tensors(folder))
    return EmbeddedEngine(decoder, **settings)


def close(one: Completion, other: Completion) -> bool:
    gap = np.abs(np.array(one.logprobs) - np.array(other.logprobs)).max()
    return one.token_ids == other.token_ids and bool(gap < LOGPROB_TOLERANCE)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_mixed_batch_is_what_engines_of_the_merged_models_give(
    family: str, deterministic: bool, tmp_path: Path
) -> None:
    reference.make_model(family, tmp_path, initializer_range=0.1)
    shape = read_architecture(tmp_path)
    dense = shape.experts is None  # experts have no adapters
    shapes = [
        replace(own, targets=tuple(x for x in own.targets if dense or x in ATTENTION))
        for own in SHAPES
    ]
    tensors = [drawn(shape, adapter, seed) for seed, adapter in enumerate(shapes)]
    engine = on_base(tmp_path, shapes, rows=16, deterministic=deterministic)
    for number, own in enumerate(tensors, 1):
        put(engine, number, own, version=number, adapters=shapes)
    # every adapter and none: the same prompts, one of them twice, so that rows are copied; and another length
    asks = [
        (prompt, Sampling(max_tokens=12, seed=seed))
        for seed, prompt in enumerate([[5, 6, 7]] * 2 + [[9] * 20])
    ]
    for adapter in range(4):
        for number, (prompt, sampling) in enumerate(asks):
            engine.submit(10 * adapter + number, prompt, sampling, adapter=adapter)
    mixed = drain(engine)
    replies = set()
    for adapter in range(4):
        alone = EmbeddedEngine.from_folder(
            tmp_path, max_length=96, rows=4, deterministic=deterministic
        )
        if adapter:
            alone.load_weights(merged(tmp_path, shapes[adapter - 1], tensors[adapter - 1]), adapter)
        for number, (prompt, sampling) in enumerate(asks):
            alone.submit(number, prompt, sampling)
        for number, one in drain(alone).items():
            assert close(mixed[10 * adapter + number], one), (adapter, number)
            assert mixed[10 * adapter + number].versions == one.versions  # its own adapter's
            # keys of one adapter are never another's
            assert mixed[10 * adapter + number].cached_tokens == one.cached_tokens
        replies.add(mixed[10 * adapter].token_ids)
    assert len(replies) == 4


def test_new_weights_of_an_adapter_touch_its_own_rows_only(tmp_path: Path) -> None:
    reference.make_model("qwen2", tmp_path, initializer_range=0.1)
    shape = read_architecture(tmp_path)
    engine = on_base(tmp_path, rows=4)
    prompt, sampling = list(range(3, 20)), Sampling(max_tokens=6)
    for adapter in (1, 2):
        engine.submit(adapter, prompt, sampling, adapter=adapter)
    assert engine.step() == [] == engine.step()
    put(engine, 1, drawn(shape, SHAPES[0], 1), version=7)
    done = drain(engine)
    assert done[1].versions == (
        VersionSpan(version=0, start=0, end=3),
        VersionSpan(version=7, start=3, end=6),
    )
    assert done[2].versions == (VersionSpan(version=0, start=0, end=6),)
    for adapter in (1, 2):
        engine.submit(adapter, [*prompt, 4], sampling, adapter=adapter)
    assert {number: one.cached_tokens for number, one in drain(engine).items()} == {
        1: 0,
        2: len(prompt),
    }
    engine.submit(1, prompt, sampling, adapter=1)
    engine.submit(2, prompt, sampling, adapter=2)
    engine.abort([1, 2])  # before they have rows
    assert {number: one.versions[0].version for number, one in drain(engine).items()} == {
        1: 7,
        2: 0,
    }


def test_an_adapter_that_has_gone_wrong_is_no_others_problem(tmp_path: Path) -> None:
    reference.make_model("qwen2", tmp_path, initializer_range=0.1)
    shape = read_architecture(tmp_path)
    first, second = (drawn(shape, SHAPES[n], n) for n in (0, 1))
    replies = []
    for broken in (False, True):
        engine = on_base(tmp_path, rows=4)
        put(engine, 2, second, version=1)
        if broken:  # its products overflow
            put(engine, 1, {name: tensor * 1e37 for name, tensor in first.items()}, version=3)
            damaged = {name: tensor.clone().fill_(torch.nan) for name, tensor in first.items()}
            with pytest.raises(
                EngineError,
                match=r"tensor '.*q_proj.lora_A.weight' has numbers that are not finite",
            ):
                put(engine, 1, damaged, version=4)
            engine.submit(1, [5, 6, 7], Sampling(max_tokens=6), adapter=1)
        engine.submit(2, [5, 6, 7], Sampling(max_tokens=6), adapter=2)
        done = drain(engine)
        replies.append(done[2])
    assert isinstance(
        done[1], EngineError
    ) and "weights version 3 give logits that are not finite" in str(done[1])
    assert close(*replies)


@pytest.mark.slow
def test_adapters_are_handed_over_one_by_one_and_outlive_the_actor(
    running_ray: None, tmp_path: Path
) -> None:
    reference.make_model("qwen2", tmp_path / "model", initializer_range=0.1)
    shape = read_architecture(tmp_path / "model")
    first, second = (drawn(shape, SHAPES[n], n) for n in (0, 1))
    told: list[str] = []
    engines = adapter_engines(
        HostedEngine(
            EmbeddedSettings(folder=tmp_path / "model", max_length=96, rows=8),
            adapters=SHAPES[:2],
            tell=told.append,
        ),
        len(SHAPES[:2]),
    )
    sampling = [Sampling(max_tokens=9, seed=seed) for seed in range(3)]

    async def ask() -> list[list[Completion]]:
        both = [[engine.generate([5, 6, 7], one) for one in sampling] for engine in engines]
        return [list(await asyncio.gather(*own)) for own in both]

    def expected(
        engine: AdapterEngine, adapter: AdapterShape, tensors: dict[str, Tensor]
    ) -> list[Completion]:
        alone = EmbeddedEngine.from_folder(tmp_path / "model", max_length=96, rows=4)
        alone.load_weights(merged(tmp_path / "model", adapter, tensors), engine.version)
        for number, one in enumerate(sampling):
            alone.submit(number, [5, 6, 7], one)
        done = drain(alone)
        return [done[number] for number in range(3)]

    async def play() -> None:
        start, same = await ask()
        assert all(map(close, start, same))  # neither adds anything yet
        await engines[1].load_weights(second.items(), 4)
        assert (engines[0].version, engines[1].version) == (0, 4)
        other, trained = await ask()
        assert all(map(close, other, start))
        assert all(map(close, trained, expected(engines[1], SHAPES[1], second)))
        assert trained[0].versions[0].version == 4
        await engines[0].load_weights(first.items(), 5)
        os.kill(await engines[0].host.call("pid"), signal.SIGKILL)
        again = await ask()
        for engine, adapter, tensors, got in zip(
            engines, SHAPES, (first, second), again, strict=False
        ):
            assert all(map(close, got, expected(engine, adapter, tensors)))
        assert told and engines[1].starts == 2
        # an adapter that is damaged on its way is not computed with
        route = await engines[0].begin_update()
        sent = make_sender(route).send(second_of_first.items(), 6, route.half)
        damaged = {**sent.checksums, next(iter(sent.checksums)): "0"}
        with pytest.raises(EngineError, match="lora_A"):
            await engines[0].commit_update(replace(sent, checksums=damaged))
        assert engines[0].version == 5
        assert [one.token_ids for one in (await ask())[0]] == [one.token_ids for one in again[0]]
        with pytest.raises(EngineError, match="lora_B"):
            await engines[0].load_weights(list(first.items())[:-1], 6)
        await engines[0].sleep()
        await engines[1].sleep()
        with pytest.raises(EngineError, match="sleeps"):
            await engines[1].generate([5], sampling[0])
        await engines[1].wake()
        assert [one.token_ids for one in (await ask())[1]] == [one.token_ids for one in again[1]]

    second_of_first = drawn(shape, SHAPES[0], 9)
    files = [own.file for own in engines[0].host.slots if own.file]
    assert all(file.exists() for file in files)
    asyncio.run(play())
    for engine in engines:
        engine.close()
    assert not any(file.exists() for file in files)
