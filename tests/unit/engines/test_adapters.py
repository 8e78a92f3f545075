"""Adapters of policies in one embedded engine, with engines of merged models as reference."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.engines.adapters import AdapterEngine, adapter_engines
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.engines.embedded.engine import HostedEngine
from rollout.engines.embedded.settings import EmbeddedSettings
from rollout.models.adapter_weights import AdapterShape, AdapterWeights
from rollout.models.architecture import Architecture, read_architecture
from rollout.models.named_buffers import META_STORAGE
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
MAX_LENGTH = 96

AdapterTensors = dict[str, Tensor]  # by PEFT name


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    reference.make_model("qwen2", folder, initializer_range=0.1)
    return folder


def random_tensors(architecture: Architecture, shape: AdapterShape, seed: int) -> AdapterTensors:
    """Return random tensors of an adapter that are large enough to change the sampled tokens."""
    layout = AdapterWeights(architecture, shape, META_STORAGE)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(buffer.shape, generator=generator) * 0.2
        for name, buffer in layout.buffers.items()
    }


def merged_weights(
    folder: Path, shape: AdapterShape, tensors: AdapterTensors
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the model with W + scale B A, computed in float64."""
    for name, weight in read_tensors(folder):
        prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{prefix}A.weight" in tensors:
            a = tensors[f"{prefix}A.weight"].double()
            b = tensors[f"{prefix}B.weight"].double()
            weight = (weight.double() + shape.scale * b @ a).float()
        yield name, weight


def put_adapter(
    engine: EmbeddedEngine,
    number: int,
    tensors: AdapterTensors,
    version: int,
    shapes: Sequence[AdapterShape] = SHAPES,
) -> None:
    """Give an engine new weights of adapter `number`."""
    architecture = engine.decoder.shape
    shape = shapes[number - 1]
    layout = AdapterWeights(architecture, shape, META_STORAGE)
    weights = AdapterWeights(architecture, shape, torch.empty(layout.elements))
    weights.fill(tensors.items())
    engine.adopt_adapter(number, weights, version)


def engine_with_adapters(
    folder: Path, shapes: Sequence[AdapterShape] = SHAPES, **settings: Any
) -> EmbeddedEngine:
    decoder = CachedDecoder(read_architecture(folder), MAX_LENGTH, adapters=shapes)
    decoder.load(read_tensors(folder))
    return EmbeddedEngine(decoder, **settings)


def assert_close(completion: Completion, expected: Completion) -> None:
    assert completion.token_ids == expected.token_ids
    assert completion.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_mixed_batch_gives_the_replies_of_merged_models(
    family: str, deterministic: bool, tmp_path: Path
) -> None:
    reference.make_model(family, tmp_path, initializer_range=0.1)
    architecture = read_architecture(tmp_path)
    shapes = SHAPES
    if architecture.experts is not None:  # adapters of experts are not supported
        shapes = [
            replace(shape, targets=tuple(name for name in shape.targets if name in ATTENTION))
            for shape in SHAPES
        ]
    tensors = [random_tensors(architecture, shape, seed) for seed, shape in enumerate(shapes)]
    engine = engine_with_adapters(tmp_path, shapes, rows=16, deterministic=deterministic)
    for number in (1, 2, 3):
        put_adapter(engine, number, tensors[number - 1], version=number, shapes=shapes)

    # Equal prompts, whose rows are copied, and a prompt of another length.
    prompts = [[5, 6, 7], [5, 6, 7], [9] * 20]
    requests = [(prompt, Sampling(max_tokens=12, seed=seed)) for seed, prompt in enumerate(prompts)]
    for adapter in range(4):  # 0: no adapter
        for number, (prompt, sampling) in enumerate(requests):
            engine.submit(10 * adapter + number, prompt, sampling, adapter=adapter)
    mixed = drain(engine)

    first_replies = set()
    for adapter in range(4):
        merged = EmbeddedEngine.from_folder(
            tmp_path, max_length=MAX_LENGTH, rows=4, deterministic=deterministic
        )
        if adapter > 0:
            weights = merged_weights(tmp_path, shapes[adapter - 1], tensors[adapter - 1])
            merged.load_weights(weights, adapter)
        for number, (prompt, sampling) in enumerate(requests):
            merged.submit(number, prompt, sampling)
        for number, expected in drain(merged).items():
            completion = mixed[10 * adapter + number]
            assert_close(completion, expected)
            assert completion.versions == expected.versions
            # No keys of another adapter are reused.
            assert completion.cached_tokens == expected.cached_tokens
        first_replies.add(mixed[10 * adapter].token_ids)
    assert len(first_replies) == 4


