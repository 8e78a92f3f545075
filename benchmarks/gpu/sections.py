"""Sections of the kit, each of which prints result lines: `python -m benchmarks.gpu.sections NAME [--tiny]`."""

from __future__ import annotations

import importlib.util
import json
import math
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
from benchmarks.gpu.checks import (
    DIM,
    HEADS,
    KV_HEADS,
    TINY_SHAPE,
    attention_inputs,
    correctness,
    gradients,
)
from benchmarks.gpu.generation import engine
from benchmarks.gpu.hand_over import hand_over
from benchmarks.gpu.machine import (
    device,
    median_seconds,
    say,
    start_trainer,
    stop_trainer,
    synchronize,
)
from benchmarks.gpu.shapes import CASES, LAYOUTS, TE_CASES, TINY, line_of_case, operations

PEAK_FLOPS = 989e12  # advertised operations per second in bfloat16, the denominator of MFU
USABLE_SHARE = 0.96  # usable share of a GPU's free memory, because the allocator leaves gaps
HEAD_ROWS = 14_336  # rows that the output layer is measured on


def probe(tiny: bool) -> None:
    """Describe the machine, and measure its matrix products, its memory and its kernel launches."""
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
    product_s = median_seconds(lambda: a @ b)
    say(what="bf16 products, TFLOP/s", value=round(2 * size**3 / product_s / 1e12, 3))
    copy_bytes = (1 << 20) if tiny else (1 << 32)
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    copy_s = median_seconds(lambda: target.copy_(source))
    say(what="copies, GB/s read and written", value=round(2 * copy_bytes / copy_s / 1e9))
    counter = torch.zeros(1, device=device())
    launches = 100 if tiny else 1000

    def launch() -> None:
        for _ in range(launches):
            counter.add_(1)

    say(what="a launch, µs", value=round(median_seconds(launch) / launches * 1e6, 2))


def updates(tiny: bool) -> None:
    """Measure whole updates of models of published sizes: tokens per second, MFU, peak memory."""
    measure_updates(TINY if tiny else CASES)


