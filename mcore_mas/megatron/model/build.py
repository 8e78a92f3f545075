"""A Hugging Face config as a Megatron `GPTModel`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_mas.megatron.model.decoder import Decoder
from mcore_mas.megatron.model.experts import Experts
from mcore_mas.megatron.model.layers import layer_specs
from mcore_mas.megatron.spec import Projection, TrainerSpec


class ModelError(ValueError):
    """A model folder cannot be trained as asked: says what, where, expected, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder, dense or with mixtures of experts, as its Hugging Face config.json describes it."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool  # the output layer is the embedding
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    rope_factor: float | None  # llama3 frequency scaling
    positions: int
    init_std: float = 0.02  # of random weights
    experts: Experts | None = None  # None: every layer is dense

    def vocab_padded(self, tp: int) -> int:
        """Rows of the embedding once it divides by `tp`."""
        return -(-self.vocab // tp) * tp

    def check_layout(
        self, tp: int, pp: int = 1, vpp: int = 1, *, dp: int = 1, ep: int = 1, sp: bool = False, cp: int = 1
    ) -> None:
        """Refuse a tensor-, context-, pipeline- or expert-parallel size that cannot cut this model.

        Raises:
            ModelError: with the sizes that can.
        """
        sizes = {"heads": self.heads, "key/value heads": self.kv_heads, "feed-forward width": self.ffn}
        if self.experts:
            sizes["expert width"] = self.experts.ffn
        for what, size in sizes.items():
            if size % tp:
                valid = [n for n in range(1, min(sizes.values()) + 1) if all(s % n == 0 for s in sizes.values())]
                raise ModelError(
                    f"tp: {tp} does not divide the model's {size} {what}; valid here: {valid}, nearest: "
                    f"{_nearest(tp, valid)}"
                )
        if self.heads % (tp * cp):
            valid = [n for n in range(1, self.heads + 1) if self.heads % (tp * n) == 0]
            raise ModelError(
                f"cp: {cp} does not divide the {self.heads // tp} heads that tp: {tp} leaves to each rank; "
                f"valid here: {valid}, nearest: {_nearest(cp, valid)}"
            )
        stages = pp * vpp
        if self.layers % stages:
            valid = [n for n in range(1, self.layers + 1) if self.layers % n == 0]
            what = f"pp: {pp}" if vpp == 1 else f"pp · vpp: {pp} · {vpp}"
            raise ModelError(
                f"{what} does not divide the model's {self.layers} layers; valid here: {valid}, nearest: "
                f"{_nearest(stages, valid)}"
            )
        if vpp > 1 and pp == 1:
            raise ModelError(f"vpp: {vpp} stages on each pipeline rank need pp of 2 or more; use vpp: 1, or pp: 2")
        if sp and tp == 1:
            raise ModelError("sp: cutting by sequence needs tp of 2 or more; use sp: false, or tp: 2")
        if self.experts is None and ep > 1:
            raise ModelError(
                f"ep: {ep} on a model without experts; valid here: [1], nearest: 1 (dp is what repeats it)"
            )
        refusal = self.experts.refusal(tp=tp, dp=dp, ep=ep, sp=sp, cp=cp) if self.experts else None
        if refusal:
            raise ModelError(refusal)

    def check_adapters(self, targets: Collection[Projection]) -> None:
        """Refuse adapters that this model cannot have.

        Raises:
            ModelError: with the projections that can have some.
        """
        refusal = self.experts.adapter_refusal(targets) if self.experts else None
        if refusal:
            raise ModelError(refusal)


def _nearest(wanted: int, valid: list[int]) -> int:
    return min(valid, key=lambda size: abs(size - wanted))


# (query/key/value biases, query/key norms) by Hugging Face model_type
_FAMILIES = {"qwen2": (True, False), "qwen3": (False, True), "llama": (False, False), "qwen3_moe": (False, True)}
_SPARSE = ("qwen3_moe",)


def read_architecture(folder: Path) -> Architecture:
    """Read `folder`/config.json, as written by transformers 4 or 5.

    Raises:
        ModelError: there is no such folder, or the family or its rope scaling is not supported.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder}: no model here (config.json is missing); expected a Hugging Face model folder")
    config: dict[str, Any] = json.loads(path.read_text())
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ModelError(f"{path}: model_type '{family}' is not supported; supported: {', '.join(_FAMILIES)}")
    qkv_bias, qk_norm = _FAMILIES[family]
    # transformers 5 moved the rope settings into one dictionary
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ModelError(f"{path}: rope type '{kind}' is not supported; supported: default, llama3")
    return Architecture(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        norm_eps=config["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        rope_factor=rope["factor"] if kind == "llama3" else None,
        positions=config["max_position_embeddings"],
        init_std=config.get("initializer_range", 0.02),
        experts=Experts.of(config) if family in _SPARSE else None,
    )


def check_layers(layers: str) -> None:
    """Refuse layers that cannot be made here.

    Raises:
        ModelError: Transformer Engine is asked for and not there.
    """
    if layers == "te" and importlib.util.find_spec("transformer_engine") is None:
        raise ModelError(
            "layers: te needs Transformer Engine, which is not installed here; use layers: local, or install "
            "transformer-engine[pytorch]"
        )


def equal_lengths(spec: TrainerSpec) -> bool:
    """Whether the micro-batches of one pass must have the same number of tokens.

    Interleaved stages send activations and gradients between the same two ranks at once; Megatron's messages about
    their lengths, unlike those with the data, do not keep the two apart.
    """
    return spec.vpp > 1


def _leave(weight: Tensor) -> Tensor:
    """Initialise nothing: every weight is loaded, and what is never written takes no memory until then."""
    return weight


def _expert_settings(a: Architecture, spec: TrainerSpec) -> dict[str, Any]:
    """How Megatron routes as Hugging Face does; nothing for a dense model.

    There is no auxiliary loss: a product of a micro-batch's sums, it would depend on how samples are packed and dealt,
    and it pulls the router away from the one that the engine sampled with.
    """
    if a.experts is None:
        return {}
    return {
        "num_moe_experts": a.experts.count,
        "moe_router_topk": a.experts.per_token,
        "moe_ffn_hidden_size": a.experts.ffn,
        "moe_layer_freq": [int(sparse) for sparse in a.experts.sparse],
        # softmax over the k chosen is softmax over all, scaled to a sum of 1
        "moe_router_pre_softmax": not a.experts.normalised,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": spec.layers == "te",
        "expert_model_parallel_size": spec.ep,
    }


def _shape(a: Architecture) -> dict[str, Any]:
    """What kind of a decoder it is, and its sizes."""
    return {
        "num_layers": a.layers,
        "hidden_size": a.hidden,
        "num_attention_heads": a.heads,
        "num_query_groups": a.kv_heads,
        "kv_channels": a.head_dim,
        "ffn_hidden_size": a.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": a.norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": a.qkv_bias,
        "qk_layernorm": a.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _layout(spec: TrainerSpec) -> dict[str, Any]:
    """How it is cut, and how the parts talk."""
    return {
        "tensor_model_parallel_size": spec.tp,
        "pipeline_model_parallel_size": spec.pp,
        "virtual_pipeline_model_parallel_size": spec.vpp if spec.vpp > 1 else None,
        "sequence_parallel": spec.sp,
        "context_parallel_size": spec.cp,
        "cp_comm_type": "a2a",
        "batch_p2p_comm": False,
        # micro-batches differ in length; Megatron asks for this dispatcher with that, of dense models too
        "variable_seq_lengths": not equal_lengths(spec),
        "moe_token_dispatcher_type": "alltoall",
    }


def _arithmetic(spec: TrainerSpec) -> dict[str, Any]:
    """What it computes in, what it computes twice, and what it starts from."""
    dtype = torch.bfloat16 if spec.bf16 else torch.float32
    return {
        "bf16": spec.bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "recompute_granularity": "full" if spec.recompute else None,
        "recompute_method": "uniform" if spec.recompute else None,
        "recompute_num_layers": 1 if spec.recompute else None,
        # must stay on: initialisation is also what marks shards as shards, and an unmarked shard is left out of the
        # gradient norm as if it were a duplicate
        "perform_initialization": True,
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        # gradients are summed over ranks and never rescaled: the denominator is in the token weights
        "calculate_per_token_loss": True,
    }


def build_model(architecture: Architecture, spec: TrainerSpec, vp_stage: int | None = None) -> Decoder:
    """This rank's shard of one pipeline stage, its weights still to be loaded.

    Args:
        vp_stage: which of this rank's stages, where it holds several.
    """
    a = architecture
    config = TransformerConfig(**_shape(a), **_expert_settings(a, spec), **_layout(spec), **_arithmetic(spec))
    rope = {"rotary_base": a.rope_theta, "rope_scaling": a.rope_factor is not None}
    if a.rope_factor is not None:
        rope["rope_scaling_factor"] = a.rope_factor
    value_head = spec.head == "value"
    return Decoder(
        config,
        layer_specs(config, spec.layers, vp_stage),
        vocab_size=a.vocab_padded(spec.tp),
        max_sequence_length=a.positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=a.tied and not value_head,
        position_embedding_type="rope",
        vp_stage=vp_stage,
        value_head=value_head,
        vocab=a.vocab,
        **rope,
    )
