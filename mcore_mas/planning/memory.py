"""Memory of one rank of a trainer and of one GPU of an engine, by formula; all sizes are bytes.

Weights, gradients and optimizer state are counted tensor by tensor, activations as the layers save
them. `tests/unit/planning/test_trainer_memory.py` compares the formulas with real trainers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mcore_mas.config.policy import LoraConfig
from rollout.engines.embedded.gpu_memory import token_bytes
from rollout.models.architecture import Architecture
from rollout.models.layout import ParallelLayout, Recompute

# float32 logits that a rank holds at a time, on a GPU and on a CPU
# (`CHUNK_BYTES` of `mcore_mas/megatron/model/head.py`)
LOGITS_BYTES = 1 << 30
CPU_LOGITS_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The settings of a trainer or critic that its memory depends on, besides its layout."""

    bf16: bool
    distributed_optimizer: bool
    recompute: Recompute
    microbatch_tokens: int
    # SwiGLU and attention run in fused kernels, as on a GPU; PyTorch's operations on a CPU save more
    fused: bool = True
    host_moments: bool = False  # Adam's moments are in host memory
    agents: int = 1  # agents that train the policy
    lora: LoraConfig | None = None
    value_head: bool = False  # a critic, with a value head in place of the output layer
    borrows_base: bool = False  # another trainer on the same ranks holds the frozen weights
    layers: Literal["local", "te"] = "local"  # linear layers of Megatron or of Transformer Engine
    fp8: bool = False  # layers multiply in FP8


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes that one rank of a trainer holds, on the GPU unless the name says host."""

    weights: float
    gradients: float  # float32
    optimizer: float  # float32 master weights and Adam's moments, or those not in host memory
    host_moments: float  # Adam's moments in host memory
    # Sum of the agents' gradients: in host memory if each rank steps all weights, on the GPU if
    # the distributed optimizer gives each rank a part of them.
    host_gradient_sum: float
    gradient_sum: float
    activations: float  # of one micro-batch
    # Two peaks of the backward pass that do not coincide: gradients of one layer's activations,
    # and a chunk of logits with its gradient and those of the output layer.
    activation_gradients: float
    logits: float

    @property
    def persistent(self) -> float:
        """Bytes that stay between steps, and that `offload` frees during a rollout."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> float:
        """Bytes at the peak of an update."""
        transient = self.activations + max(self.activation_gradients, self.logits)
        return self.persistent + self.gradient_sum + transient


def combine_on_rank(trainers: Sequence[TrainerMemory]) -> TrainerMemory:
    """Return the memory of a rank that several trainers share, of which one computes at a time.

    A trainer frees its gradient sum on the GPU after its update, and retains the one in host memory.
    """
    return TrainerMemory(
        weights=sum(trainer.weights for trainer in trainers),
        gradients=sum(trainer.gradients for trainer in trainers),
        optimizer=sum(trainer.optimizer for trainer in trainers),
        host_moments=sum(trainer.host_moments for trainer in trainers),
        host_gradient_sum=sum(trainer.host_gradient_sum for trainer in trainers),
        gradient_sum=max(trainer.gradient_sum for trainer in trainers),
        activations=max(trainer.activations for trainer in trainers),
        activation_gradients=max(trainer.activation_gradients for trainer in trainers),
        logits=max(trainer.logits for trainer in trainers),
    )


def count_parameters(architecture: Architecture, *, value_head: bool = False) -> int:
    """Count the parameters of a model.

    The embedding is not padded, and is counted once if it is also the output layer.
    """
    return count_rank_parameters(architecture, ParallelLayout(), value_head=value_head)


def count_rank_parameters(
    architecture: Architecture, layout: ParallelLayout, *, value_head: bool = False
) -> int:
    """Count the parameters of the rank that has most of them.

    Tensor parallelism splits matrices and biases and replicates norms and routers. The first
    pipeline stage has the embedding and the last one the output layer, which is a copy of the
    embedding if they are tied.
    """
    layers = [
        _count_layer_parameters(architecture, layer, layout) for layer in range(architecture.layers)
    ]
    embedding = architecture.vocab_padded(layout.tp) // layout.tp * architecture.hidden
    output_layer = architecture.hidden if value_head else embedding
    final_norm = architecture.hidden

    if layout.pp == 1:
        if architecture.tied and not value_head:
            output_layer = 0
        return sum(layers) + embedding + final_norm + output_layer

    # With virtual stages (vpp) the parts of a rank add up to a stage of the same size.
    layers_per_stage = architecture.layers // layout.pp
    stages = [
        sum(layers[first : first + layers_per_stage])
        for first in range(0, architecture.layers, layers_per_stage)
    ]
    stages[0] += embedding
    stages[-1] += final_norm + output_layer
    return max(stages)


