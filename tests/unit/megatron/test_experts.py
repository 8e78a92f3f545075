"""Mixtures of experts as their configs say, and what may share them out."""

import re

import pytest
from megatron.core.transformer.moe import fused_a2a, moe_utils

from mcore_mas.megatron.model.build import transformer_config
from mcore_mas.megatron.spec import TrainerSpec
from rollout.base.errors import ModelError
from rollout.models.architecture import Architecture, Experts
from rollout.models.layout import ParallelLayout, check_fit

CONFIG = {
    "num_hidden_layers": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "norm_topk_prob": True,
}


def test_sparse_layers_are_every_nth_but_those_named() -> None:
    # counted from 1, every second: 2, 4, 6; the one with index 3 is the fourth
    experts = Experts.from_config(CONFIG)
    assert experts.sparse == (False, True, False, False, False, True)
    assert (experts.count, experts.per_token, experts.ffn, experts.normalised) == (8, 2, 48, True)


def test_configs_of_transformers_4_and_5_say_the_same() -> None:
    newer = {
        ("num_local_experts" if name == "num_experts" else name): value
        for name, value in CONFIG.items()
    }
    assert Experts.from_config(newer) == Experts.from_config(CONFIG)
    plain = {
        name: value
        for name, value in CONFIG.items()
        if name not in ("decoder_sparse_step", "norm_topk_prob")
    }
    assert Experts.from_config(plain | {"mlp_only_layers": None}).sparse == (True,) * 6
    assert not Experts.from_config(plain).normalised


def mixture(**changes: int) -> Architecture:
    return Architecture(
        layers=6, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=96, vocab=128, tied=True, qkv_bias=False,
        qk_norm=True, norm_eps=1e-6, rope_theta=1e4, positions=128, experts=Experts.from_config(CONFIG | changes),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (
            {"dp": 3, "ep": 3},
            r"ep: 3 must divide the model's 8 experts, and dp · cp: 3, .*; valid here: \[1\], nearest",
        ),
        (
            {"dp": 4, "ep": 8},
            r"ep: 8 must divide the model's 8 experts, and dp · cp: 4, .* \[1, 2, 4\], nearest: 4",
        ),
        (
            {"tp": 2},
            "tp: 2 on a mixture of experts needs sequence parallelism; use sp: true, or tp: 1",
        ),
    ],
)
def test_layouts_that_cannot_share_them_are_refused(sizes: dict, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        check_fit(mixture(), ParallelLayout(**sizes))


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "dp": 4, "ep": 4, "sp": True},
        {"dp": 3},
        {"dp": 2, "cp": 2, "ep": 4},  # 2 · 2 ranks hold tokens of their own
    ],
)
def test_layouts_that_can_are_not(sizes: dict) -> None:
    check_fit(mixture(), ParallelLayout(**sizes))


def test_adapters_are_of_attention_alone() -> None:
    check_fit(mixture(), ParallelLayout(), targets=("q", "v"))
    told = (
        "lora.targets: in a mixture of experts, up, down belong to the experts, which take no adapters; "
        "use targets: [q, k, v, o], or some of them"
    )
    with pytest.raises(ModelError, match=re.escape(told)):
        check_fit(mixture(), ParallelLayout(), targets=("q", "up", "down"))


def test_a_router_that_cannot_learn_is_refused() -> None:
    with pytest.raises(ModelError, match="the router cannot learn"):
        check_fit(mixture(num_experts_per_tok=1), ParallelLayout())


def test_tokens_travel_to_grouped_experts_by_what_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def settings(**spec: object) -> tuple[bool, bool, str]:
        found = transformer_config(mixture(), TrainerSpec(model="", dp=2, **spec))
        return found.moe_grouped_gemm, found.moe_permute_fusion, found.moe_token_dispatcher_type

    assert settings(layers="te", ep=2) == (True, False, "alltoall")  # neither is here
    for kernel in ("permute", "permute_with_probs", "sort_chunks_by_index", "unpermute"):
        monkeypatch.setattr(moe_utils, f"fused_{kernel}", len, raising=False)
    monkeypatch.setattr(moe_utils, "fused_sort_chunks_by_index_with_probs", len, raising=False)
    assert settings(layers="te", ep=2) == (True, True, "alltoall")
    monkeypatch.setattr(fused_a2a, "HAVE_DEEP_EP", True)
    assert settings(layers="te", ep=2, bf16=True) == (True, True, "flex")
    assert settings(layers="te", ep=2) == (True, True, "alltoall")  # DeepEP combines bfloat16 only
    assert settings(layers="te", bf16=True) == (
        True,
        True,
        "alltoall",
    )  # all experts are on every rank
    assert settings(layers="local", ep=2) == (False, False, "alltoall")
