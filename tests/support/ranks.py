"""What each rank of a multi-process test runs; importable, so that spawned processes find it."""

import gc
import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch.multiprocessing import start_processes

from mcore_mas.credit.samples import Sample
from mcore_mas.equations.losses import Objective, ValueObjective
from mcore_mas.megatron.batch import Microbatch
from mcore_mas.megatron.collectives import all_gather_json
from mcore_mas.megatron.model import decoder, head
from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
from mcore_mas.megatron.state.weight_export import export_weights, plan_export
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack, unpack
from rollout.models.layout import ParallelLayout
from rollout.models.tensors import WeightStream
from rollout.models.tensors import whole as whole_of
from rollout.sync.transport import SyncRoute, make_sender
from tests.support.gradients import gradients_of
from tests.support.starts import preload

LR = 1e-3
EPS = 1e-4


@dataclass(frozen=True, kw_only=True)
class Job:
    """One group of ranks that comes up, calls `function(rank, **arguments)` and goes down again."""

    function: Callable[..., None]
    arguments: dict[str, Any]
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    meeting: Path = field(default_factory=lambda: Path(tempfile.mkdtemp()) / "store")

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(
            tp=self.tp, pp=self.pp, vpp=self.vpp, cp=self.cp, dp=self.dp, ep=self.ep
        )

    @property
    def ranks(self) -> int:
        return self.layout.ranks


def play(jobs: Sequence[Job]) -> list[list[int]]:
    """The jobs one after the other, in one set of processes, forked from one that has imported what they need.

    Jobs of one layout that follow each other share their process groups.

    Returns:
        By rank, how many threads it had after each layout it took part in.
    """
    preload()
    with tempfile.TemporaryDirectory() as folder:
        processes = max(job.ranks for job in jobs)
        start_processes(
            _play, args=(jobs, Path(folder)), nprocs=processes, start_method="forkserver"
        )
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(processes)]


def _play(rank: int, jobs: Sequence[Job], folder: Path) -> None:
    P2PCommunicator._communicate_shapes = (
        _refuse  # pipeline stages know what comes, and do not wait to be told
    )
    gc.freeze()  # the modules: what jobs leave behind is then found at once
    threads = []
    for layout, same in itertools.groupby(jobs, key=lambda job: job.layout):
        own = list(same)
        if rank < layout.ranks:
            store = dist.FileStore(str(own[0].meeting), layout.ranks)
            init_process_groups(layout, rank=rank, threads=1, store=store)
            for job in own:
                job.function(rank, **job.arguments)
                _free()
            destroy_process_groups()
            gc.collect()
            threads.append(psutil.Process().num_threads())
    (folder / str(rank)).write_text(json.dumps(threads))


def _refuse(*_: object) -> None:
    raise AssertionError("a pipeline stage waits for the other's shapes")


def _free() -> None:
    """Let go of what trainers held: buffers, and process groups, each with threads that wake a hundred times a second.

    Hooks of parameters hold Megatron's wrapper from autograd's nodes, where the collector does not see them; with the
    distributed optimizer that closes a cycle.
    """
    for found in gc.get_objects():
        if type(found) is DistributedDataParallel:
            vars(found).clear()
    gc.collect()


def spec_of(model: str, **changes: Any) -> TrainerSpec:
    return replace(
        TrainerSpec(model=model, lr=LR, eps=EPS, objective=Objective(loss="cross_entropy")),
        **changes,
    )


def copied(stream: WeightStream) -> dict[str, torch.Tensor]:
    """Full tensors of a trainer's stream, in memory of their own."""
    return {name: whole_of(rows).clone() for name, rows in stream}