def test_new_weights_of_an_adapter_concern_its_own_rows(model: Path) -> None:
    engine = engine_with_adapters(model, rows=4)
    prompt = list(range(3, 20))
    sampling = Sampling(max_tokens=6)
    for adapter in (1, 2):
        engine.submit(adapter, prompt, sampling, adapter=adapter)
    assert engine.step() == []
    assert engine.step() == []  # three tokens are sampled now
    put_adapter(engine, 1, random_tensors(read_architecture(model), SHAPES[0], 1), version=7)
    completions = drain(engine)
    assert completions[1].versions == (
        VersionSpan(version=0, start=0, end=3),
        VersionSpan(version=7, start=3, end=6),
    )
    assert completions[2].versions == (VersionSpan(version=0, start=0, end=6),)

    # Only the keys of adapter 2 are still valid.
    for adapter in (1, 2):
        engine.submit(adapter, [*prompt, 4], sampling, adapter=adapter)
    completions = drain(engine)
    assert completions[1].cached_tokens == 0
    assert completions[2].cached_tokens == len(prompt)

    # Requests that are aborted before they have rows name the version of their adapter.
    for adapter in (1, 2):
        engine.submit(adapter, prompt, sampling, adapter=adapter)
    engine.abort([1, 2])
    completions = drain(engine)
    assert completions[1].versions[0].version == 7
    assert completions[2].versions[0].version == 0


def test_broken_weights_of_an_adapter_do_not_reach_others(model: Path) -> None:
    architecture = read_architecture(model)
    first = random_tensors(architecture, SHAPES[0], 0)
    second = random_tensors(architecture, SHAPES[1], 1)
    prompt = [5, 6, 7]
    sampling = Sampling(max_tokens=6)

    alone = engine_with_adapters(model, rows=4)
    put_adapter(alone, 2, second, version=1)
    alone.submit(2, prompt, sampling, adapter=2)
    expected = drain(alone)[2]

    engine = engine_with_adapters(model, rows=4)
    put_adapter(engine, 2, second, version=1)
    overflowing = {name: tensor * 1e37 for name, tensor in first.items()}
    put_adapter(engine, 1, overflowing, version=3)
    not_finite = {name: torch.full_like(tensor, torch.nan) for name, tensor in first.items()}
    message = r"tensor '.*q_proj.lora_A.weight' has numbers that are not finite"
    with pytest.raises(EngineError, match=message):
        put_adapter(engine, 1, not_finite, version=4)
    for adapter in (1, 2):
        engine.submit(adapter, prompt, sampling, adapter=adapter)
    completions = drain(engine)
    with pytest.raises(EngineError, match="weights version 3 give logits that are not finite"):
        raise completions[1]
    assert_close(completions[2], expected)


