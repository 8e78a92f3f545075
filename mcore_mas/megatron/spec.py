"""What one policy's trainer needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mcore_mas.equations.losses import Objective, ValueObjective

Projection = Literal["q", "k", "v", "o", "gate", "up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Low-rank adapters in place of the full weights (Hu et al. 2021, arXiv 2106.09685): W + alpha / rank · B A."""

    rank: int
    alpha: float
    targets: tuple[Projection, ...] = PROJECTIONS  # of every layer
    adapter: str | None = None  # folder in PEFT's format to start from; None: A random, B zero
    seed: int = 0  # of a random A

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """One trainer, as plain data that travels to every rank."""

    model: str  # Hugging Face folder
    init: Literal["folder", "random"] = "folder"  # "random": seeded weights in the shape of the folder's config.json
    seed: int = 0  # of those
    reference: str | None = None  # Hugging Face folder of the frozen reference; None: as it starts
    lora: LoraSpec | None = None  # train adapters on a frozen `model`; None: train all weights
    head: Literal["policy", "value"] = "policy"  # "value": a critic, whose head starts afresh if `model` has none
    tp: int = 1  # tensor-parallel ranks
    pp: int = 1  # pipeline-parallel ranks
    vpp: int = 1  # pipeline stages on each of them
    cp: int = 1  # context-parallel ranks
    dp: int = 1  # data-parallel ranks
    ep: int = 1  # of those, how many share out the experts of a layer
    sp: bool = False  # cut what tensor parallelism repeats by sequence
    distributed_optimizer: bool = False  # each data-parallel rank keeps its part of the optimizer's state
    overlap: bool = False  # reduce gradients while others are computed; with the distributed optimizer, gather likewise
    bucket: int | None = None  # parameters of one overlapping exchange; None: Megatron's choice
    recompute: bool = False  # recompute every layer's activations in the backward pass
    layers: Literal["local", "te"] = "local"  # whose linear layers: Megatron's own, or Transformer Engine's
    bf16: bool = False  # train in bfloat16 with float32 master weights
    lr: float = 1e-6
    warmup_steps: int = 0  # updates of linear warm-up
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rate after them
    min_lr: float = 0.0  # from update decay_steps on
    decay_steps: int | None = None  # updates, the warm-up included; None goes with a constant rate
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0  # not of norms and biases
    clip_grad: float = 1.0
    spike_factor: float = 10.0  # times the running median that makes a gradient norm a spike
    skip_spikes: bool = False  # leave out the step of a spike, as always that of a gradient that is not finite
    objective: Objective | ValueObjective = field(default_factory=Objective)  # a ValueObjective goes with a value head

    def __post_init__(self) -> None:
        if isinstance(self.objective, ValueObjective) != (self.head == "value"):
            kind = type(self.objective).__name__
            raise ValueError(f"trainer: head '{self.head}' with {kind}; a value head goes with a ValueObjective")
        if self.schedule != "constant" and (self.decay_steps or 0) <= self.warmup_steps:
            raise ValueError(
                f"trainer: schedule '{self.schedule}' over {self.decay_steps} updates with a warm-up of "
                f"{self.warmup_steps}; it needs more updates than that"
            )
        if self.lora is not None and self.reference is not None:
            raise ValueError("trainer: lora with a reference of its own; the reference of adapters is the bare model")

    @property
    def ranks(self) -> int:
        """Processes of this trainer."""
        return self.tp * self.pp * self.cp * self.dp
