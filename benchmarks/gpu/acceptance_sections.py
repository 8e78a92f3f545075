"""Sections of the acceptance test; each prints result lines, with `ok` for a check that passed, or raises."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata as metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from benchmarks.gpu.__main__ import read
from benchmarks.gpu.machine import say, synchronize
from benchmarks.gpu.shapes import LAYOUTS, make_batch, write_model
from rollout.engines.sglang.nccl import nccl_mismatch
from rollout.engines.sglang.settings import SGLangSettings

ALL_REDUCE_MIB = 256
ALL_REDUCES = 5  # measured calls
# Layouts of two ranks. Their gradient norm equals that of one rank, up to the order of sums and TF32.
PARALLEL_LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2, sp": {"tp": 2, "sp": True},
    "pp 2": {"pp": 2},
    "cp 2": {"cp": 2},
    "dp 2, distributed optimizer": {"dp": 2, "distributed_optimizer": True, "overlap": True},
}
# Largest accepted relative difference of gradient norms.
NORM_TOLERANCE = 1e-3
TE_NORM_TOLERANCE = 5e-2
# Number of GPUs and settings of a training, by transport. "tensor" trains on one GPU, but afterwards
# each of the two policies is evaluated on a separate server.
PLACEMENTS: dict[str, tuple[int, list[str]]] = {
    "disk": (5, ["cluster.pool=split", "policies.solver.tp=2"]),
    "distributed": (5, ["cluster.pool=split", "policies.solver.tp=2"]),
    "tensor": (
        2,
        ["cluster.pool=shared", "policies.solver.tp=1", "+engine.options.mem-fraction-static=0.3"],
    ),
}
# Settings of a small training, with attention heads of 64, as kernels on a GPU need.
SMALL = [
    "data.train=64",
    "data.validation=8",
    "data.test=8",
    "trainer.steps=2",
    "trainer.tasks_per_step=4",
    "cluster.device=auto",
    "trainer.checkpoint_every=2",
    "trainer.validate_every=2",
    "cold_start.base.heads=4",
    "cold_start.base.hidden=256",
    "cold_start.base.kv_heads=2",
    "engine.max_length=512",
]
PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "transformer-engine",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
)


class Skip(Exception):
    """Reason why a section cannot run on this machine."""


def devices(options: argparse.Namespace, minimum: int) -> int:
    """Return the number of ranks: one per GPU, or two on the CPU.

    Raises:
        Skip: there are fewer GPUs than the minimum.
    """
    if options.cpu:
        return 2
    gpus = torch.cuda.device_count()
    if gpus < minimum:
        raise Skip(f"it needs {minimum} GPUs, and there are {gpus}")
    return gpus


def machine(_: argparse.Namespace) -> None:
    """Print the GPUs and the versions of packages."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    say(gpus=gpus, cuda=torch.version.cuda, **versions)


def nccl(options: argparse.Namespace) -> None:
    """Check and measure an all-reduce over all GPUs."""
    ranks = devices(options, 2)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, folder, options.cpu)
        start_method = "fork" if options.cpu else "spawn"  # CUDA does not work in forks
        start_processes(_all_reduce, arguments, nprocs=ranks, start_method=start_method)
        say(**json.loads((Path(folder) / "result.json").read_text()))


def _all_reduce(rank: int, ranks: int, folder: str, cpu: bool) -> None:
    store = dist.FileStore(f"{folder}/store", ranks)  # type: ignore[attr-defined]
    device = torch.device("cpu") if cpu else torch.device("cuda", rank)
    if not cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if cpu else "nccl", rank=rank, world_size=ranks, store=store)
    elements = (1 if cpu else ALL_REDUCE_MIB) << 18
    x = torch.full((elements,), float(rank + 1), device=device)
    dist.all_reduce(x)
    expected = ranks * (ranks + 1) // 2  # 1 + 2 + ... + ranks
    is_correct = bool((x == expected).all())
    synchronize()
    began = time.perf_counter()
    for _ in range(ALL_REDUCES):
        dist.all_reduce(x)
    synchronize()
    seconds = (time.perf_counter() - began) / ALL_REDUCES
    dist.destroy_process_group()
    assert is_correct, f"rank {rank}: the sum of 1 to {ranks} is not {expected}"
    if rank == 0:
        # A ring sends each byte 2 (n - 1) / n times.
        rate = 2 * (ranks - 1) / ranks * x.nbytes / seconds / 1e9
        result = {"what": "all-reduce, GB/s", "ranks": ranks, "value": round(rate, 2), "ok": True}
        Path(folder, "result.json").write_text(json.dumps(result))


