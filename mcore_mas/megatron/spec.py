"""Specification of a trainer: model, parallel layout and optimizer; process groups in that layout."""

import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from mcore_mas.config.policy import LoraConfig
from mcore_mas.equations.losses import Objective, ValueObjective
from rollout.models.layout import (
    FP8_MULTIPLES,
    Fp8Format,
    Fp8Recipe,
    ParallelLayout,
    Recompute,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec(ParallelLayout):
    """Specification of one trainer, as plain data that is sent to every rank.

    `ParallelLayout` documents the sizes of the parallel layout.

    Attributes:
        model: Hugging Face folder.
        init: "folder": load its weights; "random": seeded weights in the shape of its config.json.
        seed: seed of random weights.
        lora: train adapters on a frozen `model`; None: train all weights.
        lora_seed: seed of the random A of new adapters.
        head: "policy": logits of the vocabulary; "value": a critic, whose head starts afresh if
            `model` has none.
        distributed_optimizer: split the optimizer state over data-parallel ranks.
        overlap: reduce gradients during the backward pass and, with the distributed optimizer,
            gather weights during the forward pass.
        bucket: number of parameters in one overlapping exchange; None: Megatron's choice.
        host_moments: keep Adam's moments in host memory, except for the weight that is being
            updated.
        recompute: activations that the backward pass recomputes.
        layers: implementation of the linear layers, Megatron's ("local") or Transformer Engine's ("te").
        fp8: format of the layers' products in FP8; None: they are not in FP8.
        fp8_recipe: scaling of the factors in FP8, see `Fp8Recipe`.
        attention: "auto": Triton's kernels where there is CUDA; "torch": torch's kernels.
        bf16: train in bfloat16 with float32 master weights.
        deterministic: in float32 on a CPU, compute the same bits as the embedded engine; on a GPU,
            make Transformer Engine choose deterministic attention.
        cumem: value of NCCL_CUMEM_ENABLE for the ranks, unless the environment sets it; None:
            NCCL's choice.
        lr: learning rate after the warm-up.
        warmup_steps: updates of linear warm-up. This and `decay_steps` count as `at` of
            `Trainer.update` does.
        schedule: schedule of the learning rate after the warm-up.
        min_lr: learning rate from update `decay_steps` on.
        decay_steps: updates until the schedule ends, including the warm-up; may be None if the
            schedule is "constant".
        betas, eps: parameters of Adam.
        weight_decay: weight decay of parameters other than norms and biases.
        clip_grad: norm to which a larger gradient is scaled down.
        spike_factor: a gradient norm is a spike if it exceeds this multiple of the running median.
        skip_spikes: skip the step of a spike. The step of a gradient that is not finite is always
            skipped.
        objective: loss of a policy, or of a critic (`ValueObjective`).
        balance: weight of each agent. The agents' gradients are rescaled, so that their norms are
            proportional to the weights (see `mcore_mas.equations.balance`); None: the gradients are
            summed as they are.
        effective_samples: measure the effective sample size of each update.
        scales_lr: multiply the learning rate of an update by the square root of the share of
            effective samples; needs `effective_samples`.
    """

    model: str
    init: Literal["folder", "random"] = "folder"
    seed: int = 0
    lora: LoraConfig | None = None
    lora_seed: int = 0
    head: Literal["policy", "value"] = "policy"
    distributed_optimizer: bool = False
    overlap: bool = False
    bucket: int | None = None
    host_moments: bool = False
    recompute: Recompute = "none"
    layers: Literal["local", "te"] = "local"
    fp8: Fp8Format | None = None
    fp8_recipe: Fp8Recipe = "tensorwise"
    attention: Literal["auto", "torch"] = "auto"
    bf16: bool = False
    deterministic: bool = False
    cumem: str | None = None
    lr: float = 1e-6
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr: float = 0.0
    decay_steps: int | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    spike_factor: float = 10.0
    skip_spikes: bool = False
    objective: Objective | ValueObjective = field(default_factory=Objective)
    balance: dict[str, float] | None = None
    effective_samples: bool = False
    scales_lr: bool = False

    @property
    def token_multiple(self) -> int:
        """Number by which the number of tokens of every micro-batch must be divisible.

        Context and sequence parallelism split the tokens into equal parts. In FP8, the length of a
        part is a dimension of matrix products, so it must be a multiple of the recipe's number in
        `FP8_MULTIPLES`.
        """
        parts = self.cp * (self.tp if self.sp else 1)
        return parts if self.fp8 is None else parts * FP8_MULTIPLES[self.fp8_recipe]

    def __post_init__(self) -> None:
        if isinstance(self.objective, ValueObjective) != (self.head == "value"):
            kind = type(self.objective).__name__
            raise ValueError(
                f"trainer: head '{self.head}' with {kind}; a value head goes with a ValueObjective"
            )
        if self.schedule != "constant" and (self.decay_steps or 0) <= self.warmup_steps:
            raise ValueError(
                f"trainer: schedule '{self.schedule}' over {self.decay_steps} updates with a warm-up of "
                f"{self.warmup_steps}; it needs more updates than its warm-up"
            )


def init_process_groups(
    layout: ParallelLayout | None = None,
    *,
    rank: int,
    threads: int,
    store: Store | None = None,
    patience_s: float = 1800.0,
) -> None:
    """Join the policy's process groups, with NCCL where there is CUDA and with gloo elsewhere.

    Ranks are numbered through tensor-parallel groups first, then through context-, data- and
    pipeline-parallel groups.

    Args:
        layout: layout of the ranks; None: this rank is alone.
        rank: number of this rank.
        threads: threads of torch's operations on the CPU.
        store: store at which the ranks find each other; None only if this rank is alone.
        patience_s: time that a rank waits for the others, also in a collective.
    """
    # Megatron is imported here, so that code that only writes a specification does not load it.
    import mcore_mas.megatron.patches  # noqa: F401  before Megatron

    # isort: split
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    layout = layout or ParallelLayout()
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store = store or HashStore()
    patience = timedelta(seconds=patience_s)
    # Otherwise all ranks would have to begin NCCL's first collective within the store's own 5
    # minutes.
    store.set_timeout(patience)
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
        # Every layer asks for this random generator, though nothing is drawn: there is no dropout.
        model_parallel_cuda_manual_seed(1)


def destroy_process_groups() -> None:
    """Leave all process groups."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
