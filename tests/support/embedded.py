"""A Qwen2 of 64 tokens on the embedded engine, and what Hugging Face says of its completions."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.trajectory import Completion

LOGPROB_TOLERANCE = (
    5e-5  # nats; float32 sums in another order move a log-probability by up to about 1.5e-5
)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def make_qwen2(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)).eval()


def drain(engine: EmbeddedEngine) -> dict[int, Any]:
    done: dict[int, Any] = {}
    while engine.has_work:
        done.update(engine.step())
    return done


def steps(engine: EmbeddedEngine, count: int) -> None:
    for _ in range(count):
        assert engine.step() == []


@torch.no_grad()
def worst(model: Any, prompt: list[int], completion: Completion) -> float:
    logits = model(torch.tensor([prompt + list(completion.token_ids)])).logits[
        0, len(prompt) - 1 : -1
    ]
    right = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return float((right - torch.tensor(completion.logprobs)).abs().max())
