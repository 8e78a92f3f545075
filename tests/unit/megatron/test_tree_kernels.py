"""Triton's attention kernels: results in its interpreter, and the tiles of a GPU."""

import itertools
import random
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_mas.megatron.batch import Segment
from mcore_mas.megatron.model.block_attention import BlockAttention
from mcore_mas.megatron.model.layout import BlockPlan, PackedTrees, TileSizes
from mcore_mas.megatron.model.tree_ops import KernelAttention
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step import pipeline
from mcore_mas.megatron.transfer import upload
from tests.support.operators import assert_near, output_and_gradients

triton = pytest.importorskip("triton", reason="needs triton (pip install triton==3.7.1)")
interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret,
    reason="needs TRITON_INTERPRET=1, which tests/conftest.py sets on a machine without a GPU",
)
SMALL = {"rows": 32, "keys": 16, "rows_kv": 16, "keys_kv": 32}


def make_segments(*tokens_and_parents: tuple[int, int]) -> list[Segment]:
    return [Segment(tokens=tokens, parent=parent) for tokens, parent in tokens_and_parents]


def chain(length: int) -> list[Segment]:
    """Return segments of one token, each of which continues the one before."""
    return [Segment(tokens=1, parent=i - 1) for i in range(length)]


def random_forest(seed: int) -> list[Segment]:
    """Return up to three trees of up to eight segments, depth first."""
    draw = random.Random(seed)
    max_tokens = draw.choice([1, 3, 12])
    segments: list[Segment] = []
    for _ in range(draw.randint(1, 3)):
        path = [len(segments)]
        segments.append(Segment(tokens=draw.randint(1, 2 * max_tokens)))
        for _ in range(draw.randint(0, 7)):
            while len(path) > 1 and draw.random() < 0.5:
                path.pop()
            segments.append(Segment(tokens=draw.randint(1, max_tokens), parent=path[-1]))
            path.append(len(segments) - 1)
    return segments


# Segments, heads, key/value heads, dimension of a head, and sizes of tiles.
Case = tuple[list[Segment], int, int, int, dict[str, int]]
CASES: dict[str, Case] = {
    "one token": (make_segments((1, -1)), 4, 4, 16, SMALL),
    "a group": (make_segments((20, -1), (9, 0), (1, 0), (12, 0)), 4, 2, 16, SMALL),
    "twins under twins": (
        make_segments((9, -1), (5, 0), (7, 1), (7, 1), (5, 0), (3, -1)),
        2,
        2,
        32,
        SMALL,
    ),
    "a chain of one-token turns": (chain(19), 4, 1, 16, SMALL),
    "five heads share, a head_dim of 24": (
        make_segments((11, -1), (17, 0), (4, 0)),
        5,
        1,
        24,
        SMALL,
    ),
    "seven heads share": (
        make_segments((30, -1), (8, 0), (8, 0)),
        14,
        2,
        16,
        {"rows": 64, "keys": 16, "rows_kv": 32, "keys_kv": 16},
    ),
    "tiles as on a GPU": (
        make_segments((150, -1), (40, 0), (3, 1), (30, 0)),
        4,
        1,
        16,
        {"rows": 128, "keys": 64, "rows_kv": 64, "keys_kv": 128},
    ),
    **{f"random forest {seed}": (random_forest(seed), 4, 2, 16, SMALL) for seed in range(12)},
}


def plan_of(segments: Sequence[Segment], sizes: TileSizes) -> BlockPlan:
    plan = PackedTrees.of(segments, sizes=sizes).block_plan
    assert plan is not None
    return plan


def attend_with_kernels(
    q: Tensor, k: Tensor, v: Tensor, *, plan: BlockPlan, scale: float
) -> Tensor:
    out: Tensor = KernelAttention.apply(q, k, v, plan, scale)
    return out


