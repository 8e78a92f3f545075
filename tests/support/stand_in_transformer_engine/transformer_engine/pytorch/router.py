"""Fused routers, which Megatron imports and runs use only with `moe_router_fusion`."""

from typing import Any


def fused_topk_with_score_function(*_: Any, **__: Any) -> Any:
    """Refuse to run."""
    raise NotImplementedError


fused_compute_score_for_moe_aux_loss = fused_topk_with_score_function
fused_moe_aux_loss = fused_topk_with_score_function
