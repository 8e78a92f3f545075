"""Triton's kernels: what they compute, in its interpreter, and what they compile to for an H200, without a GPU."""

import itertools
import json
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mcore_mas.megatron.batch import Segment
from mcore_mas.megatron.model.block_attention import BlockAttention
from mcore_mas.megatron.model.head import ChunkedHead
from mcore_mas.megatron.model.layer_ops import KernelHead
from mcore_mas.megatron.model.layout import BlockPlan, PackedTrees, TileSizes
from mcore_mas.megatron.model.tree_ops import KernelAttention
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step import pipeline
from mcore_mas.megatron.transfer import upload

triton = pytest.importorskip("triton", reason="needs triton (pip install triton==3.7.1)")
interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret,
    reason="needs TRITON_INTERPRET=1, as tests/conftest.py has it without a GPU",
)
SMALL = {"rows": 32, "keys": 16, "rows_kv": 16, "keys_kv": 32}


def plan_of(segments: list[tuple[int, int]], sizes: TileSizes) -> BlockPlan:
    plan = PackedTrees.of([Segment(tokens=n, parent=p) for n, p in segments], sizes=sizes).plan
    assert plan is not None
    return plan


def test_who_sees_whom_is_written_as_ends_and_lists_of_blocks() -> None:
    # a stem of 3 tokens with replies of 2 and 3, and a sequence of 2: tiles of 2 tokens (2 heads) and 4 keys
    plan = plan_of(
        [(3, -1), (2, 0), (3, 0), (2, -1)], TileSizes(2, rows=4, keys=4, rows_kv=4, keys_kv=2)
    )
    assert plan.ends.tolist() == [8, 8, 8, 5, 5, 8, 8, 8, 10, 10]
    # queries 0-1, 2-3, 4-5 (whose keys 0-3 end at 5 at the earliest), 6-7, 8-9: each of blocks of keys 0-3, 4-7, 8-9
    assert plan.begin.tolist() == [0, 1, 2, 4, 6, 7]
    assert plan.seen.tolist() == [0, 0, 0, 1, 0, 1, 2]
    assert (
        plan.masked.tolist() == plan.begin.tolist()[:-1]
    )  # so small that every block needs the mask
    assert plan.nearest.tolist() == [8, 5, 5, 8, 10]
    assert plan.farthest.tolist() == [8, 8, 8, 8, 10]


def test_blocks_that_everybody_sees_come_first_and_unmasked() -> None:
    plan = plan_of([(8, -1), (4, 0), (4, 0)], TileSizes(1, rows=4, keys=4, rows_kv=4, keys_kv=4))
    assert plan.begin.tolist() == [0, 1, 3, 6, 9]
    assert plan.seen.tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 3]
    assert plan.masked.tolist() == [0, 2, 5, 8]  # all but the diagonal are unmasked


def forest(seed: int) -> list[tuple[int, int]]:
    """(tokens, parent) of segments depth first: up to three trees of up to eight segments."""
    draw = random.Random(seed)
    most = draw.choice([1, 3, 12])
    segments: list[tuple[int, int]] = []
    for _ in range(draw.randint(1, 3)):
        stack = [len(segments)]
        segments.append((draw.randint(1, 2 * most), -1))
        for _ in range(draw.randint(0, 7)):
            while len(stack) > 1 and draw.random() < 0.5:
                stack.pop()
            segments.append((draw.randint(1, most), stack[-1]))
            stack.append(len(segments) - 1)
    return segments


