"""CPU time of a decoding step of the embedded engine, against that of its matrix products alone."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.result import print_result
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.models.architecture import Architecture
from rollout.models.fused_weights import DecoderWeights
from rollout.models.named_buffers import META_STORAGE
from rollout.records.trajectory import Sampling

ROWS = 32
CONTEXT = 256  # tokens of each prompt
STEPS = 12  # decoding steps of one measurement
REPEATS = 7
MAX_REPLY = STEPS * (REPEATS + 2)
GOAL = 0.8
# 66 million parameters, 260 MB: too large for the cache, so that every step reads all weights from
# memory.
ARCHITECTURE = Architecture(
    vocab=8192,
    hidden=768,
    ffn=2304,
    layers=8,
    heads=12,
    kv_heads=4,
    head_dim=64,
    norm_eps=1e-6,
    rope_theta=1e4,
    positions=512,
    tied=True,
    qkv_bias=True,
    qk_norm=False,
)


def make_decoder() -> CachedDecoder:
    """Return a decoder with random weights."""
    decoder = CachedDecoder(ARCHITECTURE, CONTEXT + MAX_REPLY)
    generator = torch.Generator().manual_seed(0)
    weights = []
    for name, tensor in decoder.weights.tensors():
        if "norm" in name:
            weights.append((name, torch.ones(tensor.shape)))
        else:
            weights.append((name, 0.02 * torch.randn(tensor.shape, generator=generator)))
    decoder.load(iter(weights))
    return decoder


def start_engine(decoder: CachedDecoder) -> EmbeddedEngine:
    """Return an engine that decodes ROWS different requests with prompts of CONTEXT tokens."""
    engine = EmbeddedEngine(decoder, rows=ROWS)
    prompts = np.random.default_rng(0).integers(1, ARCHITECTURE.vocab, (ROWS, CONTEXT)).tolist()
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt, Sampling(max_tokens=MAX_REPLY, seed=number))
    engine.step()
    return engine


def matrix_products(weights: DecoderWeights) -> Callable[[], object]:
    """Return a function that computes the matrix products of one step, in order, and nothing else."""
    hidden = torch.randn(ROWS, ARCHITECTURE.hidden)
    attention = torch.randn(ROWS, ARCHITECTURE.heads * ARCHITECTURE.head_dim)
    ffn = torch.randn(ROWS, ARCHITECTURE.ffn)

    @torch.inference_mode()
    def step() -> None:
        for layer in weights.layers:
            F.linear(hidden, layer.qkv)
            F.linear(attention, layer.out)
            F.linear(hidden, layer.gate_up)
            F.linear(ffn, layer.down)
        F.linear(hidden, weights.head)

    return step


def matrix_flops(weights: DecoderWeights) -> int:
    """Return the floating-point operations of the matrix products of one step."""
    elements = weights.head.numel()
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
            elements += matrix.numel()
    return 2 * ROWS * elements


def step_seconds(step: Callable[[], object]) -> float:
    """Return the CPU seconds of one call, the mean over STEPS calls."""
    began = time.process_time()
    for _ in range(STEPS):
        step()
    return (time.process_time() - began) / STEPS


def main() -> None:
    """Alternate steps of the engine and their products, and compare the times."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    decoder = make_decoder()
    engine = start_engine(decoder)
    products = matrix_products(decoder.weights)
    step_seconds(products)  # warm up
    step_seconds(engine.step)

    products_s = []
    decoding_s = []
    engine_s = []  # with sampling and bookkeeping
    for _ in range(REPEATS):
        products_s.append(step_seconds(products))
        decoding_before = engine.stats.decode_s
        engine_s.append(step_seconds(engine.step))
        decoding_s.append((engine.stats.decode_s - decoding_before) / STEPS)

    parameters = DecoderWeights(ARCHITECTURE, META_STORAGE).elements
    gflop_per_s = matrix_flops(decoder.weights) / min(products_s) / 1e9
    print(
        f"model of {parameters / 1e6:.0f} M parameters, float32, one thread; {ROWS} rows, "
        f"{CONTEXT} to {CONTEXT + STEPS * (REPEATS + 1)} tokens long"
    )
    print(
        f"CPU time per step: matrix products {min(products_s) * 1e3:.1f} ms ({gflop_per_s:.0f} "
        f"GFLOP/s), decoding {min(decoding_s) * 1e3:.1f} ms, with sampling and bookkeeping "
        f"{min(engine_s) * 1e3:.1f} ms ({ROWS / min(engine_s):.0f} tokens/s)"
    )
    ratios = [bare / full for bare, full in zip(products_s, decoding_s, strict=True)]
    print_result(
        "decode_roofline",
        statistics.median(ratios),
        goal=GOAL,
        reference="gemm_roofline",
        repeats=REPEATS,
    )


if __name__ == "__main__":
    main()
