"""Layers of Transformer Engine."""

from transformer_engine.pytorch import attention, distributed, fp8, ops, router, tensor
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.layers import (
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
)

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "attention",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
    "router",
    "tensor",
]