def layouts(options: argparse.Namespace) -> None:
    """Compare updates of layouts over two GPUs with those of one GPU, also after a restart from its checkpoint."""
    devices(options, 2)
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_model("tiny", Path(folder) / "tiny"))
        first, second = _gradient_norms(model, folder, save=True)
        for name, layout in PARALLEL_LAYOUTS.items():
            norm = _gradient_norms(model, folder, **layout)[0]
            _check_norm(name, norm, first, NORM_TOLERANCE)
            (resumed,) = _gradient_norms(model, folder, restore=True, **layout)
            _check_norm(f"{name}, resumed", resumed, second, NORM_TOLERANCE)


def te(options: argparse.Namespace) -> None:
    """Compare an update with Transformer Engine's layers with one with Megatron's."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise Skip("no Transformer Engine here (requirements/transformer_engine.sh)")
    devices(options, 1)
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_model("tiny", Path(folder) / "tiny"))
        megatron_norm = _gradient_norms(model, folder, bf16=True)[0]
        te_norm = _gradient_norms(model, folder, bf16=True, layers="te")[0]
        _check_norm("layers te", te_norm, megatron_norm, TE_NORM_TOLERANCE)


def _check_norm(label: str, norm: float, expected: float, tolerance: float) -> None:
    difference = abs(norm / expected - 1)
    assert difference <= tolerance, f"{label}: gradient norm {norm:g} and not {expected:g}"
    say(what=f"gradient norm, {label}", apart=round(difference, 9), ok=True)


def _gradient_norms(
    model: str, folder: str, *, save: bool = False, restore: bool = False, **spec: Any
) -> list[float]:
    """Run two updates in processes of their own, and return their gradient norms.

    Args:
        model: folder of the model.
        folder: folder for the results and the checkpoint.
        save: save a checkpoint after the first update.
        restore: run the second update alone, from that checkpoint.
        spec: fields of `TrainerSpec`.
    """
    ranks = spec.get("tp", 1) * spec.get("pp", 1) * spec.get("cp", 1) * spec.get("dp", 1)
    out = Path(tempfile.mkdtemp(dir=folder))
    checkpoint = str(Path(folder) / "saved")
    arguments = (
        model,
        str(out),
        checkpoint if save else None,
        checkpoint if restore else None,
        spec,
    )
    start_processes(_run_updates, arguments, nprocs=ranks, start_method="spawn")
    norms: list[float] = json.loads((out / "norms").read_text())
    return norms


def _run_updates(
    rank: int,
    model: str,
    folder: str,
    save_to: str | None,
    restore_from: str | None,
    changes: Mapping[str, Any],
) -> None:
    from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
    from mcore_mas.megatron.step.trainer import MegatronTrainer

    # With this learning rate the second update differs from the first.
    spec = TrainerSpec(model=model, init="random", lr=1e-2, **changes)
    store = dist.FileStore(f"{folder}/store", spec.ranks)  # type: ignore[attr-defined]
    init_process_groups(spec, rank=rank, threads=1, store=store)
    batches = [make_batch(LAYOUTS["small"], vocab=512, seed=i) for i in range(2)]
    trainer = MegatronTrainer(spec)
    norms = []
    if restore_from:
        trainer.restore(Path(restore_from))
    while trainer.updates < 2:
        norms.append(trainer.update(batches)["grad_norm"])
        if save_to and trainer.updates == 1:
            trainer.save(Path(save_to))
            trainer.wait_written()
    destroy_process_groups()
    if rank == 0:
        Path(folder, "norms").write_text(json.dumps(norms))


def _sglang_python(options: argparse.Namespace) -> Path:
    """Return the Python of SGLang's environment; raise Skip without one, or on the CPU."""
    if not options.sglang.is_file():
        raise Skip(
            f"no SGLang environment at {options.sglang} (docs/engines.md makes one; --sglang names "
            "another)"
        )
    if options.cpu:
        raise Skip("on a CPU `make test-sglang` runs it")
    python: Path = options.sglang
    return python


