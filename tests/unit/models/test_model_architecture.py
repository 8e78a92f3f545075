"""Architectures are read from config.json of transformers 4 and 5; other models are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.base.errors import ModelError
from rollout.models.architecture import Experts, parse_architecture, read_architecture
from tests.support import reference
from tests.support.architectures import MIXTURE_CONFIG


def test_sparse_layers_follow_the_step_and_the_exceptions() -> None:
    experts = Experts.from_config(MIXTURE_CONFIG)
    assert experts.sparse == (False, True, False, False, False, True)
    assert experts.count == 8
    assert experts.per_token == 2
    assert experts.ffn == 48
    assert experts.normalised


def test_experts_are_read_from_configs_of_transformers_4_and_5() -> None:
    newer_config: dict[str, Any] = dict(MIXTURE_CONFIG)
    newer_config["num_local_experts"] = newer_config.pop("num_experts")
    assert Experts.from_config(newer_config) == Experts.from_config(MIXTURE_CONFIG)


def test_without_further_settings_every_layer_is_sparse() -> None:
    config: dict[str, Any] = {**MIXTURE_CONFIG, "mlp_only_layers": None}
    del config["decoder_sparse_step"], config["norm_topk_prob"]
    experts = Experts.from_config(config)
    assert experts.sparse == (True,) * 6
    assert not experts.normalised


def test_rotary_positions_are_read_from_configs_of_transformers_4_and_5(tmp_path: Path) -> None:
    reference.make_model("llama", tmp_path)
    path = tmp_path / "config.json"
    newer = read_architecture(tmp_path)
    assert newer.rope_theta == 5e5
    assert newer.rope_factor == 32.0
    assert newer.rope_bands == (2.0, 8.0, 64)

    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    path.write_text(json.dumps(config | {"rope_theta": theta, "rope_scaling": rope}))
    assert read_architecture(tmp_path) == newer


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere: no model here \(config.json is missing\)"):
        read_architecture(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(
        ModelError, match=r"config\.json is not readable \(.*\); expected a Hugging"
    ):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"model_type": "mamba"},
            "model_type 'mamba' is not supported; known: llama, qwen2, qwen3, qwen3_moe",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True},
            "use_sliding_window is set, which is not supported",
        ),
        (
            {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}},
            "quantization_config is set, which is not supported",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types names other layers than full_attention, which are not supported",
        ),
        (
            {"model_type": "qwen2", "hidden_act": "gelu"},
            "hidden_act 'gelu' is not supported; known: silu",
        ),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}},
            "rope_type 'yarn' is not supported; known: default, llama3",
        ),
        (
            {"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_type 'yarn' is not supported; known: default, llama3",
        ),
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}},
            "rope_type 'llama3': there is no key 'factor'",
        ),
    ],
)
def test_a_model_that_is_not_supported_is_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_architecture(config, "m/config.json")
    assert str(caught.value).startswith(f"m/config.json: {problem}")
