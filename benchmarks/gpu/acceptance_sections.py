"""The sections of the acceptance: each prints findings as JSON lines, `ok` where one has passed, or raises."""

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
from benchmarks.gpu.machine import say, settle
from benchmarks.gpu.shapes import LAYOUTS, make_batch, write_model
from rollout.engines.sglang.nccl import nccl_mismatch
from rollout.engines.sglang.settings import SGLangSettings

MEBIBYTES = 256  # that all ranks add up
# of two ranks each; their gradient norm is that of one rank, in float32 up to the order of sums and TF32
CUTS: dict[str, dict[str, Any]] = {
    "tp 2, sp": {"tp": 2, "sp": True},
    "pp 2": {"pp": 2},
    "cp 2": {"cp": 2},
    "dp 2, distributed optimizer": {"dp": 2, "distributed_optimizer": True, "overlap": True},
}
NEAR, NEAR_TE = 1e-3, 5e-2
# of a training by each transport: where its processes are, and how many GPUs they take
PLACES: dict[str, tuple[int, list[str]]] = {
    "disk": (5, ["cluster.pool=split", "policies.solver.tp=2"]),
    "distributed": (5, ["cluster.pool=split", "policies.solver.tp=2"]),
    # which trains on one; afterwards each of the two policies is evaluated on a server of its own
    "tensor": (
        2,
        ["cluster.pool=shared", "policies.solver.tp=1", "+engine.options.mem-fraction-static=0.3"],
    ),
}
SMALL = [
    "data.train=64",
    "data.validation=8",
    "data.test=8",
    "trainer.steps=2",
    "trainer.tasks_per_step=4",
]
SMALL += [
    "cluster.device=auto",
    "trainer.checkpoint_every=2",
    "trainer.validate_every=2",
    "cold_start.base.heads=4",
]
SMALL += [
    "cold_start.base.hidden=256",
    "cold_start.base.kv_heads=2",
    "engine.max_length=512",
]  # heads of 64, as GPUs want


class Skip(Exception):
    """Why a section cannot run here."""


def devices(given: argparse.Namespace, least: int) -> int:
    """How many ranks there may be: the GPUs, or of CPUs two."""
    if given.cpu:
        return 2
    if torch.cuda.device_count() < least:
        raise Skip(f"it needs {least} GPUs, and there are {torch.cuda.device_count()}")
    return torch.cuda.device_count()


def machine(_: argparse.Namespace) -> None:
    """What is here: nothing is measured."""
    versions = {}
    for name in (
        "torch",
        "triton",
        "megatron-core",
        "transformer-engine",
        "nvidia-nccl-cu13",
        "nvidia-nccl-cu12",
    ):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    say(gpus=gpus, cuda=torch.version.cuda, **versions)


def nccl(given: argparse.Namespace) -> None:
    """The sum over all GPUs is right, and at what rate it comes."""
    ranks = devices(given, 2)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_all_reduce, (ranks, folder, given.cpu), nprocs=ranks, start_method="spawn")
        say(**json.loads((Path(folder) / "found").read_text()))


def _all_reduce(rank: int, ranks: int, folder: str, cpu: bool) -> None:
    store = dist.FileStore(f"{folder}/store", ranks)  # type: ignore[attr-defined]
    device = torch.device("cpu") if cpu else torch.device("cuda", rank)
    if not cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if cpu else "nccl", rank=rank, world_size=ranks, store=store)
    x = torch.full(((1 if cpu else MEBIBYTES) << 18,), float(rank + 1), device=device)
    dist.all_reduce(x)
    # 1 + 2 + ... + n
    right = bool((x == ranks * (ranks + 1) / 2).all())
    repeats = 5
    settle()
    began = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(x)
    settle()
    took = (time.perf_counter() - began) / repeats
    dist.destroy_process_group()
    assert right, f"rank {rank}: the sum of 1 to {ranks} is not {ranks * (ranks + 1) // 2}"
    if rank == 0:
        # a ring sends each byte 2 (n − 1) / n times
        rate = 2 * (ranks - 1) / ranks * x.nbytes / took / 1e9
        found = {"what": "all-reduce, GB/s", "ranks": ranks, "value": round(rate, 2), "ok": True}
        Path(folder, "found").write_text(json.dumps(found))


def layouts(given: argparse.Namespace) -> None:
    """An update cut over two GPUs is that of one, and so is the next one of a trainer that goes on from its files."""
    devices(given, 2)
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_model("tiny", Path(folder) / "tiny"))
        first, second = _norms(model, folder, save=True)
        for name, cut in CUTS.items():
            _near(name, _norms(model, folder, **cut)[0], first, NEAR)
            (resumed,) = _norms(model, folder, restore=True, **cut)
            _near(f"{name}, resumed", resumed, second, NEAR)


