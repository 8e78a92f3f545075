"""Which modules a layer is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from mcore_mas.megatron.model.attention import TreeAttention
from mcore_mas.megatron.model.context_parallel import ContextAttention
from mcore_mas.megatron.model.linear import ColumnLinear, RowLinear


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm whose weight Megatron knows to reduce under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def layer_specs(config: TransformerConfig, kind: str, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, of which some may be sparse.

    Args:
        kind: in `LAYERS`.
    """
    make, norm = LAYERS[kind]
    dense = make(config, None)
    sparse = make(config, config.num_moe_experts) if config.num_moe_experts else dense
    first = get_transformer_layer_offset(config, vp_stage)
    pattern = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    here = pattern[first : first + get_num_layers_to_build(config, vp_stage)]
    return TransformerBlockSubmodules(
        layer_specs=[sparse if is_sparse else dense for is_sparse in here], layer_norm=norm()
    )


def _core_attention(config: TransformerConfig) -> type[torch.nn.Module]:
    return ContextAttention if config.context_parallel_size > 1 else TreeAttention


def _local(config: TransformerConfig, experts: int | None) -> ModuleSpec:
    """Megatron's own linear layers."""
    layer = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = _core_attention(config)
    attention.linear_qkv, attention.linear_proj = ColumnLinear, RowLinear
    if experts is None:
        mlp = layer.submodules.mlp.submodules
        mlp.linear_fc1, mlp.linear_fc2 = ColumnLinear, RowLinear
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return layer


def _transformer_engine(config: TransformerConfig, experts: int | None) -> ModuleSpec:
    """Transformer Engine's linear layers, fused with the norm before them, and a layer's experts as one call.

    Its attention is used where no sequences share anything; it has no layout in which replies share a prompt.
    """
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts, moe_grouped_gemm=True, qk_layernorm=config.qk_layernorm
    )
    layer.submodules.self_attention.submodules.core_attention = ModuleSpec(
        module=_core_attention(config), params={"fused": True}
    )
    return layer


def _fused_norm() -> Any:
    from megatron.core.extensions.transformer_engine import TENorm  # only where Transformer Engine is

    return TENorm


# how one layer is made, and the norm after the last
LAYERS: dict[str, tuple[Callable[[TransformerConfig, int | None], ModuleSpec], Callable[[], Any]]] = {
    "local": (_local, lambda: RMSNorm),
    "te": (_transformer_engine, _fused_norm),
}