# (segments, heads, key/value heads, head_dim, rows and keys of tiles)
CASES = {
    "one token": ([(1, -1)], 4, 4, 16, SMALL),
    "a group": ([(20, -1), (9, 0), (1, 0), (12, 0)], 4, 2, 16, SMALL),
    "twins under twins": ([(9, -1), (5, 0), (7, 1), (7, 1), (5, 0), (3, -1)], 2, 2, 32, SMALL),
    "a chain of one-token turns": ([(1, i - 1) for i in range(19)], 4, 1, 16, SMALL),
    "five heads share, a head_dim of 24": ([(11, -1), (17, 0), (4, 0)], 5, 1, 24, SMALL),
    "seven heads share": (
        [(30, -1), (8, 0), (8, 0)],
        14,
        2,
        16,
        {"rows": 64, "keys": 16, "rows_kv": 32, "keys_kv": 16},
    ),
    "tiles as on a GPU": (
        [(150, -1), (40, 0), (3, 1), (30, 0)],
        4,
        1,
        16,
        {"rows": 128, "keys": 64, "rows_kv": 64, "keys_kv": 64},
    ),
    **{f"random forest {seed}": (forest(seed), 4, 2, 16, SMALL) for seed in range(12)},
}


def results(attend: object, given: list[Tensor], slope: Tensor) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values of its inner product with `slope`."""
    leaves = [x.clone().requires_grad_() for x in given]
    out = attend(*leaves)  # type: ignore[operator]
    out.backward(slope)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def both(name: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """What the kernels and what torch's attention come to."""
    segments, heads, kv_heads, dim, tiles = CASES[name]
    tokens = sum(n for n, _ in segments)
    generator = torch.Generator().manual_seed(tokens)
    q, slope, k, v = (
        torch.randn(tokens, h, dim, generator=generator) for h in (heads, heads, kv_heads, kv_heads)
    )
    given = [x.to(dtype) for x in (q, k, v)]
    plan = plan_of(segments, TileSizes(heads // kv_heads, **tiles))
    layout = PackedTrees.of([Segment(tokens=n, parent=p) for n, p in segments])
    scale = dim**-0.5
    got = results(lambda *x: KernelAttention.apply(*x, plan, scale), given, slope.to(dtype))
    want = results(
        lambda *x: BlockAttention.apply(*x, layout, scale), [x.float() for x in given], slope
    )
    return got, want


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_what_torch_does(name: str) -> None:
    got, want = both(name, torch.float32)
    largest = max(float(x.abs().max()) for x in want)
    for mine, theirs in zip(got, want, strict=True):
        assert float((mine - theirs).abs().max()) <= 2e-6 * largest


@interpreted
def test_a_lone_token_sees_itself() -> None:
    plan = plan_of([(1, -1)], TileSizes(1, **SMALL))
    q, k, v = (torch.randn(1, 1, 16) for _ in range(3))
    out, of_q, of_k, of_v = results(
        lambda *x: KernelAttention.apply(*x, plan, 1.0), [q, k, v], torch.ones(1, 1, 16)
    )
    assert torch.equal(out, v) and torch.equal(
        of_v, torch.ones(1, 1, 16)
    )  # softmax of one score is 1, whatever it is
    assert float(of_q.abs().max()) <= 1e-6 * float(k.abs().max()) * float(v.abs().sum())
    assert float(of_k.abs().max()) <= 1e-6 * float(q.abs().max()) * float(v.abs().sum())


@interpreted
def test_bfloat16_is_summed_in_float32() -> None:
    got, want = both("a group", torch.bfloat16)
    for mine, theirs in zip(
        got, want, strict=True
    ):  # the interpreter truncates to bfloat16: 2^-7 at most
        assert mine.dtype == torch.bfloat16
        assert float((mine.float() - theirs).abs().max()) <= 2**-6 * float(theirs.abs().max())


@interpreted
def test_the_same_bits_twice() -> None:
    assert all(
        map(torch.equal, both("a group", torch.float32)[0], both("a group", torch.float32)[0])
    )


@interpreted
def test_a_subtree_that_ends_one_token_late_is_seen() -> None:
    segments, heads, kv_heads, dim, tiles = CASES["a group"]
    right = plan_of(segments, TileSizes(heads // kv_heads, **tiles))
    late = plan_of([(20, -1), (10, 0), (1, 0), (11, 0)], TileSizes(heads // kv_heads, **tiles))
    q, k, v = (
        torch.randn(42, h, dim, generator=torch.Generator().manual_seed(h))
        for h in (heads, kv_heads, kv_heads)
    )
    one, other = (KernelAttention.apply(q, k, v, plan, 1.0) for plan in (right, late))
    assert torch.equal(one[:29], other[:29]) and float((one[29:] - other[29:]).abs().max()) > 0.1


@interpreted
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_head_in_float32_is_the_cpu_head(with_entropy: bool, one_rank: None) -> None:
    rows, hidden, width, vocab = 7, 12, 80, 67  # 13 columns are padding
    draw = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(rows, hidden, generator=draw),
        torch.randn(width, hidden, generator=draw),
    )
    labels, temperatures = (
        torch.randint(vocab, (rows,), generator=draw),
        torch.rand(rows, generator=draw) + 0.5,
    )
    labels[0] = -3  # another rank's, which would say what it is
    slope = torch.randn(2, rows, generator=draw)
    found = []
    for parts in (None, [slice(0, 4), slice(4, 7)]):
        leaf, weights = x.clone().requires_grad_(), torch.nn.Parameter(weight.clone())
        given = (leaf, weights, labels, temperatures, vocab)
        if parts is None:
            logprobs, entropy = ChunkedHead.apply(*given, False, False)
        else:
            weights.main_grad = torch.ones(width, hidden)  # type: ignore[attr-defined]  # of a micro-batch before
            logprobs, entropy = KernelHead.apply(*given, False, parts)
        loss = (logprobs * slope[0]).sum() + (entropy * slope[1]).sum() * with_entropy
        loss.backward()
        of_weight = weights.grad if parts is None else weights.main_grad - 1
        found.append([logprobs.detach()[1:], entropy.detach(), leaf.grad, of_weight])
    assert weights.grad_added_to_main_grad  # Megatron adds nothing more
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert float((mine - theirs).abs().max()) <= 3e-6 * float(theirs.abs().max())
    assert torch.equal(found[1][3][vocab:], torch.zeros(width - vocab, hidden))


@interpreted
def test_a_head_that_embeds_leaves_the_gradient_to_the_embedding(one_rank: None) -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.nn.Parameter(torch.randn(16, 8))
    weight.main_grad = torch.zeros(16, 8)  # type: ignore[attr-defined]
    logprobs, _ = KernelHead.apply(
        x, weight, torch.tensor([1, 2, 3]), torch.ones(3), 16, True, [slice(0, 3)]
    )
    logprobs.sum().backward()
    assert weight.grad is None and not hasattr(weight, "grad_added_to_main_grad")
    # Σ over columns of [j = l] − p_j is 0 in each row, so the gradient's rows add up to nothing
    assert float(weight.main_grad.sum(0).abs().max()) < 1e-5 < float(weight.main_grad.abs().max())


@pytest.mark.parametrize(
    ("gpu", "kib", "fits", "halves", "keys"),
    [
        ("H100", 227, {64, 80, 128}, {64, 80, 128, 256, 512}, 32),
        ("A100", 163, {64, 80, 128}, {64, 80, 128, 256}, 32),
        ("L40S", 99, {64}, {64, 80, 128, 256}, 16),
        ("T4", 64, set(), {64}, 16),
    ],
)
def test_torch_attends_where_tiles_do_not_fit(
    gpu: str, kib: int, fits: set[int], halves: set[int], keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = SimpleNamespace(shared_memory_per_block_optin=kib << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: room)

    def tiles(dim: int, **spec: bool) -> TileSizes | None:
        shape = SimpleNamespace(heads=8, kv_heads=2, head_dim=dim)
        return pipeline._tile_sizes(TrainerSpec(model="", **spec), shape, torch.device("meta"))  # type: ignore[arg-type]

    heads = (64, 80, 128, 256, 512)
    assert {dim for dim in heads if tiles(dim)} == fits
    assert {dim for dim in heads if tiles(dim, bf16=True)} == halves
    if 256 in halves:
        assert tiles(256, bf16=True) == TileSizes(4, rows=64, keys=keys, rows_kv=32, keys_kv=32)
        assert tiles(128, bf16=True) == TileSizes.of(4, 128, bf16=True)


def test_shapes_are_known_without_a_kernel() -> None:
    plan = plan_of([(20, -1), (9, 0)], TileSizes(2, **SMALL))
    q, k, v = (
        torch.empty(29, h, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for h in (4, 2, 2)
    )
    out = KernelAttention.apply(q, k, v, plan, 1.0)
    out.backward(torch.empty_like(out))
    assert [x.grad.shape for x in (q, k, v)] == [q.shape, k.shape, v.shape]
    assert (out.shape, out.dtype, q.grad.dtype) == (q.shape, torch.bfloat16, torch.bfloat16)


COMPILED = {
    "Qwen3 4B": (4, 128),
    "Qwen2.5 0.5B": (7, 64),
}  # heads that share a key/value head, and head_dim


@pytest.fixture(scope="module")
def measured() -> dict[str, list[dict[str, int]]]:
    """Of each model the three kernels as compiled, in a process whose Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = (
        "import json, sys; from tests.support.sm90 import head_kernels, tree_kernels\n"
        "found = {name: tree_kernels(*shape) for name, shape in json.loads(sys.argv[1]).items()}\n"
        "found['wide heads'] = tree_kernels(2, 256, capability=89, room=99)\n"
        "print(json.dumps({**found, 'head': head_kernels()}))"
    )
    command = [sys.executable, "-c", code, json.dumps(COMPILED)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("model", COMPILED)
def test_kernels_for_an_h200_keep_to_their_registers(
    model: str, measured: dict[str, list[dict[str, int]]]
) -> None:
    for kernel, most in zip(measured[model], (200, 200, 248), strict=True):
        assert kernel["spilled"] == 0 and kernel["registers"] <= most
        assert kernel["shared"] <= 160  # KiB of a multiprocessor's 227
        assert kernel["wgmma"] >= 16  # its tensor cores multiply


def test_heads_of_256_fit_an_l40s(measured: dict[str, list[dict[str, int]]]) -> None:
    assert (
        max(kernel["shared"] for kernel in measured["wide heads"])
        <= TileSizes.min_shared_memory_kib(256, bf16=True)
        <= 99
    )
    assert [kernel["spilled"] for kernel in measured["wide heads"]] == [0, 0, 0]


def test_the_head_spills_nothing_either(measured: dict[str, list[dict[str, int]]]) -> None:
    assert [kernel["spilled"] for kernel in measured["head"]] == [0, 0]
    assert (
        max(kernel["registers"] for kernel in measured["head"]) <= 64
    )  # four programs of 256 threads at a time


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_kernels_compute_what_torch_does_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    device = torch.device("cuda")
    for seed, (heads, kv_heads, dim) in itertools.product(range(4), ((32, 8, 128), (14, 2, 64))):
        segments = [(tokens * 20, parent) for tokens, parent in forest(seed)]
        tokens = sum(n for n, _ in segments)
        generator = torch.Generator().manual_seed(seed)
        q, slope, k, v = (
            torch.randn(tokens, h, dim, generator=generator)
            for h in (heads, heads, kv_heads, kv_heads)
        )
        sizes = TileSizes.of(heads // kv_heads, dim, dtype == torch.bfloat16)
        plan = upload(plan_of(segments, sizes), device)
        layout = PackedTrees.of([Segment(tokens=n, parent=p) for n, p in segments])
        on_gpu = [x.to(device, dtype) for x in (q, k, v)]
        got = results(
            lambda *x, plan=plan: KernelAttention.apply(*x, plan, 0.1),
            on_gpu,
            slope.to(device, dtype),
        )
        want = results(
            lambda *x, layout=layout: BlockAttention.apply(*x, layout, 0.1), [q, k, v], slope
        )
        for mine, theirs in zip(got, want, strict=True):
            assert float((mine.cpu().float() - theirs).abs().max()) <= tolerance * float(
                theirs.abs().max()
            )