def te(given: argparse.Namespace) -> None:
    """An update with Transformer Engine's layers is that of Megatron's."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise Skip("no Transformer Engine here (requirements/transformer_engine.sh)")
    devices(given, 1)
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_model("tiny", Path(folder) / "tiny"))
        want, got = (_norms(model, folder, bf16=True, **kind)[0] for kind in ({}, {"layers": "te"}))
        _near("layers te", got, want, NEAR_TE)


def _near(what: str, got: float, want: float, most: float) -> None:
    apart = abs(got / want - 1)
    assert apart <= most, f"{what}: gradient norm {got:g} and not {want:g}"
    say(what=f"gradient norm, {what}", apart=round(apart, 9), ok=True)


def _norms(
    model: str, folder: str, *, save: bool = False, restore: bool = False, **spec: Any
) -> list[float]:
    """The gradient norms of two updates by ranks of their own, which save between them; or of the second, restored."""
    ranks = spec.get("tp", 1) * spec.get("pp", 1) * spec.get("cp", 1) * spec.get("dp", 1)
    out = Path(tempfile.mkdtemp(dir=folder))
    saved = Path(folder) / "saved"
    given = (model, str(out), str(saved) if save else None, str(saved) if restore else None, spec)
    start_processes(_update, given, nprocs=ranks, start_method="spawn")
    norms: list[float] = json.loads((out / "norms").read_text())
    return norms


def _update(
    rank: int,
    model: str,
    folder: str,
    save: str | None,
    restore: str | None,
    changes: Mapping[str, Any],
) -> None:
    from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
    from mcore_mas.megatron.step.trainer import MegatronTrainer

    # a rate at which the second update differs from the first
    spec = TrainerSpec(model=model, init="random", lr=1e-2, **changes)
    store = dist.FileStore(f"{folder}/store", spec.ranks)  # type: ignore[attr-defined]
    init_process_groups(spec, rank=rank, threads=1, store=store)
    batches = [make_batch(LAYOUTS["small"], vocab=512, seed=i) for i in range(2)]
    trainer, norms = MegatronTrainer(spec), []
    if restore:
        trainer.restore(Path(restore))
    while trainer.updates < 2:
        norms.append(trainer.update(batches)["grad_norm"])
        if save and trainer.updates == 1:
            trainer.save(Path(save))
            trainer.written()
    destroy_process_groups()
    if rank == 0:
        Path(folder, "norms").write_text(json.dumps(norms))


def _server(given: argparse.Namespace) -> Path:
    if not given.sglang.is_file():
        raise Skip(
            f"no SGLang environment at {given.sglang} (docs/engines.md makes one; --sglang names another)"
        )
    if given.cpu:
        raise Skip("on a CPU `make test-sglang` runs it")
    python: Path = given.sglang
    return python


def sglang(given: argparse.Namespace) -> None:
    """A server starts on a GPU and answers; its NCCL is the trainer's."""
    from rollout.engines.sglang.engine import SGLangEngine
    from rollout.records.trajectory import Sampling

    devices(given, 1)
    python = _server(given)
    told = nccl_mismatch(python)
    assert told is None, told
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        _saved(model)
        began = time.perf_counter()
        engine = SGLangEngine(
            SGLangSettings(
                folder=model,
                max_length=128,
                python=str(python),
                log=Path(folder) / "server.log",
                verify=False,
            )
        )
        try:
            reply = asyncio.run(engine.generate([1, 2, 3], Sampling(max_tokens=8)))
        finally:
            engine.close()
        assert 1 <= len(reply.token_ids) <= 8, f"{len(reply.token_ids)} tokens, asked for 8 at most"
        say(what="a first reply, s", value=round(time.perf_counter() - began, 1), ok=True)


def _saved(folder: Path) -> None:
    import transformers

    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.Qwen2Config(
        **sizes, intermediate_size=512, vocab_size=512, max_position_embeddings=1024
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def training(given: argparse.Namespace, transport: str) -> None:
    """Two policies train for two steps, and their servers take new weights by this transport."""
    least, places = PLACES[transport]
    devices(given, least)
    python = _server(given)
    settings = [
        "engine=sglang",
        f"engine.python={python}",
        f"engine.transport={transport}",
        *SMALL,
        *places,
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "mcore_mas",
            "run",
            "demo_math",
            *settings,
            "--cores",
            "all",
            "--quiet",
            "all",
        ]
        began = time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        run = Path(folder) / "results" / "demo_math"
        finished = run / "train" / "done.json"
        last = " ".join((done.stderr or done.stdout).split())[-300:]
        assert done.returncode == 0 and finished.is_file(), f"exit status {done.returncode}: {last}"
        steps = [line for line in read(run / "train" / "metrics.jsonl") if "step" in line]
        handed = [
            value for line in steps for key, value in line.items() if key.endswith("hand_over_s")
        ]
        assert handed, "no policy was updated, so no weights were handed over; see metrics.jsonl"
        took = round(time.perf_counter() - began, 1)
        say(
            what="a training of two policies, s",
            transport=transport,
            value=took,
            steps=len(steps),
            ok=True,
        )
        say(
            what="hand-over, s",
            transport=transport,
            value=statistics.median(handed),
            most=max(handed),
            times=len(handed),
        )


SECTIONS: dict[str, Callable[..., None]] = {
    f.__name__: f for f in (machine, nccl, layouts, te, sglang, training)
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--sglang", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    if given.section != "machine" and not given.cpu and not torch.cuda.is_available():
        say(skipped="no GPU here")
        return
    try:
        SECTIONS[given.section](given, *given.arguments)
    except Skip as reason:
        say(skipped=str(reason))


if __name__ == "__main__":
    main()
