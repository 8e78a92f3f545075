"""Megatron's GPT model with a head that answers only what it is asked: log-probabilities, or one value."""

from __future__ import annotations

import re
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_mas.megatron.model.attention import TreeRotary
from mcore_mas.megatron.model.context_parallel import Share
from mcore_mas.megatron.model.logprobs import logprobs_and_entropy

LAYER = re.compile(r"(?<=layers\.)\d+")  # the layer's number in a parameter's name
EXPERT = re.compile(r"(?<=local_experts\.)\d+|(?<=experts\.linear_fc[12]\.weight)\d+")  # and the expert's


def renumbered(number: re.Pattern[str], name: str, shift: int) -> str:
    """A parameter's name with `LAYER` or `EXPERT` counted from elsewhere."""
    return number.sub(lambda found: str(int(found.group()) + shift), name)


class Decoder(GPTModel):
    """A `GPTModel` on packed trees that puts out what is asked of N rows instead of logits for T tokens.

    The head is most of the work of a small model and most of the memory of any, and prompts need none of it.
    """

    share: Share  # what is asked, set before each forward pass

    def __init__(self, *args: Any, value_head: bool, vocab: int, **kwargs: Any) -> None:
        """As `GPTModel`; with `value_head`, a `ValueHead` in place of the output layer.

        Args:
            vocab: tokens of the vocabulary without padding.
        """
        super().__init__(*args, **kwargs)
        self._vocab = vocab
        self.rotary_pos_emb.__class__ = TreeRotary  # GPTModel has no slot for another rotary module; it adds no state
        if self.post_process and value_head:
            self.output_layer: Any = ValueHead(self.config)

    def numbered_parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by name, with layers and experts counted from the first of the whole model."""
        return {self.numbered(name): parameter for name, parameter in self.named_parameters()}

    def numbered(self, name: str) -> str:
        """A parameter's or module's name with layers and experts counted from the first of the whole model."""
        layer = int(self.decoder.layers[0].layer_number) - 1
        ranks = parallel_state.get_expert_model_parallel_world_size()
        expert = parallel_state.get_expert_model_parallel_rank() * (self.config.num_moe_experts or 0) // ranks
        return renumbered(EXPERT, renumbered(LAYER, name, layer), expert)

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """Log-probabilities and entropies or values, each [N] float32; before the last stage what the next is sent."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # the head makes the gradient whole on every rank: each takes its part of it
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        rows = hidden_states[self.share.predictors, 0]
        if isinstance(self.output_layer, ValueHead):
            return (self.output_layer(rows),)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return logprobs_and_entropy(rows, weight, self.share.labels, self.share.temperatures, self._vocab)


class ValueHead(torch.nn.Module):
    """One number per position, the same weights on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        # small and seeded: values start near 0, whatever the width, and equal on all ranks
        weight = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(0)) / (
            config.hidden_size + 1
        )
        self.value = torch.nn.Parameter(weight.to(config.params_dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [N] in float32 of hidden states [N, hidden]."""
        return (hidden @ self.value.t())[:, 0].float()
