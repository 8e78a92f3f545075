"""Construction of Megatron's GPT model for an architecture: settings, and modules of its layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.moe import fused_a2a, moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from mcore_mas.megatron.device import rank_device, use_triton
from mcore_mas.megatron.model.attention import ContextAttention, FusedSelfAttention, TreeAttention
from mcore_mas.megatron.model.cpu_ops import rotate_on_cpu
from mcore_mas.megatron.model.decoder import PackedGPTModel
from mcore_mas.megatron.model.experts import GroupedExperts, SortedDispatcher
from mcore_mas.megatron.model.linear import ColumnLinear, LastLinear, RowLinear
from mcore_mas.megatron.model.mlp import GatedMLP
from mcore_mas.megatron.model.norm import (
    HeadNorm,
    ResidualAddition,
    ResidualNorm,
    RMSNorm,
)
from mcore_mas.megatron.model.router_replay import replay_routing
from mcore_mas.megatron.spec import TrainerSpec
from rollout.base.errors import ModelError
from rollout.models.architecture import Architecture
from rollout.models.layout import Fp8Recipe


def layer_specs(
    config: TransformerConfig, kind: str, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the specs of the layers of one pipeline stage.

    Args:
        config: config of the model.
        kind: key of `LAYERS`.
        vp_stage: number of the stage among those of this rank, if it has several.
    """
    make_layer_spec, get_norm_class = LAYERS[kind]
    dense = make_layer_spec(config, None)
    layers = [dense] * get_num_layers_to_build(config, vp_stage)
    if config.num_moe_experts:
        sparse = make_layer_spec(config, config.num_moe_experts)
        first_layer = get_transformer_layer_offset(config, vp_stage)
        for index in range(len(layers)):
            if config.moe_layer_freq[first_layer + index]:
                layers[index] = sparse
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=get_norm_class())


def _core_attention(config: TransformerConfig) -> type[torch.nn.Module]:
    """Return the class of a layer's attention over trees, without its linear layers."""
    return ContextAttention if config.context_parallel_size > 1 else TreeAttention


def _local_layer_spec(config: TransformerConfig, experts: int | None) -> ModuleSpec:
    """Return the spec of a layer that needs no Transformer Engine, with our norms, linear layers and experts.

    Args:
        config: config of the model.
        experts: number of experts; None for a dense layer.
    """
    layer = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    layer.submodules.input_layernorm = _hidden_norm()
    layer.submodules.pre_mlp_layernorm = _hidden_norm()
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = _core_attention(config)
    attention.linear_qkv = ColumnLinear
    attention.linear_proj = RowLinear
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    if use_triton(rank_device()):
        _use_fused_attention(layer.submodules.self_attention)
    mlp = layer.submodules.mlp
    # From megatron-core 0.18 on, the MLP is a partial function.
    mlp = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    if experts is None:
        mlp.linear_fc1 = ColumnLinear
        mlp.linear_fc2 = LastLinear if config.recompute_granularity == "full" else RowLinear
        _use_gated_mlp(layer)
    else:
        mlp.experts = GroupedExperts
    return layer


def _hidden_norm() -> type[RMSNorm]:
    """Return the class of the norms of hidden states."""
    return ResidualNorm if use_triton(rank_device()) else RMSNorm


def _fuse_residuals(decoder: TransformerBlock) -> None:
    """Compute each residual addition in the kernel of the norm that follows it.

    With full recomputation a layer is recomputed by itself, so its last addition is separate. With
    selective recomputation, the norms of the layers free their outputs until the backward pass.
    """
    next_norms = [layer.input_layernorm for layer in decoder.layers[1:]]
    next_norms.append(decoder.final_layernorm)  # None, except in the last pipeline stage
    for layer, next_norm in zip(decoder.layers, next_norms, strict=True):
        if decoder.config.recompute_granularity == "full":
            next_norm = None
        layer.self_attn_bda = ResidualAddition(layer.input_layernorm, layer.pre_mlp_layernorm)
        layer.mlp_bda = ResidualAddition(layer.pre_mlp_layernorm, next_norm)
        for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
            norm.frees_output = decoder.config.recompute_granularity == "selective"
        # `frees_output` replaces Megatron's recomputation of norms.
        layer.recompute_input_layernorm = False
        layer.recompute_pre_mlp_layernorm = False


def _use_fused_attention(attention: ModuleSpec) -> None:
    """Make a layer build `FusedSelfAttention` in place of Megatron's self-attention."""
    attention.module = FusedSelfAttention
    if attention.submodules.q_layernorm is RMSNorm:
        attention.submodules.q_layernorm = HeadNorm
        attention.submodules.k_layernorm = HeadNorm


