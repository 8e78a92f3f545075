"""Model families and folders that the embedded engine loads, and those that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollout.base.errors import EngineError
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.trajectory import Sampling
from tests.support.embedded import LOGPROB_TOLERANCE, SIZES, drain, largest_logprob_error

torch.set_num_threads(1)
EXPERTS = {"num_experts": 6, "moe_intermediate_size": 24}


def save(path: Path, model: Any) -> Any:
    model.eval().save_pretrained(path)
    return model


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=False, rope_theta=5e5)),
        (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
        (
            LlamaForCausalLM,
            LlamaConfig(
                **SIZES,
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            ),
        ),
        (
            Qwen3MoeForCausalLM,
            Qwen3MoeConfig(
                **SIZES, **EXPERTS, head_dim=16, num_experts_per_tok=2, norm_topk_prob=True
            ),
        ),
        (
            # The first layer is dense, and the weights of a token's experts do not add up to 1.
            Qwen3MoeForCausalLM,
            Qwen3MoeConfig(
                **SIZES, **EXPERTS, head_dim=16, num_experts_per_tok=3, mlp_only_layers=[0]
            ),
        ),
    ],
    ids=["qwen2-untied", "qwen3", "llama3", "mixture", "mixture-after-dense"],
)
def test_model_families_match_hugging_face(tmp_path: Path, model_class: Any, config: Any) -> None:
    torch.manual_seed(1)
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    save(tmp_path, model)
    engine = EmbeddedEngine.from_folder(tmp_path, max_length=300)
    prompt = np.random.default_rng(0).integers(0, 64, 200).tolist()
    engine.submit(1, prompt, Sampling(max_tokens=50))
    assert largest_logprob_error(model, prompt, drain(engine)[1]) < LOGPROB_TOLERANCE


def test_weights_in_bfloat16_and_several_files_are_loaded(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert (tmp_path / "model.safetensors.index.json").exists()
    engine = EmbeddedEngine.from_folder(tmp_path, max_length=64)
    loaded = dict(engine.decoder.weights.tensors())
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor.float())
    engine.submit(1, [5, 6, 7], Sampling(max_tokens=20))
    float32_model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert largest_logprob_error(float32_model, [5, 6, 7], drain(engine)[1]) < LOGPROB_TOLERANCE


def test_a_missing_file_of_several_is_named(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(EngineError, match=r"model-0000\d-of-0000\d.safetensors: not a readable"):
        EmbeddedEngine.from_folder(tmp_path, max_length=64)


def test_weights_may_include_a_tied_head_that_equals_the_embedding(qwen2: Path) -> None:
    state = dict(Qwen2ForCausalLM.from_pretrained(qwen2).state_dict())
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64)
    head = state["lm_head.weight"].clone()
    engine.load_weights({**state, "lm_head.weight": head}.items(), 1)
    head[0, 0] += 1
    with pytest.raises(EngineError, match=r"'lm_head\.weight' differs from the embedding to which"):
        engine.load_weights({**state, "lm_head.weight": head}.items(), 2)
    assert engine.version == 1


def test_missing_or_unreadable_weights_are_refused(qwen2: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((qwen2 / "config.json").read_text())
    with pytest.raises(EngineError, match=r"no \*.safetensors file"):
        EmbeddedEngine.from_folder(tmp_path, max_length=64)
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(EngineError, match=r"model\.safetensors: not a readable safetensors file"):
        EmbeddedEngine.from_folder(tmp_path, max_length=64)
