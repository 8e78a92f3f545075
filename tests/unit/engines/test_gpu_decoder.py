"""The decoder on a GPU: its kernels in Triton's interpreter, and whole engines."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from rollout.base.errors import EngineError
from rollout.engines.embedded import decoder as decoder_module
from rollout.engines.embedded import gpu_ops
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.decoder import CachedDecoder, PromptSpan
from rollout.engines.embedded.gpu_decoder import GpuDecoder, independent_spans
from rollout.engines.embedded.gpu_memory import (
    logits_bytes,
    pass_bytes,
    rows_that_fit,
    token_bytes,
)
from rollout.engines.protocol import ScoredReply
from rollout.models.adapter_weights import AdapterShape, AdapterWeights
from rollout.models.architecture import Experts, parse_architecture
from rollout.models.fused_weights import DecoderWeights
from rollout.models.named_buffers import META_STORAGE
from rollout.records.trajectory import Sampling
from tests.support.architectures import dense_architecture
from tests.support.embedded import LOGPROB_TOLERANCE, drain, largest_logprob_error, make_qwen2
from tests.support.operators import assert_near

triton = pytest.importorskip("triton", reason="needs triton (pip install triton==3.7.1)")
interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret,
    reason="needs TRITON_INTERPRET=1, which tests/conftest.py sets on a machine without a GPU",
)

# The interpreter truncates to bfloat16, with errors of up to 2^-7 of a number.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES)


@interpreted
def test_attention_by_hand() -> None:
    # Row 1 of two rows, one key/value head with two query heads. The keys are 0 and ln 3, so the
    # query 1 weighs the values 8 and 4 by 1/4 and 3/4, and the query 0 by 1/2 each. The third key is
    # not seen.
    keys = torch.zeros(2, 1, 16, 2)
    keys[1, 0, :3, 0] = torch.tensor([0.0, math.log(3), 100.0])
    values = torch.zeros(2, 1, 16, 2)
    values[1, 0, :3, 0] = torch.tensor([8.0, 4.0, 99.0])
    q = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    blocks = torch.tensor([[1, 0, 1, 1]], dtype=torch.int32)
    attended = gpu_ops.attend_to_cache(q, keys, values, blocks, 16, 1)
    assert attended[0, :, 0].tolist() == pytest.approx([5.0, 6.0])
    assert attended[0, :, 1].tolist() == [0.0, 0.0]


def attention(q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor) -> Tensor:
    """Compute `attend_to_cache` in float64, query by query."""
    group = q.shape[1] // keys.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row, first, count, position in blocks.tolist():
        for query in range(first, first + count):
            visible_keys = position + query - first + 1
            for head in range(q.shape[1]):
                row_keys = keys[row, head // group, :visible_keys].double()
                weights = (row_keys @ q[query, head].double()).softmax(0)
                out[query, head] = weights @ values[row, head // group, :visible_keys].double()
    return out


@interpreted
@dtypes
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "splits"), [(14, 2, 8, 1), (4, 4, 24, 3), (4, 1, 16, 5)]
)
def test_decoding_attends_to_rows_of_different_lengths(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, splits: int
) -> None:
    draw = torch.Generator().manual_seed(heads)
    cache = torch.randn(2, 4, kv_heads, 208, head_dim, generator=draw).to(dtype)
    q = torch.randn(3, heads, head_dim, generator=draw).to(dtype)
    # The shortest row has fewer tiles of keys than there are splits.
    blocks = torch.tensor([[0, 0, 1, 0], [3, 1, 1, 63], [1, 2, 1, 199]], dtype=torch.int32)
    tile_rows = gpu_ops.decoding_tile_rows(heads // kv_heads)
    attended = gpu_ops.attend_to_cache(q, cache[0], cache[1], blocks, tile_rows, splits)
    assert attended.dtype == dtype
    assert_near([attended], [attention(q, cache[0], cache[1], blocks)], TOLERANCES[dtype])


@interpreted
@dtypes
def test_prefill_attends_to_the_keys_before_each_query(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 3, 2, 96, 8, generator=draw).to(dtype)
    q = torch.randn(79, 6, 8, generator=draw).to(dtype)
    # One span begins a row, and the other continues a prefix of 30 tokens.
    host_blocks, tile_rows = gpu_ops.query_blocks(
        np.array([2, 0]), np.array([0, 30]), np.array([29, 50]), 3, dtype
    )
    blocks = torch.from_numpy(host_blocks)
    assert blocks[:, 2].sum() == 79
    assert blocks[0, 3] == blocks[:, 3].max()  # most keys first
    attended = gpu_ops.attend_to_cache(q, cache[0], cache[1], blocks, tile_rows, 1)
    assert_near([attended], [attention(q, cache[0], cache[1], blocks)], TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "max_length", "splits"),
    [
        (1, 2, 8192, 32),  # at most 32
        (1, 2, 192, 3),  # one for each tile of 64 keys
        (64, 2, 2048, 2),  # 264 programs for 128 pairs of a token and a head
        (256, 2, 2048, 1),
    ],
)
def test_keys_are_split_until_every_multiprocessor_has_work(
    tokens: int, kv_heads: int, max_length: int, splits: int
) -> None:
    assert gpu_ops.decoding_splits(tokens, kv_heads, max_length) == splits


@interpreted
@dtypes
@pytest.mark.parametrize("has_norms", [True, False])
def test_keys_and_values_are_stored_and_queries_are_returned(
    dtype: torch.dtype, has_norms: bool
) -> None:
    heads = 3
    kv_heads = 1
    head_dim = 6
    tokens = 4
    draw = torch.Generator().manual_seed(1)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=draw).to(dtype)
    norms = (1 + torch.rand(2, head_dim, generator=draw)).to(dtype)
    angles = torch.rand(20, head_dim // 2, generator=draw)
    rotation = torch.polar(torch.full_like(angles, 0.8), angles)
    coordinates = torch.tensor([[1, 0], [1, 1], [0, 19], [2, 7]], dtype=torch.int32)
    keys = torch.full((3, kv_heads, 32, head_dim), 7.0, dtype=dtype)
    values = keys.clone()
    q = gpu_ops.rotate_and_store(
        qkv,
        norms[0] if has_norms else None,
        norms[1] if has_norms else None,
        torch.view_as_real(rotation),
        coordinates,
        keys,
        values,
        1e-6,
    )

    split = qkv.double().view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    expected_q, expected_k, expected_v = split
    if has_norms:
        expected_q = rms_norm(expected_q, (head_dim,), norms[0].double(), 1e-6)
        expected_k = rms_norm(expected_k, (head_dim,), norms[1].double(), 1e-6)
    rows, positions = coordinates.long().unbind(1)

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * rotation[positions][:, None]).flatten(-2)

    results = [q, keys[rows, :, positions], values[rows, :, positions]]
    expected = [rotate(expected_q), rotate(expected_k), expected_v]
    assert_near(results, expected, TOLERANCES[dtype])
    assert (
        keys == 7
    ).sum() == keys.numel() - tokens * kv_heads * head_dim  # nothing else is written


@interpreted
@dtypes
def test_a_norm_adds_what_came_before_it(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 3.0], [-1.0, -7.0]])
    delta = torch.tensor([[0.0, 4.0], [0.0, 0.0]], dtype=dtype)
    weight = torch.tensor([10.0, 100.0], dtype=dtype)
    # The mean of 1 and 49 is 25, so the rows are ±(1, 7) / 5 times the weight.
    normed = gpu_ops.add_norm(x, delta, weight, 1e-12, dtype)
    assert x.tolist() == [[1.0, 7.0], [-1.0, -7.0]]
    assert normed.dtype == dtype
    assert_near([normed], [torch.tensor([[2.0, 140.0], [-2.0, -140.0]])], TOLERANCES[dtype])
    assert torch.equal(gpu_ops.add_norm(x, None, weight, 1e-12, dtype), normed)


@interpreted
@dtypes
def test_swiglu_computes_the_results_of_torch(dtype: torch.dtype) -> None:
    gate_up = torch.randn(2, 2 * 1030, generator=torch.Generator().manual_seed(2)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    result = gpu_ops.fused_silu_and_mul(gate_up, dtype)
    assert_near([result], [silu(gate) * up], TOLERANCES[dtype])


def span(row: int, source: int) -> PromptSpan:
    return PromptSpan(row=row, start=1, token_ids=np.array([1]), source=source)


def test_spans_wait_for_the_pass_that_writes_their_prefix() -> None:
    # Row 3 starts from row 1 and row 4 from row 3, which are computed first. Row 2 continues itself.
    spans = [span(1, 0), span(2, 2), span(3, 1), span(5, 1), span(4, 3)]
    parts = independent_spans(spans)
    assert [[part.row for part in spans] for spans in parts] == [[1, 2], [3, 5], [4]]


def test_as_many_rows_as_fit_into_the_free_memory() -> None:
    config = {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    }
    architecture = parse_architecture(config, "Qwen3-1.7B")
    # Keys and values of 28 layers, 8 heads and 128 elements, of 2 bytes
    assert token_bytes(architecture, bf16=True) == 2 * 28 * 8 * 128 * 2
    assert token_bytes(architecture, bf16=False) == 2 * token_bytes(architecture, bf16=True)

    # A pass over 16,384 tokens and a prompt of 2,048: the residual stream in float32, and input,
    # output, gate, up projection and their product in bfloat16
    per_token = 4 * 2048 + 2 * (2 * 2048 + 3 * 6144)
    assert pass_bytes(architecture, 2048, bf16=True) == (16_384 + 2048) * per_token
    # A pass that scores replies has one layer's keys and values, but no prompt more.
    scoring = 16_384 * (per_token + 2 * 2 * 8 * 128)
    assert pass_bytes(architecture, 1, bf16=True) == scoring
    # Adapters add float32 copies of the input, and of gate and up projection.
    with_adapters = pass_bytes(architecture, 2048, bf16=True, adapters=True)
    assert with_adapters == (16_384 + 2048) * (per_token + 4 * (2048 + 2 * 6144))
    assert logits_bytes(architecture, 3) == 3 * 5 * 4 * 151_936

    def rows(free_gb: float, *, bf16: bool = True) -> int:
        return rows_that_fit(architecture, 192, 2048, int(free_gb * 1e9), bf16=bf16)

    # 192 rows of 2048 tokens take 45.1 GB in bfloat16, and 90.2 GB in float32.
    assert rows(60) == 192
    assert rows(60, bf16=False) < 128
    assert rows(10) < 48
    with pytest.raises(
        EngineError, match=r"the GPU has 0\.5 GB free; .* of 2048 tokens take 0\.2 GB"
    ):
        rows(0.5)


PROMPTS = ([5, 6, 7], [5, 6, 7], [5, 6, 7, 8, 9], list(range(20)))


def replies(decoder: CachedDecoder) -> dict[int, Any]:
    """Load the weights of `make_qwen2(0)`, and sample a reply to each of `PROMPTS`."""
    decoder.load(make_qwen2(0).state_dict().items())
    engine = EmbeddedEngine(decoder, rows=4)
    for number, prompt in enumerate(PROMPTS):
        engine.submit(number, prompt, Sampling(max_tokens=3, seed=number))
    return drain(engine)


@interpreted
@pytest.mark.parametrize("bf16", [False, True])
def test_an_engine_computes_the_log_probabilities_of_hugging_face(
    bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module, "has_bf16", lambda: True)  # the interpreter has it
    model = make_qwen2(0)
    architecture = parse_architecture(model.config.to_dict(), "a test's")
    decoder = GpuDecoder(architecture, 64, bf16=bf16)
    completions = replies(decoder)
    assert [completions[number].cached_tokens for number in range(4)] == [0, 3, 3, 0]
    errors = [
        largest_logprob_error(model, prompt, completions[number])
        for number, prompt in enumerate(PROMPTS)
    ]
    # The weights are large, so that bfloat16's errors are, too.
    assert max(errors) < (0.2 if bf16 else LOGPROB_TOLERANCE)
    if not bf16:
        on_the_cpu = replies(CachedDecoder(architecture, 64))
        assert {n: reply.token_ids for n, reply in completions.items()} == {
            n: reply.token_ids for n, reply in on_the_cpu.items()
        }


@interpreted
@pytest.mark.parametrize("has_experts", [False, True])
def test_experts_and_adapters_are_computed_as_on_the_cpu(has_experts: bool) -> None:
    experts = Experts(count=4, per_token=2, ffn=24, normalised=True, sparse=(True,))
    architecture = dense_architecture(layers=1, experts=experts if has_experts else None)
    targets: tuple[Any, ...] = ("q", "v", "o") if has_experts else ("k", "o", "gate", "down")
    shape = AdapterShape(rank=3, scale=2.0, targets=targets)
    draw = torch.Generator().manual_seed(3)
    layout = AdapterWeights(architecture, shape, META_STORAGE)
    storage = 0.2 * torch.randn(layout.elements, generator=draw)
    adapter = AdapterWeights(architecture, shape, storage)
    reply = ScoredReply(prompt_ids=[1, 2, 3], completion_ids=[4, 5, 6, 7])

    scores = []
    weights = DecoderWeights(architecture)
    weights.storage.normal_(std=0.3, generator=draw)
    for kind in (CachedDecoder, GpuDecoder):
        decoder = kind(architecture, 16, adapters=[shape])
        decoder.load(weights.tensors())
        assert decoder.adapters is not None
        decoder.adapters.put(1, adapter)
        engine = EmbeddedEngine(decoder, rows=1, routing=has_experts)
        scores.append([engine.score([reply], adapter=number)[0] for number in (0, 1)])
    on_the_cpu, on_the_gpu = scores
    assert on_the_gpu[0] == pytest.approx(on_the_cpu[0], abs=LOGPROB_TOLERANCE)
    assert on_the_gpu[1] == pytest.approx(on_the_cpu[1], abs=LOGPROB_TOLERANCE)
    assert on_the_gpu[0] != pytest.approx(on_the_gpu[1], abs=0.01)
