"""Matrix products of the decoder by oneDNN, and its norm, against torch's own."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from rollout.engines.embedded import decoder as decoder_module
from rollout.engines.embedded import products
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.cache import KVCache
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.models.architecture import parse_architecture
from rollout.records.trajectory import Completion, Sampling
from tests.support.embedded import LOGPROB_TOLERANCE, drain, largest_logprob_error, make_qwen2

torch.set_num_threads(1)
needs_bf16 = pytest.mark.skipif(
    not products.has_bf16(), reason="needs a processor with AVX512-BF16"
)
needs_one_dnn = pytest.mark.skipif(
    products.one_dnn_linear is None, reason="torch is built without oneDNN"
)


def make_decoder(seed: int, **settings: Any) -> CachedDecoder:
    """Return a decoder with the weights of `make_qwen2(seed)`."""
    model = make_qwen2(seed)
    decoder = CachedDecoder(parse_architecture(model.config.to_dict(), "a test's"), 64, **settings)
    decoder.load(model.state_dict().items())
    return decoder


@needs_one_dnn
def test_large_weights_are_multiplied_in_blocks_and_follow_every_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # In this model, only the output projection of attention is smaller.
    monkeypatch.setattr(products, "_MIN_BLOCKED_ELEMENTS", 32 * 64)
    decoder = make_decoder(0)
    layer = decoder.weights.layers[0]
    for weight in (layer.qkv, layer.gate_up, layer.down, decoder.weights.head):
        assert weight in decoder.products
    assert layer.out not in decoder.products
    x = torch.randn(7, 32)
    torch.testing.assert_close(
        decoder.products.multiply(x, layer.qkv, layer.qkv_bias),
        F.linear(x, layer.qkv, layer.qkv_bias),
    )
    engine = EmbeddedEngine(decoder)
    prompt = [5, 6, 7]
    for seed in (1, 0, 2):  # both halves of the weight buffers are used
        model = make_qwen2(seed)
        engine.load_weights(model.state_dict().items(), seed)
        for number in range(3):
            engine.submit(number, prompt, Sampling(max_tokens=20, seed=number))
        for completion in drain(engine).values():
            assert largest_logprob_error(model, prompt, completion) < LOGPROB_TOLERANCE
    engine.sleep(("weights",))
    assert not len(decoder.products)
    engine.wake(("weights",))
    assert len(decoder.products) == 7  # three in each of two layers, and the head


@needs_bf16
def test_products_in_bfloat16_round_their_factors_and_their_sums() -> None:
    decoder = make_decoder(0, bf16=True)
    # In bfloat16, 1 + 2^-9 rounds to 1, and 256 + 1 rounds to 256.
    x = torch.tensor([[1 + 2**-9, 256.0]])
    weight = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).bfloat16()
    bias = torch.tensor([0.5, 2**-9]).bfloat16()
    assert decoder.products.multiply(x, weight).tolist() == [[1.0, 256.0]]
    # the bias is added in float32
    assert decoder.products.multiply(x, weight, bias).tolist() == [[1.5, 256.0 + 2**-9]]
    assert decoder.products.multiply_add(x, x, weight).tolist() == [[2 + 2**-9, 512.0]]


@needs_bf16
@pytest.mark.parametrize("blocks", [True, False])
def test_errors_of_an_engine_in_bfloat16_are_at_most_twice_those_of_hugging_face(
    blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not blocks:
        monkeypatch.setattr(products, "one_dnn_linear", None)
    decoder = make_decoder(0, bf16=True)
    has_copies = blocks and products.one_dnn_linear is not None
    # four matrices in each of two layers, and the head
    assert len(decoder.products) == (9 if has_copies else 0)
    engine = EmbeddedEngine(decoder)
    prompt = [5, 6, 7]
    for seed in (1, 0, 2):  # both halves of the weight buffers are used
        model = make_qwen2(seed)
        engine.load_weights(model.state_dict().items(), seed)
        engine.sleep()
        assert decoder._active is decoder.weights  # the bfloat16 copy is freed
        engine.wake()
        for number in range(4):
            engine.submit(number, prompt, Sampling(max_tokens=20, seed=number))
        completions = list(drain(engine).values())
        error = max(largest_logprob_error(model, prompt, reply) for reply in completions)
        hugging_face_error = max(bfloat16_error(model, prompt, reply) for reply in completions)
        assert LOGPROB_TOLERANCE < error < 2 * hugging_face_error
    assert {tensor.dtype for _, tensor in decoder.weights.tensors()} == {torch.float32}


def test_a_processor_without_bfloat16_products_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoder_module, "has_bf16", lambda: False)
    decoder = make_decoder(0, bf16=True)
    assert decoder.dtype == torch.float32
    assert decoder._active is decoder.weights


@torch.no_grad()
def bfloat16_error(model: PreTrainedModel, prompt: list[int], completion: Completion) -> float:
    """Return the largest error of Hugging Face's log-probabilities in bfloat16."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    positions = slice(len(prompt) - 1, -1)
    exact = model(ids).logits[0, positions].log_softmax(-1)
    bfloat16_model = copy.deepcopy(model).bfloat16()
    rounded = bfloat16_model(ids).logits[0, positions].float().log_softmax(-1)
    token_ids = torch.tensor(completion.token_ids)[:, None]
    return float((exact.gather(1, token_ids) - rounded.gather(1, token_ids)).abs().max())


@needs_bf16
def test_experts_are_chosen_in_float32_by_an_engine_in_bfloat16() -> None:
    layer = SimpleNamespace(
        router=torch.tensor([[1.0, 0.0], [0.0, 1.0]]).bfloat16(),
        gate_up=torch.zeros(2, 4, 2).bfloat16(),
        down=torch.zeros(2, 2, 2).bfloat16(),
    )
    x = torch.zeros(1, 2)
    normed = torch.tensor([[256.0, 256.5]])  # equal in bfloat16
    experts: Any = SimpleNamespace(per_token=1, normalised=True, count=2)
    multiply = make_decoder(0, bf16=True).products.multiply
    chosen = products.add_experts(multiply, experts, layer, x, normed)
    assert chosen.tolist() == [[1]]


def test_small_weights_and_exact_products_have_no_copies() -> None:
    decoder = make_decoder(0)
    assert not len(decoder.products)
    assert not len(EmbeddedEngine(decoder, deterministic=True).decoder.products)


def test_the_norm_equals_torchs() -> None:
    decoder = make_decoder(0)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, generator=generator)
    # at the first scale, the norm's epsilon matters
    for scale in (1e-4, 1.0, 1e3):
        x = scale * torch.randn(3, 5, 32, generator=generator)
        torch.testing.assert_close(
            decoder._norm(x, weight), F.rms_norm(x, (32,), weight, decoder.shape.norm_eps)
        )
    assert decoder._norm(torch.zeros(1, 32), weight).eq(0).all()


def test_the_key_of_a_token_is_contiguous_except_in_exact_mode() -> None:
    shape = make_decoder(0).shape
    # strides of a head's 8 dimensions and of 48 positions
    for exact, strides in ((False, (1, 8)), (True, (48, 1))):
        cache = KVCache(shape, 3, 40, torch.device("cpu"), exact=exact)
        assert cache.keys.shape == (2, 3, 2, 8, 48)
        assert cache.keys.stride()[-2:] == strides
        assert not cache.keys.any()
        cache.keys[1, 0, 1, :, 2] = torch.arange(8.0)
        cache.copy_prefix(0, [2], 3)
        assert cache.keys[1, 2, 1, :, 2].tolist() == list(range(8))
