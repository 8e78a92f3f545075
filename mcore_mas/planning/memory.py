"""Memory of trainers and engines on one GPU, by formula, before anything is built; all sizes are bytes.

Everything is counted tensor by tensor, and the tests compare it with the tensors of a real trainer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import add

from mcore_mas.config.policy import LoraConfig
from rollout.models.architecture import Architecture
from rollout.models.layout import ParallelLayout, Recompute

LOGITS = (
    1 << 30
)  # float32 logits that exist at a time on a GPU (`mcore_mas/megatron/model/decoder.py`)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """A kind of GPU, by its maker's data sheet."""

    memory: float  # GB, of 1e9 bytes
    flops: float  # TFLOP/s, dense bfloat16
    bandwidth: float  # TB/s


GPUS = {
    "H100": GPU(memory=80, flops=989, bandwidth=3.35),
    "H200": GPU(memory=141, flops=989, bandwidth=4.8),
    "A100": GPU(memory=80, flops=312, bandwidth=2.04),
    "A100-40GB": GPU(memory=40, flops=312, bandwidth=1.56),
    "B200": GPU(memory=180, flops=2250, bandwidth=8.0),
    "L40S": GPU(memory=48, flops=362, bandwidth=0.86),
}


def peak_flops(name: str) -> float | None:
    """What a GPU can do a second in bfloat16, by the name that CUDA has for it; None: it is none of `GPUS`."""
    words = set(re.split("[ -]", name))
    kind = next((kind for kind in GPUS if kind in words), None)
    slower = {"PCIe", "NVL"} & words and kind in (
        "H100",
        "H200",
    )  # cards of that name with less power
    return None if kind is None or slower else 1e12 * GPUS[kind].flops


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """What one rank of a trainer holds."""

    weights: float
    gradients: float  # float32
    optimizer: (
        float  # float32 master weights and Adam's two moments, or of these the largest weight's
    )
    on_host: float  # moments that are kept in host memory
    summed: float  # what agents' gradients add up to where a rank steps all, in host memory meanwhile ...
    shared: float  # ... and on the GPU where ranks share it out
    activations: float  # of one micro-batch
    passing: float  # gradients of one layer's activations; when they are there, logits are not
    logits: float  # a chunk of them, its gradient and the output layer's, as the parameters are; the head's rows

    @property
    def kept(self) -> float:
        """What stays between steps, and what `offload` gives away while the team acts."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """At the peak of an update."""
        return self.kept + self.shared + self.activations + max(self.passing, self.logits)

    def beside(self, other: TrainerMemory) -> TrainerMemory:
        """With another trainer on the same rank, of which one computes at a time."""
        at_a_time = ("shared", "activations", "passing", "logits")
        joined = {field.name: max if field.name in at_a_time else add for field in fields(self)}
        return TrainerMemory(
            **{n: join(getattr(self, n), getattr(other, n)) for n, join in joined.items()}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerKind:
    """What of a trainer's settings its memory depends on, besides its layout."""

    bf16: bool
    distributed_optimizer: bool
    recompute: Recompute
    tokens: int  # of a micro-batch
    fused: bool = True  # SwiGLU, and attention in bfloat16, as on a GPU; torch's operations on a CPU keep more
    host_moments: bool = False
    agents: int = 1  # that share the policy
    lora: LoraConfig | None = None
    value_head: bool = False  # of a critic, in place of the output layer
    on_base: bool = False  # the frozen weights are another trainer's, on the same ranks


@lru_cache(maxsize=256)
def count_parameters(a: Architecture, *, value_head: bool = False) -> int:
    """Parameters of a model, its embedding unpadded and counted once if it is the output layer too."""
    return rank_parameters(a, ParallelLayout(), value_head=value_head)


@lru_cache(maxsize=4096)
def rank_parameters(a: Architecture, layout: ParallelLayout, *, value_head: bool = False) -> int:
    """Parameters that the fullest rank of a layout holds.

    Tensor parallelism cuts matrices and biases and repeats norms and routers; the first pipeline stage has the
    embedding, the last the output layer, which with tied embeddings is a copy.
    """
    layers = [_layer_parameters(a, layer, layout) for layer in range(a.layers)]
    rows = a.vocab_padded(layout.tp) // layout.tp * a.hidden
    tied = a.tied and not value_head
    output = a.hidden if value_head else rows
    if layout.pp == 1:
        return sum(layers) + rows + a.hidden + (0 if tied else output)
    size = a.layers // layout.pp  # with vpp, too: stages of a rank add up to as many
    stages = [sum(layers[first : first + size]) for first in range(0, a.layers, size)]
    stages[0] += rows
    stages[-1] += a.hidden + output
    return max(stages)


def _layer_parameters(a: Architecture, layer: int, layout: ParallelLayout) -> int:
    queries, values = a.heads * a.head_dim, a.kv_heads * a.head_dim
    cut = 2 * a.hidden * (queries + values) + (queries + 2 * values if a.qkv_bias else 0)
    whole = 2 * a.hidden + (2 * a.head_dim if a.qk_norm else 0)
    if a.experts is not None and a.experts.sparse[layer]:
        experts = 3 * a.hidden * a.experts.ffn * a.experts.count // layout.ep
        return (cut + experts) // layout.tp + whole + a.experts.count * a.hidden
    return (cut + 3 * a.hidden * a.ffn) // layout.tp + whole


def adapter_parameters(a: Architecture, layout: ParallelLayout, lora: LoraConfig) -> int:
    """Parameters of adapters on a rank: B is cut where rows are, A where inputs are (o and down)."""
    per_layer = 0
    for target in lora.targets:
        rows, inputs = a.projections[target]
        per_layer += (
            rows + inputs // layout.tp if target in ("o", "down") else rows // layout.tp + inputs
        )
    return lora.rank * per_layer * a.layers // layout.pp


