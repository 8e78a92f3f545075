"""Jobs of multi-process tests: groups of ranks, and the functions that each rank runs.

The functions lie in a module of their own so that the processes of the ranks can import them.
"""

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
from rollout.models.grammars import Grammars
from rollout.models.layout import ParallelLayout
from rollout.models.tensors import WeightStream, join_blocks
from rollout.sync.transport import SyncRoute, make_sender
from tests.support.gradients import full_gradients
from tests.support.starts import preload

LR = 1e-3
EPS = 1e-4


@dataclass(frozen=True, kw_only=True)
class Job:
    """A function that every rank of a layout calls as `function(rank, **arguments)`.

    Attributes:
        store_file: file through which the ranks find each other.
    """

    function: Callable[..., None]
    arguments: dict[str, Any]
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    store_file: Path = field(default_factory=lambda: Path(tempfile.mkdtemp()) / "store")

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(
            tp=self.tp, pp=self.pp, vpp=self.vpp, cp=self.cp, dp=self.dp, ep=self.ep
        )

    @property
    def ranks(self) -> int:
        return self.layout.ranks


def run_jobs(jobs: Sequence[Job], start_method: str = "forkserver") -> list[list[int]]:
    """Run the jobs one after another in one set of processes.

    Consecutive jobs of one layout share their process groups.

    Args:
        jobs: the jobs.
        start_method: "forkserver": the processes are forks of a server that has imported their
            modules; "fork": of this process, which must have one thread.

    Returns:
        For each rank, its number of threads after each layout that it was part of.
    """
    preload()
    with tempfile.TemporaryDirectory() as folder:
        processes = max(job.ranks for job in jobs)
        start_processes(
            _run_rank, args=(jobs, Path(folder)), nprocs=processes, start_method=start_method
        )
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(processes)]


def _run_rank(rank: int, jobs: Sequence[Job], folder: Path) -> None:
    # Stages know the shapes of their inputs, so no stage may wait to receive shapes.
    P2PCommunicator._communicate_shapes = _refuse_to_send_shapes
    gc.freeze()  # excludes the modules from collections, so that the jobs' garbage is found fast

    thread_counts = []
    for layout, group in itertools.groupby(jobs, key=lambda job: job.layout):
        jobs_of_layout = list(group)
        if rank < layout.ranks:
            store = dist.FileStore(str(jobs_of_layout[0].store_file), layout.ranks)
            init_process_groups(layout, rank=rank, threads=1, store=store)
            for job in jobs_of_layout:
                job.function(rank, **job.arguments)
                _free_trainers()
            destroy_process_groups()
            gc.collect()
            thread_counts.append(psutil.Process().num_threads())
    (folder / str(rank)).write_text(json.dumps(thread_counts))


def _refuse_to_send_shapes(*_: object) -> None:
    raise AssertionError("a pipeline stage waits for the shapes of another stage")


def _free_trainers() -> None:
    """Free the buffers and process groups of a job's trainers.

    Each process group has threads that wake a hundred times a second. With the distributed
    optimizer, Megatron's wrapper is part of a reference cycle through hooks of autograd nodes,
    which the garbage collector does not see. Emptying the wrapper breaks the cycle.
    """
    for candidate in gc.get_objects():
        if type(candidate) is DistributedDataParallel:
            vars(candidate).clear()
    gc.collect()


def make_spec(model: str, **changes: Any) -> TrainerSpec:
    """Return the specification of a trainer with cross-entropy loss, with some fields changed."""
    spec = TrainerSpec(model=model, lr=LR, eps=EPS, objective=Objective(loss="cross_entropy"))
    return replace(spec, **changes)


def copy_stream(stream: WeightStream) -> dict[str, torch.Tensor]:
    """Return copies of the full tensors of a weight stream."""
    return {name: join_blocks(blocks).clone() for name, blocks in stream}


