"""Whether a GPU computes what it should: each check is a line that says `ok`, and how far apart two results are."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.__main__ import ROOT
from benchmarks.gpu.machine import device, say, start_trainer, stop_trainer
from benchmarks.gpu.shapes import LAYOUTS, Forest

HEADS, KV_HEADS, DIM = 32, 8, 128
# where an update of one agent waits: for its statistics, for its gradient's norm, and when it clips
WAITS = Counter({"transfer.py": 1, "clip_grads.py": 2})
# between log-probabilities of bfloat16 and of float32 by quantile, at most: twice what a CPU has for this model
GAPS = {0.5: 0.015, 0.99: 0.06, 0.999: 0.07}


def correctness(tiny: bool) -> None:
    """Kernels against plain torch, updates against the same of another kind, and where they wait."""
    _attention_against_torch(tiny)
    _attention_against_dense(tiny)
    _norm_against_torch(tiny)
    _head_against_dense(tiny)
    for check in (_updates_of_one_kind, partial(_update_of_the_cpu, "tiny"), _bfloat16):
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder), tiny)
    with tempfile.TemporaryDirectory() as folder:
        _update_of_the_cpu("tiny-moe", Path(folder), tiny)


def attention_inputs(
    forest: Forest, dtype: torch.dtype, shape: tuple[int, int, int], **tiles: int
) -> tuple[list[Tensor], Any, Any]:
    """Queries, keys, values and a slope; Triton's layout, with other sizes of `tiles` if given, and torch's."""
    from mcore_mas.megatron.batch import Segment
    from mcore_mas.megatron.model.layout import PackedTrees, TileSizes
    from mcore_mas.megatron.transfer import upload

    heads, kv_heads, dim = shape
    segments = [Segment(tokens=tokens, parent=parent) for tokens, parent, _ in forest]
    tokens = sum(segment.tokens for segment in segments)
    draw = torch.Generator().manual_seed(0)
    given = [
        torch.randn(tokens, h, dim, generator=draw) for h in (heads, kv_heads, kv_heads, heads)
    ]
    sizes = replace(TileSizes.of(heads // kv_heads, dim, dtype == torch.bfloat16), **tiles)
    ours = upload(PackedTrees.of(segments, sizes=sizes), device())
    return (
        [x.to(device(), dtype) for x in given],
        ours,
        upload(PackedTrees.of(segments, device().type), device()),
    )


def gradients(attend: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """What comes out of attention, and the gradients of what goes in."""
    *inputs, slope = given
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    out.backward(slope)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def _apart(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest difference, as a share of the largest element of the same tensor."""
    return max(
        float((a.float() - b.float()).abs().max() / b.abs().max())
        for a, b in zip(got, want, strict=True)
    )


def _attention_against_torch(tiny: bool) -> None:
    from mcore_mas.megatron.model.block_attention import BlockAttention
    from mcore_mas.megatron.model.tree_ops import KernelAttention

    shape = (4, 2, 16) if tiny else (HEADS, KV_HEADS, DIM)
    for layout in ("small",) if tiny else ("small", "groups", "turns"):
        for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
            given, ours, theirs = attention_inputs(LAYOUTS[layout], dtype, shape)
            got, again = (
                gradients(
                    lambda *x, plan=ours.plan: KernelAttention.apply(*x, plan, DIM**-0.5), given
                )
                for _ in "12"
            )
            want = gradients(
                lambda *x, layout=theirs: BlockAttention.apply(*x, layout, DIM**-0.5),
                [x.float() for x in given],
            )
            worst, same = _apart(got, want), all(map(torch.equal, got, again))
            ok = worst <= most and same
            say(
                what="attention",
                layout=layout,
                dtype=str(dtype)[6:],
                worst=worst,
                same_bits=same,
                ok=ok,
            )


