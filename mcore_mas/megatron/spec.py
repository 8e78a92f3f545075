"""Trainer specification: model, parallel layout and optimizer of one trainer; its process groups in that layout."""

import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from mcore_mas.config.policy import LoraConfig
from mcore_mas.equations.losses import Objective, ValueObjective
from rollout.models.layout import ParallelLayout, Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec(ParallelLayout):
    """One trainer, as plain data that travels to every rank."""

    model: str  # Hugging Face folder
    init: Literal["folder", "random"] = (
        "folder"  # "random": seeded weights in the shape of the folder's config.json
    )
    seed: int = 0  # of those
    lora: LoraConfig | None = None  # train adapters on a frozen `model`; None: train all weights
    lora_seed: int = 0  # of a random A
    head: Literal["policy", "value"] = (
        "policy"  # "value": a critic, whose head starts afresh if `model` has none
    )
    distributed_optimizer: bool = (
        False  # each data-parallel rank keeps its part of the optimizer's state
    )
    overlap: bool = False  # reduce gradients while others are computed; with the distributed optimizer, gather likewise
    bucket: int | None = None  # parameters of one overlapping exchange; None: Megatron's choice
    host_moments: bool = (
        False  # Adam's moments are in host memory, but for the weight that is being stepped
    )
    recompute: Recompute = "none"  # activations in the backward pass
    layers: Literal["local", "te"] = (
        "local"  # whose linear layers: Megatron's own, or Transformer Engine's
    )
    attention: Literal["auto", "torch"] = (
        "auto"  # "auto": Triton's kernel where there is CUDA; "torch": its kernels
    )
    bf16: bool = False  # train in bfloat16 with float32 master weights
    deterministic: bool = (
        False  # compute in float32 on a CPU what the embedded engine does, to the bit
    )
    cumem: str | None = (
        None  # NCCL_CUMEM_ENABLE of its ranks where nobody has set it; None: NCCL's own choice
    )
    lr: float = 1e-6
    warmup_steps: int = 0  # updates of linear warm-up
    schedule: Literal["constant", "linear", "cosine"] = (
        "constant"  # of the learning rate after them
    )
    min_lr: float = 0.0  # from update decay_steps on
    decay_steps: int | None = None  # updates, the warm-up included; None goes with a constant rate
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0  # not of norms and biases
    clip_grad: float = 1.0
    spike_factor: float = 10.0  # times the running median that makes a gradient norm a spike
    skip_spikes: bool = (
        False  # leave out the step of a spike, as always that of a gradient that is not finite
    )
    objective: Objective | ValueObjective = field(
        default_factory=Objective
    )  # a ValueObjective goes with a value head

    def __post_init__(self) -> None:
        if isinstance(self.objective, ValueObjective) != (self.head == "value"):
            kind = type(self.objective).__name__
            raise ValueError(
                f"trainer: head '{self.head}' with {kind}; a value head goes with a ValueObjective"
            )
        if self.schedule != "constant" and (self.decay_steps or 0) <= self.warmup_steps:
            raise ValueError(
                f"trainer: schedule '{self.schedule}' over {self.decay_steps} updates with a warm-up of "
                f"{self.warmup_steps}; it needs more updates than that"
            )


def init_process_groups(
    layout: ParallelLayout | None = None,
    *,
    rank: int,
    threads: int,
    store: Store | None = None,
    patience_s: float = 1800.0,
) -> None:
    """Join the policy's process groups, of one rank if no `layout` is given; NCCL where there is CUDA, else gloo.

    Neighbouring ranks are of one tensor-parallel group, then of one context-parallel, then of one data-parallel group.
    A group of one needs no `store` to find itself. A rank waits for another one for `patience_s`.
    """
    import mcore_mas.megatron.patches  # noqa: F401  before Megatron, which those who only write a spec do not load

    # isort: split
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    layout = layout or ParallelLayout()
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store, patience = store or HashStore(), timedelta(seconds=patience_s)
    store.set_timeout(
        patience
    )  # of its own 5 minutes, within which all would have to begin NCCL's first collective
    dist.init_process_group(
        backend, rank=rank, world_size=layout.ranks, store=store, timeout=patience
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        distributed_timeout_minutes=math.ceil(patience_s / 60),
    )
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(
            1
        )  # drawn from by nothing, asked for by every layer: there is no dropout


def destroy_process_groups() -> None:
    """Leave the process group."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