def sglang(options: argparse.Namespace) -> None:
    """Check that a server starts on a GPU and answers, and that its NCCL is the trainer's."""
    from rollout.engines.sglang.engine import SGLangEngine
    from rollout.records.trajectory import Sampling

    devices(options, 1)
    python = _sglang_python(options)
    mismatch = nccl_mismatch(python)
    assert mismatch is None, mismatch
    max_tokens = 8
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        _save_small_model(model)
        settings = SGLangSettings(
            folder=model,
            max_length=128,
            python=str(python),
            log=Path(folder) / "server.log",
            compare_servers=False,
        )
        began = time.perf_counter()
        engine = SGLangEngine(settings)
        try:
            reply = asyncio.run(engine.generate([1, 2, 3], Sampling(max_tokens=max_tokens)))
        finally:
            engine.close()
        seconds = time.perf_counter() - began
        assert 1 <= len(reply.token_ids) <= max_tokens, (
            f"{len(reply.token_ids)} tokens, expected 1 to {max_tokens}"
        )
        say(what="a first reply, s", value=round(seconds, 1), ok=True)


def _save_small_model(folder: Path) -> None:
    import transformers

    config = transformers.Qwen2Config(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        vocab_size=512,
        max_position_embeddings=1024,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def training(options: argparse.Namespace, transport: str) -> None:
    """Train two policies for two steps, with weights sent to their servers by a transport."""
    minimum, placement = PLACEMENTS[transport]
    devices(options, minimum)
    python = _sglang_python(options)
    command = [sys.executable, "-m", "mcore_mas", "run", "demo_math"]
    command += ["engine=sglang", f"engine.python={python}", f"engine.transport={transport}"]
    command += [*SMALL, *placement, "--cores", "all", "--quiet", "all"]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - began
        run = Path(folder) / "results" / "demo_math"
        output = " ".join((process.stderr or process.stdout).split())[-300:]
        is_finished = process.returncode == 0 and (run / "train" / "done.json").is_file()
        assert is_finished, f"exit status {process.returncode}: {output}"
        steps = [line for line in read(run / "train" / "metrics.jsonl") if "step" in line]

    hand_over_times: list[float] = []
    for line in steps:
        hand_over_times += [value for key, value in line.items() if key.endswith("hand_over_s")]
    assert hand_over_times, (
        "no policy was updated, so no weights were handed over; see metrics.jsonl"
    )
    say(
        what="a training of two policies, s",
        transport=transport,
        value=round(seconds, 1),
        steps=len(steps),
        ok=True,
    )
    say(
        what="hand-over, s",
        transport=transport,
        value=statistics.median(hand_over_times),
        most=max(hand_over_times),
        times=len(hand_over_times),
    )


SECTIONS: dict[str, Callable[..., None]] = {
    section.__name__: section for section in (machine, nccl, layouts, te, sglang, training)
}


def main() -> None:
    """Run a section, or print the reason why it cannot run on this machine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--sglang", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if options.section != "machine" and not options.cpu and not torch.cuda.is_available():
        say(skipped="no GPU here")
        return
    try:
        SECTIONS[options.section](options, *options.arguments)
    except Skip as reason:
        say(skipped=str(reason))


if __name__ == "__main__":
    main()