def _attention_against_dense(tiny: bool) -> None:
    """The kernel against torch's attention over a mask of every pair of tokens."""
    from mcore_mas.megatron.model.tree_ops import KernelAttention

    shape = (4, 2, 16) if tiny else (8, 2, DIM)
    for layout, forest in {
        "small": LAYOUTS["small"],
        "first of turns": LAYOUTS["turns"][: 1 if tiny else 65],
    }.items():
        given, ours, _ = attention_inputs(forest, torch.float32, shape)
        mask = _mask(forest).to(device())

        def dense(*x: Tensor, mask: Tensor = mask) -> Tensor:
            q, k, v = (
                y.repeat_interleave(shape[0] // y.shape[1], 1).transpose(0, 1)[None] for y in x
            )
            return F.scaled_dot_product_attention(q, k, v, mask, scale=DIM**-0.5)[0].transpose(0, 1)

        got = gradients(
            lambda *x, plan=ours.plan: KernelAttention.apply(*x, plan, DIM**-0.5), given
        )
        worst = _apart(got, gradients(dense, given))
        say(what="attention, dense", layout=layout, tokens=len(mask), worst=worst, ok=worst <= 1e-4)


def _mask(forest: Forest) -> Tensor:
    """Which tokens each attends to [T, T]: those before it in its segment, and all of the segments above."""
    starts = torch.tensor([0, *(tokens for tokens, _, _ in forest)]).cumsum(0).tolist()
    mask = torch.zeros(starts[-1], starts[-1], dtype=torch.bool)
    for number, (tokens, above, _) in enumerate(forest):
        own = slice(starts[number], starts[number + 1])
        mask[own, own] = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        while above >= 0:
            mask[own, starts[above] : starts[above + 1]] = True
            above = forest[above][1]
    return mask


def _norm_against_torch(tiny: bool) -> None:
    """Norms of keys and of hidden states against torch's in float64."""
    from mcore_mas.megatron.model.layer_ops import KernelNorm

    for rows, width in ((9, 16), (5, 64)) if tiny else ((131_072, 128), (16_384, 2560)):
        for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            given = [torch.randn(shape) for shape in ((rows, width), width, (rows, width))]
            ours, theirs = (
                [x.to(device(), dtype).to(one) for x in given] for one in (dtype, torch.float64)
            )
            got, again = (gradients(lambda x, w: KernelNorm.apply(x, w, 1e-6), ours) for _ in "12")
            want = gradients(lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), theirs)
            worst, same = _apart(got, want), all(map(torch.equal, got, again))
            ok = worst <= most and same
            say(what="norm", width=width, dtype=str(dtype)[6:], worst=worst, same_bits=same, ok=ok)