def copy_weights(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """Return copies of a trainer's full weights. Every rank must call it."""
    return copy_stream(trainer.model.weights())


def save(trainer: MegatronTrainer, folder: Path) -> None:
    """Save a checkpoint, and wait until the files of every rank are written."""
    trainer.save(folder)
    trainer.wait_written()
    dist.barrier()


def train(
    rank: int, spec: TrainerSpec, out: Path, samples: list[Sample], steps: int, max_tokens: int
) -> None:
    """Update `steps` times.

    Rank 0 writes the metrics and the weights after every step. All ranks write a checkpoint after
    the first step.
    """
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
    """Send the weights as version 1 over every route; rank 0 writes the update to the route's file.

    Also assert that buckets of other sizes export the same weights.
    """
    trainer = MegatronTrainer(spec)
    for file, route in routes.items():
        sender = make_sender(route, rank=rank, all_gather=all_gather_json)
        update = sender.send(trainer.model.weights(), 1, route.half)
        if rank == 0:
            Path(file).write_text(json.dumps(asdict(update)))

    weights = copy_weights(trainer)
    parameters = trainer.model.trained_parameters
    architecture = trainer.model.architecture
    for bucket_bytes in (1, 20_000):
        plan = plan_export(parameters, architecture, bucket_bytes)
        exported = copy_stream(export_weights(parameters.__getitem__, architecture, plan))
        assert exported.keys() == weights.keys()
        assert all(torch.equal(exported[name], weights[name]) for name in weights)
        exported_parameters = {entry.parameter for bucket in plan for entry, _ in bucket.shards}
        if bucket_bytes > 1:  # large buckets hold several parameters
            assert len(exported_parameters) > len(plan)


def resume(
    rank: int, spec: TrainerSpec, out: Path, checkpoint: Path, samples: list[Sample], steps: int
) -> None:
    """Update `steps` times from `checkpoint`; rank 0 writes the weights at the end."""
    trainer = MegatronTrainer(spec)
    trainer.restore(checkpoint)
    for _ in range(steps):
        trainer.update(pack(samples, 64))
    weights = copy_weights(trainer)
    if rank == 0:
        out.mkdir()
        torch.save(weights, out / "weights.pt")


def score(rank: int, spec: TrainerSpec, out: Path, samples: list[Sample]) -> None:
    """Write the scores at the start, after an update, and after restoring a checkpoint.

    After the update and after the restore, the reference weights score too. The weights before and
    after the reference's scores are written as well.
    """
    trainer = MegatronTrainer(spec)
    batches = pack(samples, 12)
    scores = {"start": trainer.score(batches)}
    trainer.update(batches)
    save(trainer, out / "checkpoint")

    before = copy_weights(trainer)
    scores["trained"] = trainer.score(batches)
    scores["reference"] = trainer.score(batches, reference=True)
    after = copy_weights(trainer)

    restored = MegatronTrainer(spec)
    restored.restore(out / "checkpoint")
    scores["restored"] = restored.score(batches)
    scores["restored_reference"] = restored.score(batches, reference=True)
    torch.save({"scores": scores, "before": before, "after": after}, out / f"rank{rank}.pt")


def find_pending_gathers(rank: int, spec: TrainerSpec, out: Path, samples: list[Sample]) -> None:
    """Update twice; write the parameters whose all-gather was not waited for after an update."""
    trainer = MegatronTrainer(spec)
    pending: list[str] = []
    for _ in range(2):
        trainer.update(pack(samples, 12))
        for stage in trainer._stages:
            bucket_groups = stage.param_to_bucket_group
            for name, parameter in stage.named_parameters():
                if bucket_groups[parameter].param_gather_handle is not None:
                    pending.append(name)
    (out / f"rank{rank}.json").write_text(json.dumps(pending))


def train_critic(
    rank: int, spec: TrainerSpec, policy: str, out: Path, samples: list[Sample], steps: int
) -> None:
    """Train a critic from a folder with a value head; score with an untrained one, and export one from a policy."""
    critic_spec = replace(spec, head="value", objective=ValueObjective())
    train(rank, critic_spec, out, samples, steps, 12)
    trainer = MegatronTrainer(critic_spec)
    scores = trainer.score(pack(samples, 12))

    fresh = MegatronTrainer(replace(critic_spec, model=policy))
    torch.save({"scores": scores, "fresh": copy_weights(fresh)}, out / f"rank{rank}.pt")
    fresh.model.write(out / "exported")


def train_with_spikes(rank: int, spec: TrainerSpec, out: Path, samples: list[Sample]) -> None:
    """Update six times; then with a NaN advantage, with a million times the loss, and once more.

    Write the metrics, weights and optimizer moments after every update.
    """
    trainer = MegatronTrainer(
        replace(spec, skip_spikes=True, spike_factor=10.0, objective=Objective(loss="ppo_clip"))
    )
    history: dict[str, list] = {"metrics": [], "weights": [], "moments": []}

    def with_signal(
        sample: Sample, advantage: float, scale: float, behaviour: tuple[float, ...]
    ) -> Sample:
        return replace(
            sample,
            advantages=(advantage,) * len(sample.completion_ids),
            weight=sample.weight * scale,
            behaviour=behaviour,
        )

    for advantage, scale in [(1.0, 1.0)] * 6 + [(float("nan"), 1.0), (1.0, 1e6), (1.0, 1.0)]:
        batches = pack(samples, 12)
        behaviour = unpack(batches, trainer.score(batches), samples)
        signalled = []
        for sample, logprobs in zip(samples, behaviour, strict=True):
            agent_scale = scale if sample.agent == "a" else 1.0
            signalled.append(with_signal(sample, 1.0, agent_scale, logprobs))
        # only one micro-batch gets the advantage
        signalled[0] = with_signal(samples[0], advantage, scale, behaviour[0])

        history["metrics"].append(trainer.update(pack(signalled, 12)))
        history["weights"].append(copy_weights(trainer))
        states = trainer._optimizer.chained_optimizers[0].optimizer.state
        history["moments"].append(
            {
                index: {key: value.clone() for key, value in state.items()}
                for index, state in enumerate(states.values())
            }
        )
    torch.save(history, out / f"rank{rank}.pt")


def repeat_steps(
    rank: int, spec: TrainerSpec, out: Path, samples: list[Sample], steps: int
) -> None:
    """Repeat all calls of a training step; write the rank's number of threads after each step."""
    trainer = MegatronTrainer(spec)
    batches = pack(samples, 12)
    thread_counts = []
    for step in range(steps):
        trainer.score(batches)
        trainer.score(batches, reference=True)
        trainer.update(batches)
        copy_weights(trainer)
        save(trainer, out / f"step_{step}")
        trainer.sleep()
        trainer.wake()
        thread_counts.append(psutil.Process().num_threads())
    (out / f"threads_{rank}.json").write_text(json.dumps(thread_counts))


def train_sequence_loss(rank: int, spec: TrainerSpec, out: Path, samples: list[Sample]) -> None:
    """Update twice with GSPO, whose ratio is of whole replies; each micro-batch has several."""
    trainer = MegatronTrainer(
        replace(spec, objective=Objective(loss="gspo", options={"clip_low": 0.9, "clip_high": 9.0}))
    )
    batches = pack(samples, 1000)
    logprobs = unpack(batches, trainer.score(batches), samples)
    sampled = [
        replace(
            sample,
            behaviour=tuple(logprob - 0.1 * position for position, logprob in enumerate(row)),
            advantages=(1.0,) * len(row),
        )
        for sample, row in zip(samples, logprobs, strict=True)
    ]
    metrics = [trainer.update(pack(sampled, 1000)) for _ in range(2)]
    torch.save({"metrics": metrics, "weights": copy_weights(trainer)}, out / f"{rank}.pt")


def train_with_sleep(rank: int, spec: TrainerSpec, out: Path, samples: list[Sample]) -> None:
    """Update three times with a sleep after each, and three times without.

    Write the metrics, scores and weights of both, the bytes that each sleep returned as freed, and
    by how much it changed the resident memory.
    """
    process = psutil.Process()
    batches = pack(samples, 12)
    results: dict[str, Any] = {}
    for kind in ("with_sleep", "without_sleep"):
        trainer = MegatronTrainer(spec)
        result: dict[str, Any] = {"metrics": [], "freed": [], "resident": []}
        for _ in range(3):
            result["metrics"].append(trainer.update(batches))
            if kind == "with_sleep":
                before = process.memory_info().rss
                result["freed"].append(trainer.sleep())
                result["resident"].append(process.memory_info().rss - before)
                with pytest.raises(RuntimeError, match=r"offloaded .* call wake\(\) first"):
                    trainer.update(batches)
                trainer.wake()
        result["scores"] = trainer.score(batches)
        result["weights"] = copy_weights(trainer)
        results[kind] = result
        results["parameters"] = sum(
            parameter.numel() for parameter in trainer.model.trained_parameters.values()
        )
    torch.save(results, out / f"{rank}.pt")


def measure_trainer_memory(rank: int, spec: TrainerSpec, out: Path, samples: list[Sample]) -> None:
    """Write the bytes of this rank's weights, gradients, optimizer state and activations.

    All tokens pass through the last layer, as on a GPU, whose memory is planned.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "rank_device", lambda: torch.device("cuda"))
        trainer = MegatronTrainer(spec)
    saved: dict[int, torch.UntypedStorage] = {}
    activation_bytes: list[int] = []
    weight_pointers = {
        tensor.untyped_storage().data_ptr() for tensor in trainer.model.all_parameters.values()
    }

    def on_save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weight_pointers:
            saved[storage._cdata] = storage
        return tensor

    def on_use(tensor: torch.Tensor) -> torch.Tensor:
        # At the first use the forward pass is over, and storages that it freed have no bytes.
        if not activation_bytes:
            activation_bytes.append(sum(storage.nbytes() for storage in saved.values()))
        return tensor

    (batch,) = pack([sample for sample in samples if sample.agent == "a"], 4096)
    trainer.update([batch])
    # updates may have moved the weights
    weight_pointers_now = {
        tensor.untyped_storage().data_ptr() for tensor in trainer.model.all_parameters.values()
    }
    optimizer_tensors = [
        tensor
        for tensor in trainer._state.tensors()
        if tensor.dim() and tensor.untyped_storage().data_ptr() not in weight_pointers_now
    ]
    gradient_buffers = [
        buffer
        for stage in trainer._stages
        for buffer in (*stage.buffers, *stage.expert_parallel_buffers)
    ]
    measured = {
        "weights": sum(tensor.nbytes for tensor in trainer.model.all_parameters.values()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in gradient_buffers),
        "optimizer": sum(tensor.nbytes for tensor in optimizer_tensors),
        "tokens": len(batch.token_ids),
    }
    with torch.autograd.graph.saved_tensors_hooks(on_save, on_use):
        trainer.update([batch])
    measured["activations"] = activation_bytes[0]
    (out / f"{rank}.json").write_text(json.dumps(measured))


def measure_process_memory(
    rank: int, spec: TrainerSpec, out: Path, batches: list[Microbatch]
) -> None:
    """Write by how many bytes a trainer enlarges this process: after an update, and at its peak."""
    process = psutil.Process()
    before = process.memory_info().rss
    trainer = MegatronTrainer(spec)
    trainer.update(batches)
    persistent = process.memory_info().rss - before

    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    trainer.update(batches)
    status_lines = Path("/proc/self/status").read_text().splitlines()
    (peak_line,) = [line for line in status_lines if line.startswith("VmHWM")]
    peak = int(peak_line.split()[1]) << 10
    measured = {"kept": persistent, "peak": peak - before}
    (out / f"{rank}.json").write_text(json.dumps(measured))


def differentiate_entropy(
    rank: int,
    out: Path,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperatures: torch.Tensor,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
) -> None:
    """Write log p and H, and the gradients of Σ (n + 1) (log p_n + 2 H_n).

    The gradients are those of the hidden states and of this rank's shard of the weight. The head
    computes in chunks of two rows, and then all rows at once.
    """
    vocab = len(weight)
    ranks = dist.get_world_size()
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -vocab % 4))
    chunk_bytes = {
        "chunks": 2 * 4 * len(padded) // ranks,
        "whole": head.CHUNK_BYTES["cpu"],
    }
    for name, size in chunk_bytes.items():
        head.CHUNK_BYTES["cpu"] = size
        local_hidden = hidden.clone().requires_grad_()
        shard = padded.chunk(ranks)[rank].clone().requires_grad_()
        logprobs, entropies = head.logprobs_and_entropy(
            local_hidden,
            shard,
            labels,
            temperatures,
            vocab,
            is_embedding=False,
            exact=False,
            masks=masks,
            mask_rows=mask_rows,
        )
        factor = torch.arange(1.0, len(labels) + 1)
        (factor * (logprobs + 2 * entropies)).sum().backward()
        results = {
            "hidden": local_hidden.grad,
            "weight": shard.grad,
            "logprobs": logprobs.detach(),
            "entropy": entropies.detach(),
        }
        torch.save(results, out / f"{name}_{rank}.pt")


def train_constrained(rank: int, spec: TrainerSpec, out: Path, samples: list[Sample]) -> None:
    """Write the scores of samples with grammars, and the weights after an update."""
    trainer = MegatronTrainer(spec)
    batches = pack(samples, 256, grammars=Grammars(spec.model))
    scores = [torch.tensor(row) for row in unpack(batches, trainer.score(batches), samples)]
    trainer.update(batches)
    torch.save({"scores": scores, "weights": copy_weights(trainer)}, out / f"rank{rank}.pt")


def compare_tree_gradients(
    rank: int, spec: TrainerSpec, out: Path, samples: list[Sample], max_tokens: int
) -> None:
    """Write the relative difference between the gradients on prefix trees and on whole sequences.

    Also write the norm of the latter.
    """
    gradients = []
    for share in (True, False):
        trainer = MegatronTrainer(spec)
        trainer.update(pack(samples, max_tokens, share=share))
        flat = [gradient.double().flatten() for _, gradient in full_gradients(trainer)]
        gradients.append(torch.cat(flat))
    on_trees, on_sequences = gradients
    norm = on_sequences.norm()
    difference = (on_trees - on_sequences).norm() / norm
    out.write_text(json.dumps({"relative": float(difference), "norm": float(norm)}))
