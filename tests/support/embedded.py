"""A tiny Qwen2 model for the embedded engine, and Hugging Face's log-probabilities of completions."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.trajectory import Completion

# Nats. Another order of float32 sums changes a log-probability by up to about 1.5e-5.
LOGPROB_TOLERANCE = 5e-5
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
    """Run an engine until no request is left; return the outcomes by request id."""
    outcomes: dict[int, Any] = {}
    while engine.has_work:
        outcomes.update(engine.step())
    return outcomes


def run_steps(engine: EmbeddedEngine, count: int) -> None:
    """Run steps of an engine in which no request ends."""
    for _ in range(count):
        assert engine.step() == []


@torch.no_grad()
def largest_logprob_error(model: Any, prompt: list[int], completion: Completion) -> float:
    """Return the largest error of a completion's log-probabilities against a model, in nats."""
    token_ids = torch.tensor(completion.token_ids)
    logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]
    return float((expected - torch.tensor(completion.logprobs)).abs().max())
