"""Code that Triton's kernels compile to for an H200: registers, shared memory and instructions."""

from typing import Any

import pytest

from mcore_mas.megatron.model.layout import TileSizes
from tests.support.operators import compile_for_gpu

pytest.importorskip("triton", reason="needs triton (pip install triton==3.7.1)")
pytestmark = pytest.mark.slow

# Calls of functions of `tests.support.sm90`
CALLS = {
    # Qwen3 4B: four heads of 128 share a key/value head
    "attention": "tree_kernels(4, 128)",
    "attention of 64, L40S": "tree_kernels(2, 64, capability=89, shared_memory_kib=99)",
    "attention of 256, L40S": "tree_kernels(2, 256, capability=89, shared_memory_kib=99)",
    "head": "head_kernels()",
    "layer": "layer_kernels()",
    "norms": "[*map(norm_kernels, (128, 2560, 5120)), *map(sum_kernels, (2560, 5120))]",
    "experts": "expert_kernels()",
    "engine": "[engine_kernels(*shape) for shape in ((14, 2, 64, 896), (32, 8, 128, 2560))]",
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """Return the result of each call, by name, from one process: its imports take longest."""
    entries = [f"{name!r}: {call}" for name, call in CALLS.items()]
    results: dict[str, Any] = compile_for_gpu("{" + ", ".join(entries) + "}")
    return results


def test_attention_fits_the_registers_and_the_memory(compiled: dict[str, Any]) -> None:
    max_registers = (200, 200, 255)  # forward, gradient of queries, gradients of keys and values
    # Each kernel has a loop with a mask and one without. Per tile, they make 2, 3 and 4 products.
    multiplications = [
        2 * products * rows * keys * 128
        for products, rows, keys in ((2, 128, 64), (3, 128, 64), (4, 64, 128))
    ]
    kernels = compiled["attention"]
    assert [kernel["multiplications"] for kernel in kernels] == multiplications
    for kernel, max_count in zip(kernels, max_registers, strict=True):
        assert kernel["spilled"] == 0
        assert kernel["registers"] <= max_count
        assert kernel["shared"] <= 160  # of the 227 KiB of a multiprocessor
        assert kernel["wgmma"] >= 16  # products use the tensor cores


@pytest.mark.parametrize("head_dim", [64, 256])
def test_attention_fits_an_l40s(head_dim: int, compiled: dict[str, Any]) -> None:
    kernels = compiled[f"attention of {head_dim}, L40S"]
    required_kib = TileSizes.min_shared_memory_kib(head_dim, bf16=True)
    assert max(kernel["shared"] for kernel in kernels) <= required_kib <= 99
    assert [kernel["spilled"] for kernel in kernels] == [0, 0, 0]


def test_the_head_does_not_spill(compiled: dict[str, Any]) -> None:
    kernels = compiled["head"]
    assert [kernel["spilled"] for kernel in kernels] == [0, 0]
    # Four programs of 256 threads share the registers of a multiprocessor.
    assert max(kernel["registers"] for kernel in kernels) <= 64


def test_layers_do_not_spill(compiled: dict[str, Any]) -> None:
    *swiglu_kernels, rotation, rotation_gradient = compiled["layer"]
    for kernel in (*swiglu_kernels, rotation, rotation_gradient):
        assert kernel["spilled"] == 0
    # Eight programs of 128 threads share the registers of a multiprocessor; of queries and keys, two
    # programs of 256 threads do, and their gradient has one of 512.
    assert max(kernel["registers"] for kernel in swiglu_kernels) <= 64
    assert rotation["registers"] <= 128
    assert rotation_gradient["registers"] <= 128
    for kernels in compiled["norms"]:
        assert not any(kernel["spilled"] for kernel in kernels)
        forward, gradient, *_ = kernels
        # Of the forward kernel, 1536 threads share the registers. Of the gradient, 512 threads do,
        # which are all that an H200 gets.
        assert forward["registers"] <= 40
        assert gradient["registers"] <= 128


def test_experts_do_not_spill(compiled: dict[str, Any]) -> None:
    *kernels, float32_product = compiled["experts"]
    assert [kernel["spilled"] for kernel in kernels] == [0] * 3
    product, *swiglu_kernels = kernels
    assert product["wgmma"] >= 4
    # Two programs share a multiprocessor.
    assert product["registers"] <= 128
    assert product["shared"] <= 113
    assert max(kernel["registers"] for kernel in swiglu_kernels) <= 64
    # An L40S has this many KiB of shared memory.
    assert float32_product["shared"] <= 99


def test_the_engine_does_not_spill(compiled: dict[str, Any]) -> None:
    for kernels in compiled["engine"]:
        norm, swiglu, rotate, decoding, split_decoding, combine, prefill = kernels
        assert [kernel["spilled"] for kernel in kernels] == [0] * 7
        assert max(kernel["registers"] for kernel in (norm, swiglu, rotate)) <= 64
        # Programs of 128 threads: at least three share a multiprocessor's registers.
        assert max(kernel["registers"] for kernel in (decoding, split_decoding)) <= 168
        assert combine["registers"] <= 255
        assert prefill["registers"] <= 255
        assert prefill["wgmma"] > 0