def attend_with_torch(
    q: Tensor, k: Tensor, v: Tensor, *, segments: Sequence[Segment], scale: float
) -> Tensor:
    out: Tensor = BlockAttention.apply(q, k, v, PackedTrees.of(segments), scale)
    return out


def random_tensors(
    tokens: int, heads: int, kv_heads: int, dim: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient of the output, queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    q, grad_out, k, v = (
        torch.randn(tokens, count, dim, generator=generator)
        for count in (heads, heads, kv_heads, kv_heads)
    )
    return grad_out, q, k, v


def attend_densely(q: Tensor, k: Tensor, v: Tensor, *, plan: BlockPlan, scale: float) -> Tensor:
    """Compute all scores, in the type of the queries."""
    token = torch.arange(len(q))
    attends = (token <= token[:, None]) & (token[:, None] < plan.ends)
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    weights = scores.masked_fill(~attends, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def both_results(name: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results of a case with kernels, and those of torch in float32."""
    segments, heads, kv_heads, dim, tiles = CASES[name]
    tokens = sum(segment.tokens for segment in segments)
    tensors = [x.to(dtype) for x in random_tensors(tokens, heads, kv_heads, dim, seed=tokens)]
    plan = plan_of(segments, TileSizes(heads // kv_heads, **tiles))
    scale = dim**-0.5
    with_kernels = partial(attend_with_kernels, plan=plan, scale=scale)
    with_torch = partial(attend_with_torch, segments=segments, scale=scale)
    float32_tensors = [x.float() for x in tensors]
    return (
        output_and_gradients(with_kernels, *tensors),
        output_and_gradients(with_torch, *float32_tensors),
    )


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_the_results_of_torch(name: str) -> None:
    """Bound the errors, relative to float64, by four times those of dense attention in float32."""
    segments, heads, kv_heads, dim, tiles = CASES[name]
    tokens = sum(segment.tokens for segment in segments)
    tensors = random_tensors(tokens, heads, kv_heads, dim, seed=tokens)
    plan = plan_of(segments, TileSizes(heads // kv_heads, **tiles))
    densely = partial(attend_densely, plan=plan, scale=dim**-0.5)
    results, _ = both_results(name, torch.float32)
    in_float32 = output_and_gradients(densely, *tensors)
    exact = output_and_gradients(densely, *(x.double() for x in tensors))
    largest = max(float(x.abs().max()) for x in exact)
    error_of_float32 = max(map(largest_error, in_float32, exact))
    assert max(map(largest_error, results, exact)) <= 4 * error_of_float32 + 2**-22 * largest


def largest_error(result: Tensor, exact: Tensor) -> float:
    return float((result - exact).abs().max())


@interpreted
def test_a_lone_token_attends_to_itself() -> None:
    plan = plan_of([Segment(tokens=1)], TileSizes(1, **SMALL))
    q, k, v = (torch.randn(1, 1, 16) for _ in range(3))
    ones = torch.ones(1, 1, 16)
    attend = partial(attend_with_kernels, plan=plan, scale=1.0)
    out, grad_q, grad_k, grad_v = output_and_gradients(attend, ones, q, k, v)
    # The softmax of a single score is 1, whatever the score is.
    assert torch.equal(out, v)
    assert torch.equal(grad_v, ones)
    assert float(grad_q.abs().max()) <= 1e-6 * float(k.abs().max()) * float(v.abs().sum())
    assert float(grad_k.abs().max()) <= 1e-6 * float(q.abs().max()) * float(v.abs().sum())


@interpreted
def test_bfloat16_is_summed_in_float32() -> None:
    results, expected = both_results("a group", torch.bfloat16)
    assert all(result.dtype == torch.bfloat16 for result in results)
    # The interpreter truncates to bfloat16, with errors of up to 2^-7 for each factor.
    assert_near([result.float() for result in results], expected, 2**-6)


@interpreted
def test_results_have_the_same_bits_every_time() -> None:
    first, _ = both_results("a group", torch.float32)
    second, _ = both_results("a group", torch.float32)
    assert all(map(torch.equal, first, second))


@interpreted
def test_a_subtree_that_ends_one_token_late_changes_the_output() -> None:
    segments, heads, kv_heads, dim, tiles = CASES["a group"]
    sizes = TileSizes(heads // kv_heads, **tiles)
    right_plan = plan_of(segments, sizes)
    late_plan = plan_of(make_segments((20, -1), (10, 0), (1, 0), (11, 0)), sizes)
    _, q, k, v = random_tensors(42, heads, kv_heads, dim, seed=0)
    right = attend_with_kernels(q, k, v, plan=right_plan, scale=1.0)
    late = attend_with_kernels(q, k, v, plan=late_plan, scale=1.0)
    assert torch.equal(right[:29], late[:29])
    assert float((right[29:] - late[29:]).abs().max()) > 0.1


def tile_sizes(head_dim: int, **settings: bool) -> TileSizes | None:
    """Return the tiles of a pipeline on a GPU; None if the kernels do not fit it."""
    architecture: Any = SimpleNamespace(heads=8, kv_heads=2, head_dim=head_dim)
    spec = TrainerSpec(model="", **settings)
    return pipeline.choose_tile_sizes(spec, architecture, torch.device("meta"))


@pytest.mark.parametrize(
    ("gpu", "kib", "float32_dims", "bf16_dims", "keys"),
    [
        ("H100", 227, {64, 80, 128}, {64, 80, 128, 256, 512}, 32),
        ("A100", 163, {64, 80, 128}, {64, 80, 128, 256}, 32),
        ("L40S", 99, {64}, {64, 80, 128, 256}, 16),
        ("T4", 64, set(), {64}, 16),
    ],
)
def test_torch_attends_if_tiles_do_not_fit_the_gpu(
    gpu: str,
    kib: int,
    float32_dims: set[int],
    bf16_dims: set[int],
    keys: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=kib << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    dims = (64, 80, 128, 256, 512)
    assert {dim for dim in dims if tile_sizes(dim)} == float32_dims
    assert {dim for dim in dims if tile_sizes(dim, bf16=True)} == bf16_dims
    if 256 in bf16_dims:
        expected = TileSizes(4, rows=64, keys=keys, rows_kv=32, keys_kv=32)
        assert tile_sizes(256, bf16=True) == expected
        assert tile_sizes(128, bf16=True) == TileSizes.of(4, 128, True, shared_memory_kib=kib)


def test_shapes_are_known_without_a_kernel() -> None:
    plan = plan_of(make_segments((20, -1), (9, 0)), TileSizes(2, **SMALL))
    q, k, v = (
        torch.empty(29, heads, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for heads in (4, 2, 2)
    )
    out = attend_with_kernels(q, k, v, plan=plan, scale=1.0)
    out.backward(torch.empty_like(out))
    assert out.shape == q.shape
    assert out.dtype == torch.bfloat16
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert x.grad.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_kernels_compute_the_results_of_torch_on_a_gpu(
    dtype: torch.dtype, tolerance: float
) -> None:
    device = torch.device("cuda")
    for seed, (heads, kv_heads, dim) in itertools.product(range(4), ((32, 8, 128), (14, 2, 64))):
        segments = [
            Segment(tokens=20 * segment.tokens, parent=segment.parent)
            for segment in random_forest(seed)
        ]
        tokens = sum(segment.tokens for segment in segments)
        tensors = random_tensors(tokens, heads, kv_heads, dim, seed)
        sizes = TileSizes.of(heads // kv_heads, dim, dtype == torch.bfloat16)
        plan = upload(plan_of(segments, sizes), device)
        results = output_and_gradients(
            partial(attend_with_kernels, plan=plan, scale=0.1),
            *(x.to(device, dtype) for x in tensors),
        )
        expected = output_and_gradients(
            partial(attend_with_torch, segments=segments, scale=0.1), *tensors
        )
        assert_near([result.float() for result in results], expected, tolerance)