def _head_against_dense(tiny: bool) -> None:
    """Log-probabilities, entropies and gradients of a head in three chunks, of all logits at once in float32."""
    from mcore_mas.megatron.model import head
    from mcore_mas.megatron.spec import init_process_groups

    init_process_groups(rank=0, threads=torch.get_num_threads())
    rows, hidden, held = (60, 64, 512) if tiny else (1536, 1024, 32_768)
    vocab = held - 12  # the rest is padding
    labels = torch.randint(vocab, (rows,)).to(device())
    temperatures, *slopes = (torch.rand(rows).add(0.5).to(device()) for _ in range(3))
    for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        x = torch.randn(rows, hidden).to(device(), dtype).requires_grad_()
        weight = torch.nn.Parameter(
            (torch.randn(held, hidden) * 2 * hidden**-0.5).to(device(), dtype)
        )
        weight.main_grad = torch.zeros(held, hidden, device=device())  # type: ignore[attr-defined]
        wanted = [y.detach().float().requires_grad_() for y in (x, weight)]
        with patch.dict(head.CHUNK_BYTES, dict.fromkeys(("cpu", "cuda"), 4 * held * rows // 3)):
            got = head.logprobs_and_entropy(
                x, weight, labels, temperatures, vocab, embeds=False, exact=False
            )
            torch.autograd.backward(got, slopes)
        logs = ((wanted[0] @ wanted[1].t())[:, :vocab] / temperatures[:, None]).log_softmax(-1)
        want = logs.gather(1, labels[:, None])[:, 0], -(logs * logs.exp()).sum(-1)
        torch.autograd.backward(want, slopes)
        outputs = (*got, x.grad, weight.main_grad)  # type: ignore[attr-defined]
        references = (*want, *(y.grad for y in wanted))
        pairs = zip(outputs, references, strict=True)
        worst = [_apart([a.detach()], [b.detach()]) for a, b in pairs]
        ok = max(worst) <= most
        say(
            what="head",
            dtype=str(dtype)[6:],
            **dict(zip(("logprobs", "entropies", "of_x", "of_weight"), worst, strict=True)),
            ok=ok,
        )
    stop_trainer()


def _updates_of_one_kind(folder: Path, _: bool) -> None:
    """Two updates are the same again, after sleep, and after a restart from what was saved between; and their waits."""
    wanted, weights, waits = _two_updates(folder, "saves")
    for how in ("again", "sleeps", "restores"):
        norms, got, _ = _two_updates(folder, how)
        ok = (
            norms == wanted[-len(norms) :]
            and min(norms) > 0
            and all(map(torch.equal, got, weights))
        )
        say(what=f"update, {how}", norms=norms, ok=ok)
    if torch.cuda.is_available():
        say(what="waits", **waits, ok=len(waits) > 0 and _by_file(waits) <= WAITS)


def _two_updates(folder: Path, how: str) -> tuple[list[float], list[Tensor], Counter[str]]:
    """Gradient norms of two updates, the weights after them, and where the second waits."""
    trainer, batches = start_trainer(folder, "tiny", "small", count=2, bf16=device().type == "cuda")
    norms, waits = [], Counter[str]()
    if how == "restores":
        trainer.restore(folder / "saved")
    for _ in range(trainer.updates, 2):
        if how == "sleeps":
            trainer.sleep()
            trainer.wake()
        waits.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("warn")
            norms.append(trainer.update(batches)["grad_norm"])
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")
        waits.update(
            f"{Path(w.filename).name}:{w.lineno}" for w in said if "synchroniz" in str(w.message)
        )
        if how == "saves" and trainer.updates == 1:
            trainer.save(folder / "saved")
            trainer.written()
    weights = [tensor.detach().cpu().clone() for tensor in trainer.model.tensors.values()]
    stop_trainer()
    return norms, weights, waits


def _by_file(waits: Counter[str]) -> Counter[str]:
    found = Counter[str]()
    for place, count in waits.items():
        found[place.partition(":")[0]] += count
    return found


def _update_of_the_cpu(model: str, folder: Path, _: bool) -> None:
    """Log-probabilities and gradients in float32, against a process that sees no GPU."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.checks", str(folder), model]
    subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, cwd=ROOT)
    want, got = torch.load(folder / "found", weights_only=True), _float32(folder, model)
    for what in ("logprobs", "gradients"):
        worst = _apart(got[what], want[what])
        say(what=f"update, {what} of the CPU", model=model, worst=worst, ok=worst <= 1e-4)


def _float32(folder: Path, model: str) -> dict[str, list[Tensor]]:
    trainer, batches = start_trainer(folder, model, "small", count=2)
    logprobs = trainer.score(batches)
    trainer.update(batches)
    found = [p.main_grad.detach().cpu().clone() for p in trainer.model.parameters.values()]
    stop_trainer()
    return {"logprobs": logprobs, "gradients": found}


def _bfloat16(folder: Path, tiny: bool) -> None:
    """How far bfloat16's log-probabilities are from float32's, over 100,000 tokens."""
    model, layout, count = ("tiny", "small", 1) if tiny else ("0.5b", "groups", 7)
    said = []
    for bf16 in (False, True):
        trainer, batches = start_trainer(folder, model, layout, count=count, bf16=bf16)
        said.append(torch.cat(trainer.score(batches)))
        del trainer
        stop_trainer()
    gap = (said[1] - said[0]).abs()
    found = {str(q): round(float(gap.quantile(q)), 6) for q in GAPS}
    ok = all(found[str(q)] <= most for q, most in GAPS.items())
    say(
        what="bfloat16",
        tokens=len(gap),
        **found,
        mean=round(float(gap.mean()), 6),
        most=float(gap.max()),
        ok=ok,
    )


if __name__ == "__main__":
    torch.save(_float32(Path(sys.argv[1]), sys.argv[2]), Path(sys.argv[1]) / "found")