def _count_layer_parameters(architecture: Architecture, layer: int, layout: ParallelLayout) -> int:
    hidden = architecture.hidden
    queries = architecture.heads * architecture.head_dim
    keys = architecture.kv_heads * architecture.head_dim  # and as many values

    attention = 2 * hidden * (queries + keys)
    if architecture.qkv_bias:
        attention += queries + 2 * keys
    norms = 2 * hidden
    if architecture.qk_norm:
        norms += 2 * architecture.head_dim

    experts = architecture.experts
    if experts is not None and experts.sparse[layer]:
        expert_weights = 3 * hidden * experts.ffn * experts.count // layout.ep
        router = experts.count * hidden
        return (attention + expert_weights) // layout.tp + norms + router

    mlp = 3 * hidden * architecture.ffn
    return (attention + mlp) // layout.tp + norms


def count_adapter_parameters(
    architecture: Architecture, layout: ParallelLayout, lora: LoraConfig
) -> int:
    """Count the parameters of a rank's adapters.

    Tensor parallelism splits B where the projection is split by rows, and A where it is split by
    inputs, which are those of `o` and `down`.
    """
    per_layer = 0
    for target in lora.targets:
        rows, inputs = architecture.projections[target]
        if target in ("o", "down"):
            per_layer += rows + inputs // layout.tp
        else:
            per_layer += rows // layout.tp + inputs
    return lora.rank * per_layer * architecture.layers // layout.pp


def estimate_trainer_memory(
    architecture: Architecture, layout: ParallelLayout, settings: TrainerSettings
) -> TrainerMemory:
    """Estimate the memory of the trainer's rank that holds most.

    A parameter in bfloat16 takes 2 bytes of weight, 4 of gradient and 12 of master weight and
    moments; in float32 it takes 4, 4 and 8 (Rajbhandari et al. 2020, arXiv 1910.02054, §3.1, and
    Megatron-core's documentation of the distributed optimizer). The distributed optimizer divides
    the optimizer state by the data- and context-parallel ranks. A frozen base has weights only.
    """
    parameters = count_rank_parameters(architecture, layout, value_head=settings.value_head)
    adapters = 0
    trained = parameters
    if settings.lora is not None:
        adapters = count_adapter_parameters(architecture, layout, settings.lora)
        trained = adapters

    weight_bytes = 2 if settings.bf16 else 4
    state_bytes = 12 if settings.bf16 else 8
    optimizer_ranks = layout.dp * layout.cp if settings.distributed_optimizer else 1
    optimizer = state_bytes * trained / optimizer_ranks
    moments = 8 * trained / optimizer_ranks if settings.host_moments else 0.0
    if settings.host_moments:
        # A step fetches the moments of one weight at a time, so those of the largest must fit.
        optimizer += min(moments, 8 * _largest_weight(architecture, layout)) - moments

    base_parameters = parameters
    if settings.borrows_base:
        base_parameters = architecture.hidden if settings.value_head else 0

    host_gradient_sum = 0.0
    gradient_sum = 0.0
    if settings.agents > 1:
        if optimizer_ranks > 1:
            gradient_sum = 4 * trained / optimizer_ranks
        else:
            host_gradient_sum = 4.0 * trained

    return TrainerMemory(
        weights=weight_bytes * (base_parameters + adapters),
        gradients=4 * trained,
        optimizer=optimizer,
        host_moments=moments,
        host_gradient_sum=host_gradient_sum,
        gradient_sum=gradient_sum,
        activations=activation_bytes(architecture, layout, settings),
        activation_gradients=_activation_gradient_bytes(architecture, layout, settings),
        logits=_logits_bytes(architecture, layout, settings),
    )


def _largest_weight(architecture: Architecture, layout: ParallelLayout) -> int:
    """Return the elements of a rank's largest weight: the embedding, or a gate and up projection.

    The weights of a layer's experts are one parameter, except with Transformer Engine.
    """
    embedding = architecture.vocab_padded(layout.tp) // layout.tp * architecture.hidden
    gate_and_up = 2 * architecture.hidden * architecture.ffn // layout.tp
    experts = architecture.experts
    if experts is None:
        return max(embedding, gate_and_up)

    rank_experts = experts.count // layout.ep
    stacked_experts = rank_experts * 2 * architecture.hidden * experts.ffn // layout.tp
    return max(embedding, gate_and_up, stacked_experts)


