"""The sections of the kit: each prints figures as JSON lines. `python -m benchmarks.gpu.sections NAME [--tiny]`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.shapes import CASES, LAYOUTS, MODELS, make_batch, operations, write_model

ADVERTISED = 989e12  # floating-point operations a second in bfloat16, what MFU is told of
HEADS, KV_HEADS, DIM = 32, 8, 128


def say(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The median time of a call after one to warm up."""
    work()
    found = []
    for _ in range(repeats):
        settle()
        began = time.perf_counter()
        work()
        settle()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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
    say(gpu=gpu.name if gpu else None, gib=round(gpu.total_memory / 2**30) if gpu else None, **versions)
    if gpu is None and not tiny:
        return
    size = 256 if tiny else 8192
    a, b = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in range(2))
    say(what="bf16 products, TFLOP/s", value=round(2 * size**3 / seconds(lambda: a @ b) / 1e12, 3))
    x = torch.empty((1 << 20) if tiny else (1 << 32), dtype=torch.uint8, device=device())
    y = torch.empty_like(x)
    say(what="copies, GB/s read and written", value=round(2 * x.nbytes / seconds(lambda: y.copy_(x)) / 1e9))
    one, calls = torch.zeros(1, device=device()), 100 if tiny else 1000

    def launches() -> None:
        for _ in range(calls):
            one.add_(1)

    say(what="a launch, µs", value=round(seconds(launches) / calls * 1e6, 2))


