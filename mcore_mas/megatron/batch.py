"""What one forward-backward pass is fed: sequences that share prompts, as flat tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A prompt and the replies to it: each reply attends to the prompt and to itself, not to the other replies."""

    prompt: int  # tokens
    replies: tuple[int, ...]  # tokens of each reply

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and of all replies."""
        return self.prompt + sum(self.replies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Trees of one agent packed end to end: T tokens, N of them trained.

    Row n says: the logits at `predictors[n]` predict `labels[n]`. A prompt's last token predicts the first token of
    every reply, so `predictors` may repeat.
    """

    agent: str
    trees: tuple[Tree, ...]
    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, each reply continues its prompt
    predictors: Tensor  # [N] int64, indices into T
    labels: Tensor  # [N] int64
    temperatures: Tensor  # [N] float32
    behaviour: Tensor  # [N] float32 log-probabilities of the sampler; NaN where there was none
    advantages: Tensor  # [N] float32
    weights: Tensor  # [N] float32, the update's denominator included