def _activation_gradient_bytes(
    architecture: Architecture, layout: ParallelLayout, settings: TrainerSettings
) -> float:
    """Return the bytes of the gradients of one layer's activations.

    These activations are the gate, the up projection and their product, and four hidden states.
    """
    ffn = architecture.ffn
    if architecture.experts is not None:
        ffn = max(ffn, architecture.experts.per_token * architecture.experts.ffn)
    elements = 3 * ffn / layout.tp + 4 * architecture.hidden
    return _element_bytes(settings) * settings.microbatch_tokens / layout.cp * elements


def _logits_bytes(
    architecture: Architecture, layout: ParallelLayout, settings: TrainerSettings
) -> float:
    """Return the bytes of a chunk of logits, its gradient, and the tensors of the output layer.

    The output layer has a gradient unless it is frozen. Its input, and the gradient of its input,
    are counted as if every token of the micro-batch were trained.
    """
    if settings.value_head:
        return 0.0
    element_bytes = _element_bytes(settings)
    chunk = LOGITS_BYTES if settings.fused else CPU_LOGITS_BYTES
    chunk_and_gradient = chunk * (1 + element_bytes / 4)
    hidden_states = 2 * element_bytes * settings.microbatch_tokens / layout.cp * architecture.hidden
    output_layer = architecture.vocab_padded(layout.tp) // layout.tp * architecture.hidden
    weight_gradient = 0 if settings.lora is not None else element_bytes * output_layer
    return chunk_and_gradient + weight_gradient + hidden_states


def activation_bytes(
    architecture: Architecture, layout: ParallelLayout, settings: TrainerSettings
) -> float:
    """Return the bytes of activations that a rank's layers save for the backward pass.

    They are counted as in Korthikanti et al. 2022 (arXiv 2205.05198, §4), for layers without
    dropout and for attention that saves no scores. A pipeline holds as many micro-batches as it
    has stages. Full recomputation saves the input of every layer, and everything of the one layer
    that is being recomputed. Products in FP8 also save their weights in FP8.
    """
    # Without sequence parallelism every tensor-parallel rank saves the whole hidden states.
    hidden = architecture.hidden / (layout.tp if layout.sp else 1)
    norm_elements = _tensors_of_norms(architecture, settings) * hidden
    split_elements = _attention_elements(architecture, settings) + _mlp_elements(
        architecture, settings
    )
    layer_elements = norm_elements + split_elements / layout.tp
    if settings.lora is not None:
        layer_elements += 3 * settings.lora.rank * len(settings.lora.targets)

    # Layers of the stage, times the micro-batches that it holds.
    layers_in_flight = architecture.layers // layout.pp * layout.pp
    saved_elements = layer_elements * layers_in_flight
    if settings.recompute == "full":
        saved_elements = hidden * layers_in_flight + layer_elements

    elements_per_float32 = 2 if settings.bf16 else 1
    final_norm_elements = 2 * elements_per_float32 * hidden
    tokens = settings.microbatch_tokens / layout.cp
    saved = _element_bytes(settings) * tokens * (saved_elements + final_norm_elements)
    return saved + _fp8_weight_bytes(architecture, layout, settings)


def _element_bytes(settings: TrainerSettings) -> int:
    return 2 if settings.bf16 else 4


def _tensors_of_norms(architecture: Architecture, settings: TrainerSettings) -> float:
    """Return how many tensors like the hidden states the two norms of a mean layer save.

    Each norm saves its input, and the linear layer after it saves the output of the norm.
    Selective recomputation drops the output, except with Transformer Engine's
    `LayerNormLinear`: it computes norm and product in one operation, and saves both tensors
    (`tensors_to_save` in its layernorm_linear.py). Only the norm before experts is separate.
    """
    recomputed_output = 0 if settings.recompute == "selective" else 1
    separate_norm = 1 + recomputed_output
    if settings.layers == "local":
        return 2 * separate_norm

    norm_with_linear = 1 + _product_input(settings)
    experts = architecture.experts
    sparse_share = 0.0
    if experts is not None:
        sparse_share = sum(experts.sparse) / len(experts.sparse)
    return norm_with_linear + (1 - sparse_share) * norm_with_linear + sparse_share * separate_norm


def _product_input(settings: TrainerSettings) -> float:
    """Return the elements that a product saves for each element of its input, which has half as many bytes in FP8."""
    return 0.5 if settings.fp8 else 1.0