def copy_weights(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    return copied(trainer.model.weights())


def save(trainer: MegatronTrainer, folder: Path) -> None:
    """Save, and wait until every rank's files are there."""
    trainer.save(folder)
    trainer.written()
    dist.barrier()


def train(
    rank: int, spec: TrainerSpec, out: Path, samples: list[Sample], steps: int, max_tokens: int
) -> None:
    """`steps` updates; rank 0 writes metrics, the weights after every step, and a checkpoint after the first."""
    trainer = MegatronTrainer(spec)
    history = []
    for step in range(steps):
        history.append(trainer.update(pack(samples, max_tokens)))
        weights = copy_weights(trainer)
        if rank == 0:
            out.mkdir(exist_ok=True)
            torch.save(weights, out / f"weights_{step}.pt")
        if step == 0:
            save(trainer, out / "checkpoint")
    if rank == 0:
        (out / "history.json").write_text(json.dumps(history))


def export(rank: int, spec: TrainerSpec, routes: dict[str, SyncRoute]) -> None:
    """Send the weights as version 1 over every route; rank 0 writes the update to the route's file."""
    trainer = MegatronTrainer(spec)
    for file, route in routes.items():
        sender = make_sender(route, rank=rank, all_gather=all_gather_json)
        update = sender.send(trainer.model.weights(), 1, route.half)
        if rank == 0:
            Path(file).write_text(json.dumps(asdict(update)))
    whole, local = copy_weights(trainer), trainer._parameters
    for bucket_bytes in (1, 20_000):
        plan = plan_export(local, trainer.model.architecture, bucket_bytes)
        again = {
            name: whole_of(rows)
            for name, rows in export_weights(local.__getitem__, trainer.model.architecture, plan)
        }
        assert again.keys() == whole.keys() and all(
            torch.equal(again[name], whole[name]) for name in whole
        )
        assert (
            len({entry.parameter for bucket in plan for entry, _ in bucket.shards}) > len(plan)
            or bucket_bytes == 1
        )


def resume(
    rank: int, spec: TrainerSpec, out: Path, checkpoint: Path, samples: list[Sample], steps: int
) -> None:
    """Continue from `checkpoint` for `steps` updates; rank 0 writes the weights at the end."""
    trainer = MegatronTrainer(spec)
    trainer.restore(checkpoint)
    for _ in range(steps):
        trainer.update(pack(samples, 64))
    weights = copy_weights(trainer)
    if rank == 0:
        out.mkdir()
        torch.save(weights, out / "weights.pt")


def score(rank: int, spec: TrainerSpec, out: Path, samples: list[Sample]) -> None:
    """Scores at the start, after an update and after a restore, by the trained and by the reference weights."""
    trainer = MegatronTrainer(spec)
    batches = pack(samples, 12)
    scores = {"start": trainer.score(batches)}
    trainer.update(batches)
    save(trainer, out / "checkpoint")
    before = copy_weights(trainer)
    scores |= {
        "trained": trainer.score(batches),
        "reference": trainer.score(batches, reference=True),
    }
    after = copy_weights(trainer)
    again = MegatronTrainer(spec)
    again.restore(out / "checkpoint")
    scores |= {
        "restored": again.score(batches),
        "restored_reference": again.score(batches, reference=True),
    }
    torch.save({"scores": scores, "before": before, "after": after}, out / f"rank{rank}.pt")


def gather_late(rank: int, spec: TrainerSpec, out: Path, samples: list[Sample]) -> None:
    """Two updates; after each, the parameters of whose gathering nobody has waited for the end."""
    trainer, late = MegatronTrainer(spec), list[str]()
    for _ in range(2):
        trainer.update(pack(samples, 12))
        for stage in trainer._stages:
            groups = stage.param_to_bucket_group
            late += [
                name
                for name, p in stage.named_parameters()
                if groups[p].param_gather_handle is not None
            ]
    (out / f"rank{rank}.json").write_text(json.dumps(late))


def criticise(
    rank: int, spec: TrainerSpec, policy: str, out: Path, samples: list[Sample], steps: int
) -> None:
    """Train a critic from a folder with a head, then score; and start one from a policy's folder."""
    critic = replace(spec, head="value", objective=ValueObjective())
    train(rank, critic, out, samples, steps, 12)
    trainer = MegatronTrainer(critic)
    scores = trainer.score(pack(samples, 12))
    fresh = MegatronTrainer(replace(critic, model=policy))
    torch.save({"scores": scores, "fresh": copy_weights(fresh)}, out / f"rank{rank}.pt")
    fresh.model.write(out / "exported")


def skip(rank: int, spec: TrainerSpec, out: Path, samples: list[Sample]) -> None:
    """Six updates, one with a NaN advantage in one micro-batch, one with a million times the loss, one more."""
    trainer = MegatronTrainer(
        replace(spec, skip_spikes=True, spike_factor=10.0, objective=Objective(loss="ppo_clip"))
    )
    rows: dict[str, list] = {"metrics": [], "weights": [], "moments": []}

    def signal(
        sample: Sample, advantage: float, scale: float, behaviour: tuple[float, ...]
    ) -> Sample:
        advantages = (advantage,) * len(sample.completion_ids)
        return replace(
            sample, advantages=advantages, weight=sample.weight * scale, behaviour=behaviour
        )

    for advantage, scale in [(1.0, 1.0)] * 6 + [(float("nan"), 1.0), (1.0, 1e6), (1.0, 1.0)]:
        batches = pack(samples, 12)
        behaviour = unpack(batches, trainer.score(batches), samples)
        batch = [
            signal(s, 1.0, scale if s.agent == "a" else 1.0, b)
            for s, b in zip(samples, behaviour, strict=True)
        ]
        batch[0] = signal(samples[0], advantage, scale, behaviour[0])
        rows["metrics"].append(trainer.update(pack(batch, 12)))
        rows["weights"].append(copy_weights(trainer))
        states = trainer._optimizer.chained_optimizers[0].optimizer.state
        rows["moments"].append(
            {i: {k: v.clone() for k, v in state.items()} for i, state in enumerate(states.values())}
        )
    torch.save(rows, out / f"rank{rank}.pt")


def live_long(rank: int, spec: TrainerSpec, out: Path, samples: list[Sample], steps: int) -> None:
    """All that a trainer is asked for in a step, again and again; how many threads its rank has after each."""
    trainer, batches, threads = MegatronTrainer(spec), pack(samples, 12), []
    for step in range(steps):
        trainer.score(batches)
        trainer.score(batches, reference=True)
        trainer.update(batches)
        copy_weights(trainer)
        save(trainer, out / f"step_{step}")
        trainer.sleep()
        trainer.wake()
        threads.append(psutil.Process().num_threads())
    (out / f"threads_{rank}.json").write_text(json.dumps(threads))


def sequence_level(rank: int, spec: TrainerSpec, out: Path, samples: list[Sample]) -> None:
    """Two updates under a loss whose ratio is of whole replies, in micro-batches of several."""
    trainer = MegatronTrainer(
        replace(spec, objective=Objective(loss="gspo", options={"clip_low": 0.9, "clip_high": 9.0}))
    )
    batches = pack(samples, 1000)
    behaviour = unpack(batches, trainer.score(batches), samples)
    drawn = [
        replace(
            sample,
            behaviour=tuple(x - 0.1 * i for i, x in enumerate(row)),
            advantages=(1.0,) * len(row),
        )
        for sample, row in zip(samples, behaviour, strict=True)
    ]
    metrics = [trainer.update(pack(drawn, 1000)) for _ in range(2)]
    torch.save({"metrics": metrics, "weights": copy_weights(trainer)}, out / f"{rank}.pt")


def rest(rank: int, spec: TrainerSpec, out: Path, samples: list[Sample]) -> None:
    """Three updates with a sleep after each, and three without; what was freed, and how resident memory changed."""
    process, batches, found = psutil.Process(), pack(samples, 12), {}
    for kind in ("rested", "unbroken"):
        trainer = MegatronTrainer(spec)
        found[kind] = {"metrics": [], "freed": [], "resident": []}
        for _ in range(3):
            found[kind]["metrics"].append(trainer.update(batches))
            if kind == "rested":
                before = process.memory_info().rss
                found[kind]["freed"].append(trainer.sleep())
                found[kind]["resident"].append(process.memory_info().rss - before)
                with pytest.raises(RuntimeError, match=r"offloaded .* call wake\(\) first"):
                    trainer.update(batches)
                trainer.wake()
        found[kind]["scores"] = trainer.score(batches)
        found[kind]["weights"] = copy_weights(trainer)
        found["parameters"] = sum(p.numel() for p in trainer._parameters.values())
    torch.save(found, out / f"{rank}.pt")


def held(rank: int, spec: TrainerSpec, out: Path, samples: list[Sample]) -> None:
    """An update; bytes of this rank's weights, gradients and optimizer, and of what the forward pass saved.

    All tokens pass through the last layer, as on a GPU, whose memory is planned.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "rank_device", lambda: torch.device("cuda"))
        trainer = MegatronTrainer(spec)
    saved, sizes = {}, []
    weights = {
        tensor.untyped_storage().data_ptr() for tensor in trainer.model.all_parameters.values()
    }

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage._cdata] = storage
        return tensor

    def use(tensor: torch.Tensor) -> torch.Tensor:
        if not sizes:  # the forward pass is over, and what it let go of is empty
            sizes.append(sum(storage.nbytes() for storage in saved.values()))
        return tensor

    (batch,) = pack([sample for sample in samples if sample.agent == "a"], 4096)
    trainer.update([batch])
    shared = {
        tensor.untyped_storage().data_ptr() for tensor in trainer.model.all_parameters.values()
    }
    own = [
        t
        for t in trainer._state.tensors()
        if t.dim() and t.untyped_storage().data_ptr() not in shared
    ]
    found = {
        "weights": sum(t.numel() * t.element_size() for t in trainer.model.all_parameters.values()),
        "gradients": sum(
            b.grad_data.nbytes
            for s in trainer._stages
            for b in (*s.buffers, *s.expert_parallel_buffers)
        ),
        "optimizer": sum(t.numel() * t.element_size() for t in own),
        "tokens": len(batch.token_ids),
    }
    with torch.autograd.graph.saved_tensors_hooks(keep, use):
        trainer.update([batch])
    found["activations"] = sizes[0]
    (out / f"{rank}.json").write_text(json.dumps(found))


def resident(rank: int, spec: TrainerSpec, out: Path, batches: list[Microbatch]) -> None:
    """Bytes by which this process grows with a trainer, and at the peak of its second update."""
    process, status = psutil.Process(), Path("/proc/self/status")
    before = process.memory_info().rss
    trainer = MegatronTrainer(spec)
    trainer.update(batches)
    kept = process.memory_info().rss - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    trainer.update(batches)
    peak = next(
        int(line.split()[1]) << 10
        for line in status.read_text().splitlines()
        if line.startswith("VmHWM")
    )
    (out / f"{rank}.json").write_text(json.dumps({"kept": kept, "peak": peak - before}))


def entropy(
    rank: int,
    out: Path,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperatures: torch.Tensor,
) -> None:
    """Gradients of Σ (n + 1) (log p_n + 2 H_n) in the hidden states and this rank's weights, and both values.

    In chunks of two rows, then all rows at once.
    """
    vocab = len(weight)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -vocab % 4))
    default = head.CHUNK_BYTES["cpu"]
    for name, size in (
        ("chunks", 2 * 4 * len(padded) // dist.get_world_size()),
        ("whole", default),
    ):
        head.CHUNK_BYTES["cpu"] = size
        mine, shard = (
            hidden.clone().requires_grad_(),
            padded.chunk(dist.get_world_size())[rank].clone().requires_grad_(),
        )
        found, entropies = head.logprobs_and_entropy(
            mine, shard, labels, temperatures, vocab, embeds=False, exact=False
        )
        factor = torch.arange(1.0, len(labels) + 1)
        (factor * (found + 2 * entropies)).sum().backward()
        numbers = {
            "hidden": mine.grad,
            "weight": shard.grad,
            "logprobs": found.detach(),
            "entropy": entropies.detach(),
        }
        torch.save(numbers, out / f"{name}_{rank}.pt")


def both_ways(
    rank: int, spec: TrainerSpec, out: Path, samples: list[Sample], max_tokens: int
) -> None:
    """How far apart the gradients of an update are on trees and on whole sequences, relative to the latter."""
    found = []
    for share in (True, False):
        trainer = MegatronTrainer(spec)
        trainer.update(pack(samples, max_tokens, share=share))
        found.append(
            torch.cat([gradient.double().flatten() for _, gradient in gradients_of(trainer)])
        )
    tree, whole = found
    apart = {"relative": float((tree - whole).norm() / whole.norm()), "norm": float(whole.norm())}
    out.write_text(json.dumps(apart))
