"""Tiny random Qwen2 model for tests."""

from __future__ import annotations

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCAB = 96
MAX_LENGTH = 160


def make_model(seed: int) -> Qwen2ForCausalLM:
    """Return a model of three layers whose biases are not zero."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = Qwen2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model