class HostedAdapters:
    """Two adapter engines on one hosted engine, with the first weights that each gets."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.warnings: list[str] = []
        self.shapes = SHAPES[:2]
        settings = EmbeddedSettings(folder=model, max_length=MAX_LENGTH, rows=8)
        host = HostedEngine(settings, adapters=self.shapes, tell=self.warnings.append)
        self.first, self.second = adapter_engines(host, len(self.shapes))
        architecture = read_architecture(model)
        self.first_tensors = random_tensors(architecture, self.shapes[0], 0)
        self.second_tensors = random_tensors(architecture, self.shapes[1], 1)

    async def generate(self, engine: AdapterEngine) -> list[Completion]:
        """Sample three replies."""
        calls = [engine.generate([5, 6, 7], Sampling(max_tokens=9, seed=seed)) for seed in range(3)]
        return list(await asyncio.gather(*calls))

    def expected(self, engine: AdapterEngine, tensors: AdapterTensors) -> list[Completion]:
        """Return the replies of a merged model."""
        merged = EmbeddedEngine.from_folder(self.model, max_length=MAX_LENGTH, rows=4)
        weights = merged_weights(self.model, self.shapes[engine.number - 1], tensors)
        merged.load_weights(weights, engine.version)
        for seed in range(3):
            merged.submit(seed, [5, 6, 7], Sampling(max_tokens=9, seed=seed))
        completions = drain(merged)
        return [completions[seed] for seed in range(3)]

    async def check(self, engine: AdapterEngine, tensors: AdapterTensors) -> None:
        """Compare the replies of an adapter with those of the merged model."""
        completions = await self.generate(engine)
        for completion, expected in zip(completions, self.expected(engine, tensors), strict=True):
            assert_close(completion, expected)
            assert completion.versions[0].version == engine.version


@pytest.fixture
def hosted(model: Path, running_ray: None) -> Iterator[HostedAdapters]:
    hosted = HostedAdapters(model)
    files = [slot.file for slot in hosted.first.host.slots if slot.file is not None]
    assert len(files) == 2
    assert all(file.exists() for file in files)
    yield hosted
    hosted.first.close()
    hosted.second.close()
    assert not any(file.exists() for file in files)


@pytest.mark.slow
def test_adapters_are_updated_one_by_one_and_survive_their_actor(hosted: HostedAdapters) -> None:
    async def run() -> None:
        # Adapters have no effect before their first weights.
        start = await hosted.generate(hosted.first)
        for completion, other in zip(start, await hosted.generate(hosted.second), strict=True):
            assert_close(completion, other)

        await hosted.second.load_weights(hosted.second_tensors.items(), 4)
        assert (hosted.first.version, hosted.second.version) == (0, 4)
        for completion, before in zip(await hosted.generate(hosted.first), start, strict=True):
            assert_close(completion, before)
        await hosted.check(hosted.second, hosted.second_tensors)

        await hosted.first.load_weights(hosted.first_tensors.items(), 5)
        os.kill(await hosted.first.host.call("pid"), signal.SIGKILL)
        await hosted.check(hosted.first, hosted.first_tensors)
        await hosted.check(hosted.second, hosted.second_tensors)
        assert hosted.warnings
        assert hosted.second.starts == 2

    asyncio.run(run())


@pytest.mark.slow
def test_a_failed_update_of_an_adapter_changes_nothing(hosted: HostedAdapters) -> None:
    async def run() -> None:
        engine = hosted.first
        await engine.load_weights(hosted.first_tensors.items(), 5)

        other_tensors = random_tensors(read_architecture(hosted.model), hosted.shapes[0], 9)
        route = await engine.begin_update()
        update = make_sender(route).send(other_tensors.items(), 6, route.half)
        wrong_checksums = {**update.checksums, next(iter(update.checksums)): "0"}
        with pytest.raises(EngineError, match="lora_A"):
            await engine.commit_update(replace(update, checksums=wrong_checksums))
        assert engine.version == 5
        await hosted.check(engine, hosted.first_tensors)

        with pytest.raises(EngineError, match="lora_B"):
            await engine.load_weights(list(hosted.first_tensors.items())[:-1], 6)
        await hosted.check(engine, hosted.first_tensors)

    asyncio.run(run())


@pytest.mark.slow
def test_adapter_engines_sleep_and_wake_together(hosted: HostedAdapters) -> None:
    async def run() -> None:
        await hosted.second.load_weights(hosted.second_tensors.items(), 4)
        await hosted.first.sleep()
        await hosted.second.sleep()
        with pytest.raises(EngineError, match="sleeps"):
            await hosted.second.generate([5], Sampling(max_tokens=9))
        await hosted.second.wake()
        await hosted.check(hosted.second, hosted.second_tensors)

    asyncio.run(run())