def _fp8_weight_bytes(
    architecture: Architecture, layout: ParallelLayout, settings: TrainerSettings
) -> float:
    """Return the bytes of weights in FP8 that products save until the backward pass.

    Each product quantizes its weight, in rows and in columns, in every micro-batch.
    """
    if not settings.fp8:
        return 0.0
    layers = [
        _count_layer_parameters(architecture, layer, layout) for layer in range(architecture.layers)
    ]
    if settings.recompute == "full":
        return 2.0 * max(layers)
    return 2.0 * sum(layers)  # a stage has 1 / pp of the layers, and pp micro-batches


def _attention_elements(architecture: Architecture, settings: TrainerSettings) -> float:
    """Return the elements that attention saves of one token, before tensor parallelism."""
    queries = architecture.heads * architecture.head_dim
    keys = architecture.kv_heads * architecture.head_dim  # and as many values

    projections = queries + 2 * keys
    rotated = queries + keys
    output = queries
    elements: float = projections + rotated + output
    if settings.layers == "te":
        # The norms of queries and keys are operations of their own, whose input is a copy.
        if architecture.qk_norm:
            elements += queries + keys
        if settings.fp8:
            elements += _product_input(settings) * queries  # the output in FP8
    elif architecture.qk_norm and not settings.fused:
        elements += queries

    if settings.bf16 and not settings.fused:
        # The unfused kernels compute in float32 and save that as well.
        elements += 2 * queries + keys
        if architecture.qk_norm:
            elements += queries + 2 * keys
    return elements


def _mlp_elements(architecture: Architecture, settings: TrainerSettings) -> float:
    """Return the elements that the MLP saves of one token, before tensor parallelism.

    This is the mean over the layers. With full recomputation it is that of the largest layer, as
    only one layer is saved completely.
    """
    gate_and_up = 2
    product_input = _product_input(settings)
    # Unless it is recomputed: the product of gate and up, and without fusion the result of SiLU.
    dense_widths = gate_and_up + product_input + (0 if settings.fused else 1)
    # An expert scales the product, and saves both. Transformer Engine's experts are not fused.
    fused_experts = settings.fused and settings.layers == "local"
    expert_widths = gate_and_up + 1 + product_input + (0 if fused_experts else 1)
    if settings.recompute == "selective":
        dense_widths = gate_and_up
        expert_widths = gate_and_up

    dense = dense_widths * architecture.ffn
    experts = architecture.experts
    if experts is None:
        return dense

    per_expert = expert_widths * experts.ffn + product_input * architecture.hidden
    sparse = experts.per_token * per_expert + architecture.hidden
    layers = [sparse if is_sparse else dense for is_sparse in experts.sparse]
    return max(layers) if settings.recompute == "full" else sum(layers) / len(layers)


def checkpoint_bytes(architecture: Architecture, trainers: Iterable[TrainerSettings]) -> float:
    """Return the size of one checkpoint of a policy: trained weights and their moments in float32.

    Args:
        architecture: architecture of the policy's model.
        trainers: the trainer of the policy and, if it has one, its critic.
    """
    trained = 0
    for settings in trainers:
        if settings.lora is not None:
            trained += count_adapter_parameters(architecture, ParallelLayout(), settings.lora)
        else:
            trained += count_parameters(architecture, value_head=settings.value_head)
    return 12 * trained


def engine_weight_bytes(architecture: Architecture, tp: int) -> float:
    """Return the weights on one GPU of an engine, in bfloat16."""
    return 2 * count_rank_parameters(architecture, ParallelLayout(tp=tp))


def kv_bytes_per_token(architecture: Architecture, tp: int) -> int:
    """Return the KV cache of one token on one GPU of an engine, in bfloat16.

    See Pope et al. 2022 (arXiv 2211.05102, §3.3). If there are more GPUs than key-value heads,
    each head is on several of them.
    """
    heads = max(1, architecture.kv_heads // tp)
    elements = 2 * architecture.layers * heads * architecture.head_dim  # keys and values
    return 2 * elements


def embedded_weight_bytes(architecture: Architecture, *, bf16: bool) -> float:
    """Return the weights of an embedded engine on its device."""
    return (2 if bf16 else 4) * count_parameters(architecture)


def embedded_host_bytes(architecture: Architecture, *, trained: bool) -> float:
    """Return the float32 weights of an embedded engine in host memory.

    The engine of a trained policy has two buffers, one of which the trainer writes.
    """
    buffers = 2 if trained else 1
    return 4 * buffers * count_parameters(architecture)


def embedded_sequence_bytes(architecture: Architecture, max_length: int, *, bf16: bool) -> float:
    """Return the keys and values of one slot of an embedded engine.

    Args:
        bf16: True on a GPU with a policy in bfloat16; on a CPU they are in float32.
    """
    return token_bytes(architecture, bf16=bf16) * max_length
