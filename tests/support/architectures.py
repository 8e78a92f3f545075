"""Small architectures, without files of a model."""

from typing import Any

from rollout.models.architecture import Architecture, Experts

# Layers are counted from 1: the second, the fourth and the sixth are sparse, but the fourth, which
# has index 3, is excepted.
MIXTURE_CONFIG = {
    "num_hidden_layers": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "norm_topk_prob": True,
}


def dense_architecture(**changes: Any) -> Architecture:
    """Return an architecture of 6 dense layers with 8 heads and 4 key/value heads."""
    sizes: dict[str, Any] = {
        "layers": 6,
        "hidden": 64,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 8,
        "ffn": 96,
        "vocab": 128,
        "tied": True,
        "qkv_bias": False,
        "qk_norm": True,
        "norm_eps": 1e-6,
        "rope_theta": 1e4,
        "positions": 128,
    }
    return Architecture(**sizes | changes)


def mixture_architecture(**changes: int) -> Architecture:
    """Return an architecture with 8 experts in sparse layers; `changes` are keys of config.json."""
    return dense_architecture(experts=Experts.from_config(MIXTURE_CONFIG | changes))