def measure_updates(cases: Sequence[dict[str, Any]]) -> None:
    """Measure whole updates; skip cases that need more memory than the GPU has, by the estimate.

    The estimates are those of the section `meter` in benchmarks/gpu/results.jsonl.
    """
    earlier_lines = read(RESULTS)
    for case in cases:
        estimate = line_of_case(earlier_lines, "meter", case) or {}
        needed = estimate.get("bytes", {}).get("peak", 0)
        usable = math.inf
        if torch.cuda.is_available():
            free, _ = torch.cuda.mem_get_info()
            usable = USABLE_SHARE * free
        if needed > usable:
            say(**case, skipped=f"needs {needed / 2**30:.1f} GiB of {usable / 2**30:.1f}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                _measure_update(Path(folder), case)
            except torch.OutOfMemoryError as error:
                say(**case, failed=str(error).splitlines()[0])
            finally:
                stop_trainer()


def _measure_update(folder: Path, case: dict[str, Any]) -> None:
    spec = {
        "bf16": device().type == "cuda",
        "recompute": case.get("recompute", "none"),
        "layers": case.get("layers", "local"),
        "fp8": case.get("fp8"),
    }
    trainer, batches = start_trainer(folder, case["model"], case["layout"], **spec)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    update_s = median_seconds(lambda: trainer.update(batches), repeats=3)
    flops = sum(operations(folder / case["model"], batch) for batch in batches)
    tokens = sum(len(batch.token_ids) for batch in batches)
    peak_gib = None
    if torch.cuda.is_available():
        peak_gib = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    say(
        **case,
        seconds_per_update=round(update_s, 4),
        tokens_per_s=round(tokens / update_s),
        mfu=round(flops / update_s / PEAK_FLOPS, 5),
        gib=peak_gib,
    )


def transformer_engine(tiny: bool) -> None:
    """Measure updates with the layers of Transformer Engine, in bfloat16 and in FP8.

    The section `updates` measures the same cases with Megatron's own layers. A CPU has no FP8.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        say(skipped="no Transformer Engine here (requirements/transformer_engine.sh)")
        return
    base_cases = TINY if tiny else TE_CASES
    cases = [{**case, "layers": "te", "fp8": None} for case in base_cases]
    measure_updates(cases)
    if device().type == "cuda":
        measure_updates([{**case, "fp8": "hybrid"} for case in cases])


def attention(tiny: bool) -> None:
    """Measure the attention of one layer, forward and backward: Triton's kernels, and PyTorch's calls."""
    from mcore_mas.megatron.model.block_attention import BlockAttention
    from mcore_mas.megatron.model.tree_ops import KernelAttention

    dtype = torch.float32 if tiny else torch.bfloat16
    shape = TINY_SHAPE if tiny else (HEADS, KV_HEADS, DIM)
    layouts = ["small"] if tiny else ["groups", "turns", "branches", "long", "whole"]
    for layout in layouts:
        forest = LAYOUTS[layout]
        inputs, triton_layout, torch_layout = attention_inputs(forest, dtype, shape)
        # With narrow tiles, fewer of the masked pairs are multiplied, but two groups of warps
        # compute the same scores.
        _, narrow_layout, _ = attention_inputs(forest, dtype, shape, keys_kv=64)

        def attend_triton(*arguments: Tensor, plan: Any) -> Tensor:
            return KernelAttention.apply(*arguments, plan, DIM**-0.5)

        def attend_torch(*arguments: Tensor, layout: Any) -> Tensor:
            return BlockAttention.apply(*arguments, layout, DIM**-0.5)

        functions = {
            "triton_ms": partial(attend_triton, plan=triton_layout.block_plan),
            "narrow_ms": partial(attend_triton, plan=narrow_layout.block_plan),
            "torch_ms": partial(attend_torch, layout=torch_layout),
        }
        milliseconds = {
            name: round(1e3 * median_seconds(partial(gradients, function, inputs), repeats=3), 3)
            for name, function in functions.items()
        }
        say(layout=layout, tokens=len(inputs[0]), **milliseconds)


def head(tiny: bool) -> None:
    """Measure the output layer, forward and backward, on `HEAD_ROWS` rows, by size of a chunk of logits.

    With `one_pass`, logits are computed once, as in updates whose loss is a sum over tokens.
    """
    from mcore_mas.megatron.model import head as output_layer
    from mcore_mas.megatron.spec import init_process_groups

    init_process_groups(rank=0, threads=torch.get_num_threads())
    rows, vocab = (64, 512) if tiny else (HEAD_ROWS, 151_936)
    dtype = torch.float32 if tiny else torch.bfloat16
    hidden_sizes = [64] if tiny else [896, 2560, 5120]
    for hidden in hidden_sizes:
        x = torch.randn(rows, hidden, device=device(), dtype=dtype, requires_grad=True)
        drawn_weight = torch.randn(vocab, hidden, device=device(), dtype=dtype)
        weight = torch.nn.Parameter(drawn_weight * hidden**-0.5)
        weight.main_grad = torch.zeros(vocab, hidden, device=device())  # type: ignore[attr-defined]
        labels = torch.randint(vocab, (rows,), device=device())
        temperatures = torch.ones(rows, device=device())

        def gradients_of_sum(
            logprobs: Tensor, _entropies: Tensor, _rows: slice
        ) -> tuple[Tensor, None]:
            return torch.ones_like(logprobs), None

        def compute(
            x: Tensor = x,
            weight: Tensor = weight,
            labels: Tensor = labels,
            temperatures: Tensor = temperatures,
            *,
            one_pass: bool,
        ) -> None:
            logprobs, _ = output_layer.logprobs_and_entropy(
                x,
                weight,
                labels,
                temperatures,
                vocab,
                is_embedding=False,
                exact=False,
                row_gradients=gradients_of_sum if one_pass else None,
            )
            logprobs.sum().backward()

        for one_pass, sizes in ((True, (512, 1024, 2048)), (False, (64, 512, 1024, 2048))):
            for mebibytes in sizes:
                output_layer.CHUNK_BYTES[device().type] = mebibytes << 20
                seconds = median_seconds(partial(compute, one_pass=one_pass), repeats=3)
                say(
                    hidden=hidden,
                    chunk_mib=mebibytes,
                    one_pass=one_pass,
                    ms=round(1e3 * seconds, 2),
                )
    stop_trainer()


def profile(tiny: bool) -> None:
    """Print the 25 operations of an update that take most time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as start_profiler

    is_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU]
    time_attribute = "self_cpu_time_total"
    if is_gpu:
        activities.append(ProfilerActivity.CUDA)
        time_attribute = "self_device_time_total"
    model, layout = ("tiny", "small") if tiny else ("1.7b", "groups")
    with tempfile.TemporaryDirectory() as folder:
        trainer, batches = start_trainer(Path(folder), model, layout, bf16=device().type == "cuda")
        trainer.update(batches)
        with start_profiler(activities=activities) as profiler:
            trainer.update(batches)
            synchronize()
        averages = profiler.key_averages()
        for row in sorted(averages, key=lambda row: -getattr(row, time_attribute))[:25]:
            milliseconds = round(getattr(row, time_attribute) / 1e3, 3)
            say(operation=row.key[:80], ms=milliseconds, calls=row.count)
        stop_trainer()


def meter(tiny: bool) -> None:
    """Estimate time and memory of the updates that section `updates` measures, with a simulated GPU.

    `tests.support.fake_gpu` estimates the last update of a case in a process of its own.
    """
    # Two updates, because Adam's moments are allocated in the first one.
    base_cases = TINY if tiny else CASES
    cases = [{**case, "updates": 2} for case in base_cases]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.fake_gpu"]
    command += map(json.dumps, cases)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, check=True, cwd=ROOT, env=environment)


_ALL = (
    probe,
    correctness,
    updates,
    transformer_engine,
    attention,
    head,
    hand_over,
    engine,
    profile,
    meter,
)
SECTIONS = {section.__name__: section for section in _ALL}


def main(name: str, *options: str) -> None:
    """Run a section, or print the reason why it cannot run on this machine."""
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
