"""Embedded engine on a GPU: no operation mixes devices, and log-probabilities equal the CPU's."""

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
from rollout.engines.embedded.gpu_decoder import make_decoder
from rollout.engines.embedded.gpu_steps import DecodedStep
from rollout.models.architecture import parse_architecture
from rollout.records.trajectory import Sampling
from tests.support.embedded import drain

# Qwen3 has norms of queries and keys, and a head dimension other than hidden size / heads.
CONFIG = {
    "model_type": "qwen3",
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
    """Mode that refuses operations on tensors of two devices, except explicit copies between them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        is_copy = func is torch.ops.aten._to_copy.default
        if func is torch.ops.aten.copy_.default:
            # all weights are copied at once, as one flat tensor
            is_copy = {tensor.dim() for tensor in tensors} == {1}
        assert len(devices) < 2 or is_copy, f"{func} mixes {sorted(devices)}"
        return func(*args, **(kwargs or {}))


class _HostNumbers:
    """Sampled numbers as the host would read them from a GPU."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers

    def cpu(self) -> _HostNumbers:
        return self

    def numpy(self) -> np.ndarray:
        return self._numbers


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedEngine]:
    """Return an engine whose GPU is torch's `meta` device.

    Shapes and devices of tensors are checked. There are no numbers, so every sampled token is 7.
    """
    sample_tokens = cache_rows.sample_tokens

    def sample_on_meta(logits: Tensor, **settings: np.ndarray) -> tuple[Any, Any]:
        assert logits.device.type == "meta"
        tokens, logprobs = sample_tokens(logits, **settings)
        assert (tokens.device.type, logprobs.device.type) == ("meta", "meta")
        assert tokens.shape == logprobs.shape == logits.shape[:1]
        host_tokens = np.full(tokens.shape, 7)
        host_logprobs = np.full(tokens.shape, -1.0, dtype=np.float32)
        return _HostNumbers(host_tokens), _HostNumbers(host_logprobs)

    def sampled(step: DecodedStep) -> tuple[np.ndarray, np.ndarray]:
        assert (step.logits.device.type, step._sampled.device.type) == ("meta", "meta")
        assert step._sampled.shape == (2, len(step.logits))
        count = len(step.logits)
        return np.full(count, 7), np.full(count, -1.0, dtype=np.float32)

    monkeypatch.setattr(cache_rows, "sample_tokens", sample_on_meta)
    monkeypatch.setattr(DecodedStep, "sampled", sampled)
    with OneDevice():
        decoder = make_decoder(parse_architecture(CONFIG, "here"), 700, device="meta")
        yield EmbeddedEngine(decoder, rows=8)


def device_types(engine: EmbeddedEngine) -> set[str]:
    """Return the device types of all tensors that a forward pass reads."""
    weights = engine.decoder._active
    tensors = [
        weights.storage,
        weights.embed,
        weights.layers[0].qkv,
        engine.decoder._rotation,
        engine._cache.keys,
        engine._cache.values,
    ]
    return {tensor.device.type for tensor in tensors}


def test_requests_are_computed_on_the_gpu(engine: EmbeddedEngine) -> None:
    weights = [
        (name, torch.empty(tensor.shape)) for name, tensor in engine.decoder.weights.tensors()
    ]
    engine.load_weights(weights, 1)
    assert device_types(engine) == {"meta"}
    assert engine.decoder.weights.embed.device.type == "cpu"  # where the trainer writes

    prefix = list(range(40))
    requests: list[tuple[list[int], dict[str, Any]]] = [
        (prefix, {}),
        (prefix, {"temperature": 0.0}),  # the same prompt again
        ([*prefix, 1, 2], {"temperature": 0.7}),
        (list(range(60)) * 8, {"top_p": 0.9}),  # several blocks of queries
        ([5], {"top_k": 3}),
    ]
    for number, (prompt, settings) in enumerate(requests):
        engine.submit(number, prompt, Sampling(max_tokens=4 + number, **settings))
    completions = drain(engine)
    for number in range(5):
        assert completions[number].token_ids == (7,) * (4 + number)
    assert [completions[number].cached_tokens for number in range(5)] == [0, 40, 40, 40, 0]

    # The next turn of the first request has its prompt and its reply's first three tokens.
    engine.submit(9, [*prefix, 7, 7, 7, 3], Sampling(max_tokens=2))
    assert drain(engine)[9].cached_tokens == 43


def test_sleep_frees_the_gpu_and_waking_or_an_update_restores_the_weights(
    engine: EmbeddedEngine,
) -> None:
    engine.adopt(1, 1)
    engine.sleep()
    assert engine.decoder._active is engine.decoder.weights  # no weights on the GPU
    assert engine._cache is None
    engine.submit(1, [1], Sampling(max_tokens=1))
    with pytest.raises(EngineError, match="the engine sleeps"):
        raise drain(engine)[1]
    engine.wake()
    assert device_types(engine) == {"meta"}

    engine.sleep()
    engine.adopt(0, 2)
    engine.wake()
    assert device_types(engine) == {"meta"}
    storage = engine.decoder._active.storage
    engine.adopt(1, 3)
    assert engine.decoder._active.storage is storage  # an update reuses the GPU's memory
    engine.submit(2, [1], Sampling(max_tokens=3))
    assert drain(engine)[2].versions[0].version == 3


def test_a_missing_device_is_refused() -> None:
    with pytest.raises(EngineError, match="torch cannot compute on device 'abacus' here"):
        make_decoder(parse_architecture(CONFIG, "here"), 16, device="abacus")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graphs", [False, True])
def test_a_gpu_computes_the_same_log_probabilities_as_the_cpu(graphs: bool) -> None:
    architecture = parse_architecture(CONFIG, "here")
    completions = {}
    for device in ("cpu", "cuda"):
        decoder = make_decoder(architecture, 128, device=device)
        engine = EmbeddedEngine(decoder, rows=12, graphs=graphs)
        for version in (1, 2):  # graphs read the new weights
            generator = torch.Generator().manual_seed(version)
            weights = [
                (name, torch.randn(tensor.shape, generator=generator) * 0.2)
                for name, tensor in engine.decoder.weights.tensors()
            ]
            engine.load_weights(weights, version)
            for number in range(12):
                top_p = 0.95 if number % 2 else 1.0
                sampling = Sampling(max_tokens=30, seed=number, top_p=top_p)
                engine.submit(number, [number, *range(20)], sampling)
            completions[device, version] = drain(engine)
            engine.sleep()
            engine.wake()
    for version in (1, 2):
        for number, expected in completions["cpu", version].items():
            computed = completions["cuda", version][number]
            assert computed.token_ids == expected.token_ids
            assert computed.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
