"""CPU time of the embedded engine's decoding step against that of its matrix products alone."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.models.architecture import Architecture
from rollout.models.fused_weights import NOWHERE, Weights
from rollout.records.trajectory import Sampling

ROWS, CONTEXT, STEPS, REPEATS, GOAL = 32, 256, 12, 7, 0.8
# 66 million parameters, 260 MB: no layer's weights are still in the cache when the next pass reaches it
SHAPE = Architecture(
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


def random_decoder() -> CachedDecoder:
    """A decoder of that shape with weights drawn at random."""
    decoder = CachedDecoder(SHAPE, CONTEXT + STEPS * (REPEATS + 2))
    generator = torch.Generator().manual_seed(0)
    decoder.load(
        (
            name,
            torch.ones(tensor.shape)
            if "norm" in name
            else 0.02 * torch.randn(tensor.shape, generator=generator),
        )
        for name, tensor in decoder.weights.tensors()
    )
    return decoder


def running_engine(decoder: CachedDecoder) -> EmbeddedEngine:
    """An engine in which `ROWS` different requests, `CONTEXT` tokens long, are decoding."""
    engine = EmbeddedEngine(decoder, rows=ROWS)
    prompts = np.random.default_rng(0).integers(1, SHAPE.vocab, (ROWS, CONTEXT)).tolist()
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt, Sampling(max_tokens=STEPS * (REPEATS + 2), seed=number))
    engine.step()
    return engine


def products(weights: Weights) -> Callable[[], object]:
    """The matrix products of one step with the weights that it uses, in its order; nothing else."""
    hidden = torch.randn(ROWS, SHAPE.hidden)
    mixed = torch.randn(ROWS, SHAPE.heads * SHAPE.head_dim)
    wide = torch.randn(ROWS, SHAPE.ffn)

    @torch.inference_mode()
    def step() -> None:
        for layer in weights.layers:
            F.linear(hidden, layer.qkv)
            F.linear(mixed, layer.out)
            F.linear(hidden, layer.gate_up)
            F.linear(wide, layer.down)
        F.linear(hidden, weights.head)

    return step


def seconds(step: Callable[[], object]) -> float:
    """CPU seconds of one call, the mean over `STEPS`."""
    began = time.process_time()
    for _ in range(STEPS):
        step()
    return (time.process_time() - began) / STEPS


def main() -> None:
    """Alternate steps of the engine and their products, and print both."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    decoder = random_decoder()
    engine = running_engine(decoder)
    product = products(decoder.weights)
    seconds(product), seconds(engine.step)
    core, whole, bare = [], [], []
    for _ in range(REPEATS):
        bare.append(seconds(product))
        before = engine.stats.decode_s
        whole.append(seconds(engine.step))
        core.append((engine.stats.decode_s - before) / STEPS)
    matrices = [
        w
        for layer in decoder.weights.layers
        for w in (layer.qkv, layer.out, layer.gate_up, layer.down)
    ]
    flops = 2 * ROWS * sum(matrix.numel() for matrix in [*matrices, decoder.weights.head])
    print(
        f"model of {Weights(SHAPE, NOWHERE).elements / 1e6:.0f} M parameters, float32, one thread; {ROWS} rows, "
        f"{CONTEXT} to {CONTEXT + STEPS * (REPEATS + 1)} tokens long"
    )
    print(
        f"CPU time per step: matrix products {min(bare) * 1e3:.1f} ms ({flops / min(bare) / 1e9:.0f} GFLOP/s), "
        f"decoding {min(core) * 1e3:.1f} ms, with sampling and bookkeeping {min(whole) * 1e3:.1f} ms "
        f"({ROWS / min(whole):.0f} tokens/s)"
    )
    ratio = statistics.median(b / w for b, w in zip(bare, core, strict=True))
    print(
        f"name=decode_roofline ratio={ratio:.2f} goal={GOAL:.2f} reference=gemm_roofline n={REPEATS}"
    )


if __name__ == "__main__":
    main()