def _transformer_engine_layer_spec(config: TransformerConfig, experts: int | None) -> ModuleSpec:
    """Return the spec of a layer with Transformer Engine's linear layers, norms and experts.

    All experts of a layer run in one grouped product. Transformer Engine's attention has no layout
    for shared prompts, so it is used only for micro-batches whose sequences share nothing.
    """
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts, moe_grouped_gemm=True, qk_layernorm=config.qk_layernorm
    )
    layer.submodules.self_attention.submodules.core_attention = ModuleSpec(
        module=_core_attention(config), params={"uses_te_kernel": True}
    )
    if experts is None:
        _use_gated_mlp(layer)
    return layer


def _use_gated_mlp(layer: ModuleSpec) -> None:
    """Make a dense layer build `GatedMLP` in place of Megatron's MLP."""
    mlp = layer.submodules.mlp
    if isinstance(mlp, partial):  # megatron-core 0.18 and later
        layer.submodules.mlp = partial(GatedMLP.as_mlp_submodule, **mlp.keywords)
    else:
        mlp.module = GatedMLP


def _transformer_engine_norm() -> Any:
    # Transformer Engine is an optional dependency.
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


# By kind (`TrainerSpec.layers`): a function that returns the spec of a layer, and a function that
# returns the class of the final norm. The second argument of the former is the number of experts of
# a sparse layer, or None.
LAYERS: dict[
    str, tuple[Callable[[TransformerConfig, int | None], ModuleSpec], Callable[[], Any]]
] = {
    "local": (_local_layer_spec, _hidden_norm),
    "te": (_transformer_engine_layer_spec, _transformer_engine_norm),
}


# Smallest compute capability of a GPU, by recipe of FP8: Ada, Hopper, Blackwell.
_FP8_CAPABILITIES: dict[Fp8Recipe, tuple[int, int]] = {
    "tensorwise": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
}


def _leave_uninitialised(weight: Tensor) -> Tensor:
    """Leave a weight uninitialised, because it is loaded later, or replaced by that of a shared base model.

    On a CPU, a weight that is replaced never takes up memory, because nothing was written to it.
    """
    return weight


def _expert_settings(architecture: Architecture, spec: TrainerSpec) -> dict[str, Any]:
    """Return Megatron's settings of experts, with Hugging Face's routing; {} for dense models.

    There is no auxiliary loss. It is a product of sums over a micro-batch, and would depend on how
    samples are packed and assigned to ranks. It would also pull the router away from the one that
    the engine sampled with.
    """
    if architecture.experts is None:
        return {}
    return {
        "num_moe_experts": architecture.experts.count,
        "moe_router_topk": architecture.experts.per_token,
        "moe_ffn_hidden_size": architecture.experts.ffn,
        "moe_layer_freq": [int(sparse) for sparse in architecture.experts.sparse],
        # If the probabilities of the k chosen experts are normalised to a sum of 1, they are a
        # softmax over these k alone. Otherwise they are part of the softmax over all experts.
        "moe_router_pre_softmax": not architecture.experts.normalised,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": spec.layers == "te",
        "moe_permute_fusion": spec.layers == "te"
        and getattr(moe_utils, "fused_permute", None) is not None,
        "expert_model_parallel_size": spec.ep,
    }


def _parallel_settings(spec: TrainerSpec) -> dict[str, Any]:
    """Return the settings of the parallel layout and of the communication between its ranks."""
    # DeepEP sums bfloat16 only.
    uses_deep_ep = fused_a2a.HAVE_DEEP_EP and spec.layers == "te" and spec.ep > 1 and spec.bf16
    return {
        "tensor_model_parallel_size": spec.tp,
        "pipeline_model_parallel_size": spec.pp,
        "virtual_pipeline_model_parallel_size": spec.vpp if spec.vpp > 1 else None,
        "sequence_parallel": spec.sp,
        "context_parallel_size": spec.cp,
        "cp_comm_type": "a2a",
        # Batched sends and receives would end with torch.cuda.synchronize().
        "batch_p2p_comm": False,
        # Micro-batches differ in length, unless stages are interleaved (see `Pipeline`).
        "variable_seq_lengths": spec.vpp == 1,
        # Megatron refuses its default dispatcher, "allgather", with variable lengths, even for dense
        # models.
        "moe_token_dispatcher_type": "flex" if uses_deep_ep else "alltoall",
    }


def _install_fused_rope() -> bool:
    """Make Megatron rotate queries and keys by `rotate_on_cpu` on a CPU.

    On a GPU nothing is installed: `FusedSelfAttention` rotates them itself, and Transformer Engine,
    if it is installed, has a fused function that Megatron calls.

    Returns:
        True if Megatron has a fused function of rotary embeddings (RoPE).
    """
    if rank_device().type == "cpu":
        rope_utils.fused_apply_rotary_pos_emb = rotate_on_cpu
    return rope_utils.fused_apply_rotary_pos_emb is not None


