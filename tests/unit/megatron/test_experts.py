"""Megatron's settings for a mixture of experts follow the layers, the layout and what is installed."""

import pytest
from megatron.core.transformer.moe import fused_a2a, moe_utils

from mcore_mas.megatron.model.build import transformer_config
from mcore_mas.megatron.spec import TrainerSpec
from tests.support.architectures import mixture_architecture

FUSED_KERNELS = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)


def expert_settings(**spec: object) -> tuple[bool, bool, str]:
    """Return True if products are grouped, True if permutations are fused, and the dispatcher."""
    config = transformer_config(mixture_architecture(), TrainerSpec(model="", dp=2, **spec))
    return (
        config.moe_grouped_gemm,
        config.moe_permute_fusion,
        config.moe_token_dispatcher_type,
    )


def test_tokens_are_dispatched_by_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert expert_settings(layers="te", ep=2) == (True, False, "alltoall")

    for kernel in FUSED_KERNELS:
        monkeypatch.setattr(moe_utils, kernel, len, raising=False)
    assert expert_settings(layers="te", ep=2) == (True, True, "alltoall")

    monkeypatch.setattr(fused_a2a, "HAVE_DEEP_EP", True)
    assert expert_settings(layers="te", ep=2, bf16=True) == (True, True, "flex")
    # DeepEP combines bfloat16 only.
    assert expert_settings(layers="te", ep=2) == (True, True, "alltoall")
    # Without expert parallelism, every rank has all experts.
    assert expert_settings(layers="te", bf16=True) == (True, True, "alltoall")
    assert expert_settings(layers="local", ep=2) == (False, False, "alltoall")
