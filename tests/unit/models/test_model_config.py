"""Wrong values in a model's config.json are refused in one line that names the file and the key."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.base.errors import ModelError
from rollout.models.architecture import parse_architecture, read_architecture
from rollout.models.model_config import ServedConfig, read_values

DENSE: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
MIXTURE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_nulls_count_as_absent() -> None:
    nulls = dict.fromkeys(
        (
            "head_dim",
            "num_key_value_heads",
            "rope_scaling",
            "rope_theta",
            "layer_types",
            "rms_norm_eps",
            "tie_word_embeddings",
        )
    )
    architecture = parse_architecture(DENSE | nulls, "test")
    assert (architecture.kv_heads, architecture.head_dim, architecture.tied) == (4, 16, False)
    assert (architecture.rope_theta, architecture.norm_eps) == (1e4, 1e-6)
    assert parse_architecture(MIXTURE | {"mlp_only_layers": None}, "test").experts is not None


def test_whole_numbers_stand_for_floats() -> None:
    scaling = {"rope_theta": 500_000, "rope_scaling": LLAMA3 | {"factor": 8}}
    architecture = parse_architecture(DENSE | scaling, "test")
    assert (architecture.rope_theta, architecture.rope_factor) == (500_000, 8)
    assert architecture.rope_bands == (1.0, 4.0, 64)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 0}, "num_attention_heads: Input should be greater than or equal to 1"),
    ({"num_hidden_layers": -2}, r"num_hidden_layers: .* \(got -2\)"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers: Input should be less than"),
    ({"hidden_size": "64"}, r'hidden_size: Input should be a valid integer \(got "64"\)'),
    ({"hidden_size": 64.5}, "hidden_size: Input should be a valid integer"),
    ({"hidden_size": True}, "hidden_size: Input should be a valid integer"),
    ({"hidden_size": [64]}, "hidden_size: Input should be a valid integer"),
    ({"hidden_size": 10**30}, "hidden_size: "),
    ({"hidden_size": 66}, "hidden_size 66 is not an even multiple of num_attention_heads 4"),
    ({"head_dim": 15}, "head_dim: expected an even number"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
    ({"num_key_value_heads": 8}, "num_key_value_heads 8 does not divide num_attention_heads 4"),
    ({"vocab_size": None}, "no key 'vocab_size'"),
    ({"vocab_size": {}}, "vocab_size: Input should be a valid integer"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings: Input should be a valid boolean"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps: Input should be greater than"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps: Input should be a finite number"),
    ({"initializer_range": "wide"}, "initializer_range: Input should be a valid number"),
    ({"layer_types": 5}, "layer_types is 5; expected a list"),
    ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; expected a list"),
    ({"layer_types": [["full_attention"]]}, "layer_types names other layers"),
    ({"model_type": ["qwen2"]}, r"model_type \['qwen2'\] is not supported"),
    ({"model_type": None}, "model_type None is not supported"),
    ({"rope_theta": 0}, "rope_theta: Input should be greater than 0"),
    ({"rope_theta": "1e6"}, "rope_theta: Input should be a valid number"),
    ({"rope_scaling": 2}, "rope_scaling is 2; expected an object, or null"),
    ({"rope_scaling": {"rope_type": ["llama3"]}}, r"rope_type \['llama3'\] is not supported"),
    ({"rope_scaling": LLAMA3 | {"factor": 0}}, "rope_type 'llama3': factor: "),
    ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "above low_freq_factor 1"),
    ({"rope_parameters": LLAMA3 | {"low_freq_factor": "1"}}, "low_freq_factor: "),
]
WRONG_EXPERTS: list[tuple[dict[str, Any], str]] = [
    ({"num_experts": 0}, "num_experts: Input should be greater than or equal to 1"),
    ({"num_experts": None}, "no key 'num_experts'"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
    ({"moe_intermediate_size": "48"}, "moe_intermediate_size: Input should be a valid integer"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step: Input should be greater than"),
    ({"mlp_only_layers": 1}, "mlp_only_layers: Input should be a valid list"),
    ({"mlp_only_layers": ["1"]}, r"mlp_only_layers.0: Input should be a valid integer"),
    ({"norm_topk_prob": 1}, "norm_topk_prob: Input should be a valid boolean"),
]


@pytest.mark.parametrize(
    ("config", "message"),
    [(DENSE | changes, message) for changes, message in WRONG]
    + [(MIXTURE | changes, message) for changes, message in WRONG_EXPERTS],
)
def test_a_wrong_value_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as refusal:
        read_architecture(tmp_path)
    assert str(refusal.value).startswith(f"{file}: ")
    assert "\n" not in str(refusal.value)


def test_all_wrong_values_are_named() -> None:
    with pytest.raises(ModelError, match=r"x: hidden_size: .*; vocab_size: .*; expected a Hugging"):
        parse_architecture(DENSE | {"hidden_size": 0, "vocab_size": "300"}, "x")


def test_a_server_needs_a_vocabulary_of_any_family() -> None:
    served = read_values(ServedConfig, {"model_type": "mamba", "vocab_size": 9}, "x")
    assert (served.vocab_size, served.max_position_embeddings) == (9, 0)
    with pytest.raises(ModelError, match="x: there is no key 'vocab_size'"):
        read_values(ServedConfig, {"vocab_size": None}, "x")