def check_fp8_support(recipe: Fp8Recipe) -> None:
    """Raise ModelError if this rank's GPU cannot multiply in FP8 with a recipe."""
    if not torch.cuda.is_available():
        return  # only tests get here: without CUDA, Transformer Engine is a stand-in
    capability = torch.cuda.get_device_capability()
    needed = _FP8_CAPABILITIES[recipe]
    if capability < needed:
        raise ModelError(
            f"fp8_recipe: {recipe} needs a GPU of compute capability {needed[0]}.{needed[1]}, and "
            f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}; use fp8: null"
        )


def transformer_config(architecture: Architecture, spec: TrainerSpec) -> TransformerConfig:
    """Return Megatron's settings of a model that is trained as `spec` says.

    Raises:
        ModelError: the GPU cannot multiply in FP8 with the recipe of `spec`.
    """
    dtype = torch.bfloat16 if spec.bf16 else torch.float32
    has_te_experts = architecture.experts is not None and spec.layers == "te"
    # In Megatron's deterministic mode our modules compute the same bits as the embedded engine's
    # `ExactDecoder`, if the model is dense, without adapters and on one rank. That decoder exists only
    # for float32 on a CPU. Elsewhere `spec.deterministic` changes only Transformer Engine's attention,
    # see `set_deterministic_kernels`.
    matches_engine = spec.deterministic and not spec.bf16 and rank_device().type == "cpu"
    if spec.fp8 is not None:
        check_fp8_support(spec.fp8_recipe)
    has_fused_rope = _install_fused_rope()
    return TransformerConfig(
        # architecture
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **_expert_settings(architecture, spec),
        **_parallel_settings(spec),
        # precision, recomputation and initialisation
        bf16=spec.bf16,
        deterministic_mode=matches_engine,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        fp8=spec.fp8,
        fp8_recipe=spec.fp8_recipe if spec.fp8 else "delayed",  # Megatron's default, not used
        # Weights are rounded to FP8 in every micro-batch. Copies in FP8 would stay on the GPU while
        # the trainer sleeps, and would be stale after other weights are loaded.
        disable_parameter_transpose_cache=spec.fp8 is not None,
        recompute_granularity=None if spec.recompute == "none" else spec.recompute,
        recompute_method="uniform" if spec.recompute == "full" else None,
        recompute_num_layers=1 if spec.recompute == "full" else None,
        # Selective recomputation also recomputes SwiGLU. `gated_projection` needs no setting for it;
        # "moe_act" recomputes the SwiGLU of Transformer Engine's experts.
        recompute_modules=["layernorm", "moe_act"] if has_te_experts else ["layernorm"],
        # Initialisation also marks the shards of parameters. A shard without a mark would be taken
        # for a duplicate, and be left out of the gradient norm.
        perform_initialization=True,
        init_method=_leave_uninitialised,
        output_layer_init_method=_leave_uninitialised,
        embedding_init_method=_leave_uninitialised,
        # Gradients are accumulated in float32, see apex_replacements.py.
        gradient_accumulation_fusion=torch.cuda.is_available(),
        masked_softmax_fusion=False,
        bias_activation_fusion=False,  # see GatedMLP
        bias_dropout_fusion=False,
        apply_rope_fusion=has_fused_rope,
        persist_layer_norm=False,
        # Gradients are summed over ranks and not rescaled: the token weights are normalised
        # already.
        calculate_per_token_loss=True,
    )


def build_model(
    architecture: Architecture, spec: TrainerSpec, vp_stage: int | None = None
) -> PackedGPTModel:
    """Return this rank's shard of one pipeline stage; its weights are not loaded yet.

    Args:
        architecture: architecture of the model.
        spec: specification of the trainer.
        vp_stage: number of the stage, if this rank has several.
    """
    config = transformer_config(architecture, spec)
    value_head = spec.head == "value"
    model = PackedGPTModel(
        config,
        layer_specs(config, spec.layers, vp_stage),
        vocab_size=architecture.vocab_padded(spec.tp),
        max_sequence_length=architecture.positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied and not value_head,
        position_embedding_type="rope",
        vp_stage=vp_stage,
        value_head=value_head,
        vocab=architecture.vocab,
        rotary_base=architecture.rope_theta,
    )
    if spec.layers == "local" and use_triton(rank_device()):
        _fuse_residuals(model.decoder)
    # Megatron can scale frequencies as Llama 3 does, but ignores the bands that config.json gives.
    model.rotary_pos_emb.inv_freq.copy_(architecture.inverse_frequencies())
    for module in model.modules():
        if isinstance(module, MoELayer) and spec.layers == "local":
            module.token_dispatcher = SortedDispatcher(module)
    if architecture.experts is not None and not value_head:
        replay_routing(model.decoder.layers, architecture.experts)
    return model
