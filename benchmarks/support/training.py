"""Tiny models, samples, the Megatron trainer, and the same update in plain PyTorch on Hugging Face's model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, logging

from mcore_mas.credit.samples import Sample
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer

LR = 1e-5
_IGNORED_LABEL = -100


def make_model(folder: Path, *, vocab: int, hidden: int, layers: int) -> Qwen2ForCausalLM:
    """Save and return a random model with the proportions of Qwen2.5-0.5B, in this depth and vocabulary."""
    torch.manual_seed(0)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=5 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 384),
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"model of {parameters / 1e6:.1f} M parameters, vocabulary {vocab}; one thread")
    return model


def start_trainer(folder: Path, objective: Objective) -> MegatronTrainer:
    """Start a trainer with one rank and one thread in this process."""
    init_process_groups(rank=0, threads=1)
    return MegatronTrainer(TrainerSpec(model=str(folder), lr=LR, objective=objective))


def make_sample(prompt: Sequence[int], completion: Sequence[int], number: int = 0) -> Sample:
    """Return a turn with advantage 1 if `number` is odd, else -1."""
    return Sample(
        policy="p",
        agent="a",
        task="t",
        trajectory=str(number),
        turn=0,
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        behaviour=(-5.0,) * len(completion),
        advantages=(1.0 if number % 2 else -1.0,) * len(completion),
        weight=1e-3,
    )


class PlainStep:
    """Training step in plain PyTorch on a Hugging Face model: cross-entropy, gradient clipping and AdamW."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def __call__(self, batches: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Take one step.

        Args:
            batches: token ids [B, S] of each micro-batch and their mask, None without padding.
        """
        self._optimizer.zero_grad()
        for ids, mask in batches:
            output = self._model(input_ids=ids, attention_mask=mask, use_cache=False)
            labels = ids[:, 1:]
            if mask is not None:
                labels = labels.masked_fill(mask[:, 1:] == 0, _IGNORED_LABEL)
            loss = torch.nn.functional.cross_entropy(
                output.logits[:, :-1].float().flatten(0, 1),
                labels.flatten(),
                ignore_index=_IGNORED_LABEL,
                reduction="sum",
            )
            (loss * 1e-3).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
