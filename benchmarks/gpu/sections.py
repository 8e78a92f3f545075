"""The sections of the kit: each prints figures as JSON lines. `python -m benchmarks.gpu.sections NAME [--tiny]`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.__main__ import RESULTS, ROOT, read
from benchmarks.gpu.checks import DIM, HEADS, KV_HEADS, attention_inputs, correctness, gradients
from benchmarks.gpu.generation import engine
from benchmarks.gpu.hand_over import hand_over
from benchmarks.gpu.machine import device, say, seconds, settle, start_trainer, stop_trainer
from benchmarks.gpu.shapes import CASES, LAYOUTS, TINY, of_case, operations

ADVERTISED = 989e12  # floating-point operations a second in bfloat16, what MFU is told of
ROOM = 0.96  # of a GPU's free memory may be filled: the allocator leaves gaps


def probe(tiny: bool) -> None:
    """The machine, and what its products, its memory and its launches reach: denominators of all that follows."""
    import importlib.metadata as metadata

    versions = {}
    for name in ("torch", "triton", "megatron-core", "transformer-engine", "sglang"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    say(
        gpu=gpu.name if gpu else None,
        gib=round(gpu.total_memory / 2**30) if gpu else None,
        **versions,
    )
    if gpu is None and not tiny:
        return
    size = 256 if tiny else 8192
    a, b = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in range(2))
    say(what="bf16 products, TFLOP/s", value=round(2 * size**3 / seconds(lambda: a @ b) / 1e12, 3))
    x = torch.empty((1 << 20) if tiny else (1 << 32), dtype=torch.uint8, device=device())
    y = torch.empty_like(x)
    say(
        what="copies, GB/s read and written",
        value=round(2 * x.nbytes / seconds(lambda: y.copy_(x)) / 1e9),
    )
    one, calls = torch.zeros(1, device=device()), 100 if tiny else 1000

    def launches() -> None:
        for _ in range(calls):
            one.add_(1)

    say(what="a launch, µs", value=round(seconds(launches) / calls * 1e6, 2))


def updates(tiny: bool) -> None:
    """Measure whole updates of published sizes: tokens a second, MFU, peak memory."""
    measure_updates(TINY if tiny else CASES)


def measure_updates(cases: Sequence[dict[str, Any]]) -> None:
    """Measure whole updates of the cases for which the GPU has memory by the meter's estimate."""
    predicted = read(RESULTS)
    for case in cases:
        wanted = (of_case(predicted, "meter", case) or {}).get("bytes", {}).get("peak", 0)
        if torch.cuda.is_available() and wanted > (room := ROOM * torch.cuda.mem_get_info()[0]):
            say(**case, skipped=f"needs {wanted / 2**30:.1f} GiB of {room / 2**30:.1f}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                _update(Path(folder), case)
            except torch.OutOfMemoryError as error:
                say(**case, failed=str(error).splitlines()[0])
            finally:
                stop_trainer()


def _update(folder: Path, case: dict[str, Any]) -> None:
    spec = {"bf16": device().type == "cuda", "recompute": case.get("recompute", "none")}
    trainer, batches = start_trainer(folder, case["model"], case["layout"], **spec)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    took = seconds(lambda: trainer.update(batches), repeats=3)
    flops = sum(operations(folder / case["model"], batch) for batch in batches)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    tokens = sum(len(batch.token_ids) for batch in batches)
    mfu = round(flops / took / ADVERTISED, 5)
    say(
        **case,
        seconds_per_update=round(took, 4),
        tokens_per_s=round(tokens / took),
        mfu=mfu,
        gib=peak and round(peak, 1),
    )


def attention(tiny: bool) -> None:
    """One layer's attention, forward and backward, in milliseconds: Triton's kernels, torch's calls."""
    from mcore_mas.megatron.model.block_attention import BlockAttention
    from mcore_mas.megatron.model.tree_ops import KernelAttention

    dtype, shape = (torch.float32, (4, 2, 16)) if tiny else (torch.bfloat16, (HEADS, KV_HEADS, DIM))
    for layout in ("small",) if tiny else ("groups", "turns", "branches", "long", "whole"):
        given, ours, theirs = attention_inputs(LAYOUTS[layout], dtype, shape)
        # wgmma then multiplies 64 and 128 columns at a time, not 32; but 40 bytes of registers are spilled, and more
        # of what nobody sees is multiplied
        _, wide, _ = attention_inputs(LAYOUTS[layout], dtype, shape, keys_kv=128)
        ways = {
            "triton_ms": lambda *x, plan=ours.plan: KernelAttention.apply(*x, plan, DIM**-0.5),
            "wide_ms": lambda *x, plan=wide.plan: KernelAttention.apply(*x, plan, DIM**-0.5),
            "torch_ms": lambda *x, layout=theirs: BlockAttention.apply(*x, layout, DIM**-0.5),
        }
        took = {
            name: round(1e3 * seconds(partial(gradients, way, given), 3), 3)
            for name, way in ways.items()
        }
        say(layout=layout, tokens=len(given[0]), **took)


def head(tiny: bool) -> None:
    """Log-probabilities of 14,336 rows and their gradients, in milliseconds by the size of a chunk of logits."""
    from mcore_mas.megatron.model import head
    from mcore_mas.megatron.spec import init_process_groups

    init_process_groups(rank=0, threads=torch.get_num_threads())
    rows, vocab = (64, 512) if tiny else (14_336, 151_936)
    dtype = torch.float32 if tiny else torch.bfloat16
    for hidden in (64,) if tiny else (896, 2560, 5120):
        x = torch.randn(rows, hidden, device=device(), dtype=dtype, requires_grad=True)
        weight = torch.nn.Parameter(
            torch.randn(vocab, hidden, device=device(), dtype=dtype) * hidden**-0.5
        )
        weight.main_grad = torch.zeros(vocab, hidden, device=device())  # type: ignore[attr-defined]
        labels = torch.randint(vocab, (rows,), device=device())
        temperatures = torch.ones(rows, device=device())

        def work(
            x: Tensor = x,
            weight: Tensor = weight,
            labels: Tensor = labels,
            t: Tensor = temperatures,
        ) -> None:
            logprobs, _ = head.logprobs_and_entropy(
                x, weight, labels, t, vocab, embeds=False, exact=False
            )
            logprobs.sum().backward()

        for mebibytes in (64, 512, 1024, 2048):
            head.CHUNK_BYTES[device().type] = mebibytes << 20
            say(hidden=hidden, chunk_mib=mebibytes, ms=round(1e3 * seconds(work, 3), 2))
    stop_trainer()


def profile(tiny: bool) -> None:
    """Where the time of an update goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorder

    with tempfile.TemporaryDirectory() as folder:
        model, layout = ("tiny", "small") if tiny else ("1.7b", "groups")
        trainer, batches = start_trainer(Path(folder), model, layout, bf16=device().type == "cuda")
        trainer.update(batches)
        kinds = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
        ]
        with recorder(activities=kinds) as found:
            trainer.update(batches)
            settle()
        key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        for row in sorted(found.key_averages(), key=lambda row: -getattr(row, key))[:25]:
            say(operation=row.key[:80], ms=round(getattr(row, key) / 1e3, 3), calls=row.count)
        stop_trainer()


def meter(tiny: bool) -> None:
    """What the meter predicts of the same updates; it needs no GPU, and must not see one."""
    cases = TINY if tiny else CASES
    again = [
        {**case, "updates": 2} for case in cases
    ]  # the second, which has Adam's moments from the start
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.support.fake_gpu",
        *map(json.dumps, again),
    ]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})


_ALL = (probe, correctness, updates, attention, head, hand_over, engine, profile, meter)
SECTIONS = {f.__name__: f for f in _ALL}


def main(name: str, *options: str) -> None:
    tiny = "--tiny" in options
    if not tiny and name not in ("probe", "meter"):
        if not torch.cuda.is_available():
            say(skipped="no GPU here; --tiny runs small shapes without one")
            return
        try:
            import triton  # noqa: F401
        except ImportError:
            say(skipped="no triton here: pip install triton")
            return
    SECTIONS[name](tiny)


if __name__ == "__main__":
    main(*sys.argv[1:])