def _attention_inputs(layout: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> tuple[list[Tensor], Any, Any]:
    """Queries, keys, values and a slope; Triton's layout and torch's."""
    from mcore_mas.megatron.batch import Segment
    from mcore_mas.megatron.device import upload
    from mcore_mas.megatron.model.layout import PackedTrees, TileSizes

    heads, kv_heads, dim = shape
    segments = [Segment(tokens=tokens, parent=parent) for tokens, parent, _ in LAYOUTS[layout]]
    tokens = sum(segment.tokens for segment in segments)
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(tokens, h, dim, generator=draw) for h in (heads, kv_heads, kv_heads, heads)]
    sizes = TileSizes.of(heads // kv_heads, dim, dtype == torch.bfloat16)
    ours = upload(PackedTrees.of(segments, sizes=sizes), device())
    return [x.to(device(), dtype) for x in given], ours, upload(PackedTrees.of(segments, device().type), device())


def _gradients(attend: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    *inputs, slope = given
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    out.backward(slope)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def correctness(tiny: bool) -> None:
    """Kernels against torch's on the same GPU, an update against itself, and what waits in it."""
    from mcore_mas.megatron.model.attention import _TreeAttention
    from mcore_mas.megatron.model.tree_ops import KernelAttention

    shape = (4, 2, 16) if tiny else (HEADS, KV_HEADS, DIM)
    for layout in ("small",) if tiny else ("small", "groups", "turns"):
        for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
            given, ours, theirs = _attention_inputs(layout, dtype, shape)
            got = _gradients(lambda *x, plan=ours.plan: KernelAttention.apply(*x, plan, DIM**-0.5), given)
            again = _gradients(lambda *x, plan=ours.plan: KernelAttention.apply(*x, plan, DIM**-0.5), given)
            want = _gradients(
                lambda *x, layout=theirs: _TreeAttention.apply(*x, layout, DIM**-0.5), [x.float() for x in given]
            )
            worst = max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
            same = all(map(torch.equal, got, again))
            say(what="attention", layout=layout, dtype=str(dtype)[6:], worst=worst, same_bits=same, ok=worst <= most)
    with tempfile.TemporaryDirectory() as folder:
        _update_twice(Path(folder))


def _update_twice(folder: Path) -> None:
    """The same update of the same weights is the same, sleeping between; and where its host waits."""
    norms = []
    for _ in range(2):
        trainer, batches = _trainer(folder, "tiny", "small", {"bf16": device().type == "cuda"}, count=2)
        trainer.sleep()
        trainer.wake()
        norms.append(trainer.update(batches)["grad_norm"])
        found: Counter[str] = Counter()
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                trainer.update(batches)
            torch.cuda.set_sync_debug_mode("default")
            found.update(f"{Path(w.filename).name}:{w.lineno}" for w in said if "synchroniz" in str(w.message))
        _stop()
    say(what="update", norms=norms, ok=norms[0] == norms[1] and norms[0] > 0, waits=dict(found))


def _trainer(folder: Path, model: str, layout: str, spec: dict[str, Any], *, count: int = 1) -> Any:
    from mcore_mas.megatron.spec import TrainerSpec, init_process_groups
    from mcore_mas.megatron.state import weight_import
    from mcore_mas.megatron.step.trainer import MegatronTrainer

    path = write_model(model, folder / model)
    init_process_groups(rank=0, threads=torch.get_num_threads())
    if torch.cuda.is_available():  # on the CPU, drawing billions of weights would take all of the time
        weight_import.RandomTensors._draw = (  # type: ignore[method-assign]
            lambda self, name: torch.randn(self.shapes[name], device="cuda").mul_(0.02).cpu()
        )
    trainer = MegatronTrainer(TrainerSpec(model=str(path), init="random", **spec))
    vocab = int(MODELS[model]["vocab_size"])
    return trainer, [make_batch(LAYOUTS[layout], vocab=vocab, seed=i) for i in range(count)]


def _stop() -> None:
    from mcore_mas.megatron.spec import destroy_process_groups

    destroy_process_groups()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def updates(tiny: bool) -> None:
    """Whole updates of published sizes: tokens a second, MFU, peak memory."""
    cases = [{"model": "tiny", "layout": "small"}] if tiny else CASES
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            try:
                _update(Path(folder), case)
            except torch.OutOfMemoryError as error:
                say(**case, failed=str(error).splitlines()[0])
            finally:
                _stop()


def _update(folder: Path, case: dict[str, Any]) -> None:
    spec = {"bf16": device().type == "cuda", "recompute": case.get("recompute", "none")}
    trainer, batches = _trainer(folder, case["model"], case["layout"], spec)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    took = seconds(lambda: trainer.update(batches), repeats=3)
    flops = sum(operations(folder / case["model"], batch) for batch in batches)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    tokens = sum(len(batch.token_ids) for batch in batches)
    mfu = round(flops / took / ADVERTISED, 5)
    say(**case, seconds_per_update=round(took, 4), tokens_per_s=round(tokens / took), mfu=mfu, gib=peak)


def attention(tiny: bool) -> None:
    """One layer's attention, forward and backward, in milliseconds: Triton's kernels, torch's calls."""
    from mcore_mas.megatron.model.attention import _TreeAttention
    from mcore_mas.megatron.model.tree_ops import KernelAttention

    dtype, shape = (torch.float32, (4, 2, 16)) if tiny else (torch.bfloat16, (HEADS, KV_HEADS, DIM))
    for layout in ("small",) if tiny else ("groups", "turns", "branches", "long", "whole"):
        given, ours, theirs = _attention_inputs(layout, dtype, shape)
        ways = {
            "triton_ms": lambda *x, plan=ours.plan: KernelAttention.apply(*x, plan, DIM**-0.5),
            "torch_ms": lambda *x, layout=theirs: _TreeAttention.apply(*x, layout, DIM**-0.5),
        }
        took = {name: round(1e3 * seconds(partial(_gradients, way, given), 3), 3) for name, way in ways.items()}
        say(layout=layout, tokens=len(given[0]), **took)


def head(tiny: bool) -> None:
    """Log-probabilities of 14,336 rows and their gradients, in milliseconds by the size of a chunk of logits."""
    from mcore_mas.megatron.model import decoder
    from mcore_mas.megatron.spec import init_process_groups

    init_process_groups(rank=0, threads=torch.get_num_threads())
    rows, vocab = (64, 512) if tiny else (14_336, 151_936)
    dtype = torch.float32 if tiny else torch.bfloat16
    for hidden in (64,) if tiny else (896, 2560, 5120):
        x = torch.randn(rows, hidden, device=device(), dtype=dtype, requires_grad=True)
        weight = torch.nn.Parameter(torch.randn(vocab, hidden, device=device(), dtype=dtype) * hidden**-0.5)
        weight.main_grad = torch.zeros(vocab, hidden, device=device())  # type: ignore[attr-defined]
        labels = torch.randint(vocab, (rows,), device=device())
        temperatures = torch.ones(rows, device=device())

        def work(x: Tensor = x, weight: Tensor = weight, labels: Tensor = labels, t: Tensor = temperatures) -> None:
            logprobs, _ = decoder.logprobs_and_entropy(x, weight, labels, t, vocab, embeds=False, exact=False)
            logprobs.sum().backward()

        for mebibytes in (64, 512, 1024, 2048):
            decoder._CHUNK_BYTES[device().type] = mebibytes << 20
            say(hidden=hidden, chunk_mib=mebibytes, ms=round(1e3 * seconds(work, 3), 2))
    _stop()


def profile(tiny: bool) -> None:
    """Where the time of an update goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorder

    with tempfile.TemporaryDirectory() as folder:
        model, layout = ("tiny", "small") if tiny else ("1.7b", "groups")
        trainer, batches = _trainer(Path(folder), model, layout, {"bf16": device().type == "cuda"})
        trainer.update(batches)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with recorder(activities=kinds) as found:
            trainer.update(batches)
            settle()
        key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        for row in sorted(found.key_averages(), key=lambda row: -getattr(row, key))[:25]:
            say(operation=row.key[:80], ms=round(getattr(row, key) / 1e3, 3), calls=row.count)
        _stop()


def meter(tiny: bool) -> None:
    """What the meter predicts of the same updates; it needs no GPU, and must not see one."""
    cases = [{"model": "tiny", "layout": "small"}] if tiny else CASES
    again = [{**case, "updates": 2} for case in cases]  # the second, which has Adam's moments from the start
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.fake_gpu", *map(json.dumps, again)]
    subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[2])


SECTIONS = {f.__name__: f for f in (probe, correctness, updates, attention, head, profile, meter)}


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