@lru_cache(maxsize=65536)
def trainer_memory(a: Architecture, layout: ParallelLayout, kind: TrainerKind) -> TrainerMemory:
    """What the fullest rank of a trainer holds.

    Bytes of a parameter (Rajbhandari et al. 2020, arXiv 1910.02054, §3.1; Megatron-core, docs of the distributed
    optimizer): bfloat16 2 of weight, 4 of gradient, 12 of master weight and moments; float32 4, 4 and 8. The
    distributed optimizer divides the last by the data- and context-parallel ranks. A frozen base has its weights only.
    """
    here = rank_parameters(a, layout, value_head=kind.value_head)
    added = adapter_parameters(a, layout, kind.lora) if kind.lora is not None else 0
    trained = added if kind.lora is not None else here
    weight, state = (2, 12) if kind.bf16 else (4, 8)
    ranks = layout.dp * layout.cp if kind.distributed_optimizer else 1
    rows = a.vocab_padded(layout.tp) // layout.tp
    moments = 8 * trained / ranks if kind.host_moments else 0.0
    largest = max(
        rows * a.hidden, 2 * a.hidden * a.ffn // layout.tp
    )  # the embedding, or gate and up together
    of_weight = 0 if kind.lora is not None else weight * rows * a.hidden
    ffn = a.ffn if a.experts is None else max(a.ffn, a.experts.per_token * a.experts.ffn)
    rows_of_head = (
        2 * weight * kind.tokens / layout.cp * a.hidden
    )  # as if every token were asked for
    return TrainerMemory(
        weights=weight * ((a.hidden * kind.value_head if kind.on_base else here) + added),
        gradients=4 * trained,
        optimizer=state * trained / ranks - moments + min(moments, 8 * largest),
        on_host=moments,
        summed=4.0 * trained if kind.agents > 1 == ranks else 0.0,
        shared=4 * trained / ranks if kind.agents > 1 < ranks else 0.0,
        activations=activation_bytes(a, layout, kind),
        # of both halves and their product, and of hidden states around a layer
        passing=weight * kind.tokens / layout.cp * (3 * ffn / layout.tp + 4 * a.hidden),
        logits=0 if kind.value_head else LOGITS * (1 + weight / 4) + of_weight + rows_of_head,
    )


def activation_bytes(a: Architecture, layout: ParallelLayout, kind: TrainerKind) -> float:
    """What the layers of a pipeline stage save of a micro-batch.

    As Korthikanti et al. 2022 (arXiv 2205.05198, §4) count, for the local layers, without dropout, and with attention
    that keeps no scores. Per token and layer, in elements: of each norm its input and output; queries, keys and values
    (queries again with norms of their own), queries and keys after their rotation, attention's output, and 3 f (two
    halves and their product). Experts save that of those a token is sent to, scaled as well, and their inputs. The last
    norm saves as others do. Without fused kernels silu saves its result, and attention in bfloat16 what it computes in
    float32. Without sequence parallelism what norms save is on every tensor-parallel rank. Selective recomputation
    leaves out norms' outputs and the products; full keeps a layer's input, and all of the one layer that is computed
    again. A pipeline holds as many micro-batches as it has stages.
    """
    queries, values, wide = a.heads * a.head_dim, a.kv_heads * a.head_dim, 2 if kind.bf16 else 1
    again = kind.recompute == "selective"
    norm = 1 if again else 2
    cut = 3 * queries + 3 * values + a.qk_norm * queries
    if kind.bf16 and not kind.fused:
        cut += 2 * queries + values + a.qk_norm * (queries + 2 * values)
    gated = 2 if again else 3 if kind.fused else 4  # feed-forward widths
    mlps = [gated * a.ffn]
    if a.experts is not None:
        sent = a.experts.per_token * ((gated + (not again)) * a.experts.ffn + a.hidden) + a.hidden
        mlps = [sent if sparse else gated * a.ffn for sparse in a.experts.sparse]
    full, repeated = kind.recompute == "full", layout.tp if layout.sp else 1
    mlp = max(mlps) if full else sum(mlps) / len(mlps)
    layer = 2 * norm * a.hidden / repeated + (cut + mlp) / layout.tp
    layers, entry = a.layers // layout.pp, a.hidden / repeated
    layer += (
        3 * kind.lora.rank * len(kind.lora.targets) if kind.lora is not None else 0
    )  # A x of each, and its parts
    elements = entry * layers * layout.pp + layer if full else layer * layers * layout.pp
    return (2 if kind.bf16 else 4) * kind.tokens / layout.cp * (elements + 2 * wide * entry)


@lru_cache(maxsize=256)
def engine_weights(a: Architecture, tp: int) -> float:
    """Weights of a server's GPU, in bfloat16."""
    return 2 * rank_parameters(a, ParallelLayout(tp=tp))


def kv_bytes(a: Architecture, tp: int) -> int:
    """Keys and values of one token on a server's GPU, in bfloat16 (Pope et al. 2022, arXiv 2211.05102, §3.3).

    With more GPUs than key/value heads every head is on several.
    """
    return 2 * 2 * a.layers * max(1, a.kv_heads // tp) * a.head_dim


def checkpoint_bytes(a: Architecture, kinds: Mapping[str, TrainerKind]) -> float:
    """One checkpoint of a policy's trainer and critic: float32 weights and moments of what is trained."""
    trained = (
        adapter_parameters(a, ParallelLayout(), k.lora)
        if k.lora
        else count_parameters(a, value_head=k.value_head)
        for k in kinds.values()
    )
    return 12 * sum(trained)
