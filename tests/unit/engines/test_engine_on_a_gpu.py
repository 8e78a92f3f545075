"""The embedded engine on a GPU: no operation mixes its tensors with the host's, and it says what the CPU says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout.base.errors import EngineError
from rollout.engines.embedded import rows as cache_rows
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.models.architecture import parse_architecture
from rollout.records.trajectory import Sampling

CONFIG = {
    "model_type": "qwen3",  # has all there is: norms of queries and keys, and heads of a size of their own
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}


class OneDevice(TorchDispatchMode):
    """Refuses every operation on tensors of two devices but the explicit copies from one to the other."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        copies = func is torch.ops.aten._to_copy.default or (
            func is torch.ops.aten.copy_.default
            and {tensor.dim() for tensor in tensors} == {1}  # all weights at once
        )
        assert len(devices) < 2 or copies, f"{func} mixes {sorted(devices)}"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedEngine]:
    """An engine whose GPU is torch's `meta` device: shapes and devices are right, and there are no numbers."""
    sample_tokens = cache_rows.sample_tokens

    def sample_on_meta(logits: Tensor, **settings: np.ndarray) -> tuple[Any, Any]:
        assert logits.device.type == "meta"
        tokens, logprobs = sample_tokens(logits, **settings)
        assert (tokens.device.type, logprobs.device.type) == ("meta", "meta")
        assert tokens.shape == logprobs.shape == logits.shape[:1]
        return _Host(np.full(tokens.shape, 7)), _Host(np.full(tokens.shape, -1.0, dtype=np.float32))

    monkeypatch.setattr(cache_rows, "sample_tokens", sample_on_meta)
    with OneDevice():
        yield EmbeddedEngine(
            CachedDecoder(parse_architecture(CONFIG, "here"), 700, device="meta"), rows=8
        )


class _Host:
    """The numbers that a GPU would give."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers

    def cpu(self) -> _Host:
        return self

    def numpy(self) -> np.ndarray:
        return self._numbers


def devices(engine: EmbeddedEngine) -> set[str]:
    """Of everything that a forward pass reads."""
    decoder = engine.decoder
    held = [
        decoder._active.storage,
        decoder._active.embed,
        decoder._active.layers[0].qkv,
        decoder._rotation,
    ]
    return {tensor.device.type for tensor in [*held, engine._cache.keys, engine._cache.values]}


def run(engine: EmbeddedEngine) -> dict[int, Any]:
    done: dict[int, Any] = {}
    while engine.has_work:
        done.update(engine.step())
    return done


def test_a_whole_load_is_computed_on_the_gpu(engine: EmbeddedEngine) -> None:
    weights = [
        (name, torch.empty(tensor.shape)) for name, tensor in engine.decoder.weights.tensors()
    ]
    engine.load_weights(weights, 1)
    assert devices(engine) == {"meta"}
    assert engine.decoder.weights.embed.device.type == "cpu"  # where the trainer writes
    system = list(range(40))
    prompts = [
        system,
        system,
        [*system, 1, 2],
        list(range(60)) * 8,
        [5],
    ]  # twins, a prefix, several query blocks
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 3},
    ]
    for number, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True)):
        engine.submit(number, prompt, Sampling(max_tokens=4 + number, **kind))
    done = run(engine)
    assert {number: one.token_ids for number, one in done.items()} == {
        n: (7,) * (4 + n) for n in range(5)
    }
    assert [done[number].cached_tokens for number in range(5)] == [0, 40, 40, 40, 0]
    engine.submit(9, [*system, 7, 7, 7, 3], Sampling(max_tokens=2))  # a next turn, in its row
    assert run(engine)[9].cached_tokens == 43


def test_sleep_gives_the_gpu_back_and_an_update_brings_the_weights_again(
    engine: EmbeddedEngine,
) -> None:
    engine.adopt(1, 1)
    engine.sleep()
    assert engine.decoder._active is engine.decoder.weights  # nothing on the GPU
    assert engine._cache is None
    engine.submit(1, [1], Sampling(max_tokens=1))
    with pytest.raises(EngineError, match="the engine sleeps"):
        raise run(engine)[1]
    engine.wake()  # with the weights that it had
    assert devices(engine) == {"meta"}
    engine.sleep()
    engine.adopt(0, 2)
    engine.wake()
    assert devices(engine) == {"meta"}
    storage = engine.decoder._active.storage
    engine.adopt(1, 3)
    assert engine.decoder._active.storage is storage  # copied into, not made again
    engine.submit(2, [1], Sampling(max_tokens=3))
    assert run(engine)[2].versions[0].version == 3


def test_a_device_that_is_not_there_is_one_line() -> None:
    with pytest.raises(EngineError, match="torch cannot compute on device 'abacus' here"):
        CachedDecoder(parse_architecture(CONFIG, "here"), 16, device="abacus")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_cpus_log_probabilities() -> None:
    shape = parse_architecture(CONFIG, "here")
    generator = torch.Generator().manual_seed(0)
    engines = {
        device: EmbeddedEngine(CachedDecoder(shape, 128, device=device), rows=8)
        for device in ("cpu", "cuda")
    }
    weights = [
        (name, torch.randn(tensor.shape, generator=generator) * 0.2)
        for name, tensor in engines["cpu"].decoder.weights.tensors()
    ]
    said = {}
    for device, engine in engines.items():
        engine.load_weights(weights, 1)
        for number in range(12):
            engine.submit(
                number, [number, *range(20)], Sampling(max_tokens=30, seed=number, top_p=0.95)
            )
        said[device] = run(engine)
    for number, right in said["cpu"].items():
        assert said["cuda"][number].token_ids == right.token_ids
        assert said["cuda"][number].logprobs == pytest.approx(right.logprobs, abs=1e-4)
