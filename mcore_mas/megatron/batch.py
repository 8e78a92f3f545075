"""What one forward-backward pass is fed: sequences that share their beginnings, as flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of tokens that is stored once, for all sequences that continue it.

    Its tokens attend to those before them in it and to all of the segments above it: of its parent, its parent's
    parent, and so on.
    """

    tokens: int
    parent: int = -1  # place of the segment that it continues; -1: it begins a sequence


def depths(segments: Sequence[Segment]) -> list[int]:
    """How many tokens lie above each segment."""
    above: list[int] = []
    for segment in segments:
        above.append(above[segment.parent] + segments[segment.parent].tokens if segment.parent >= 0 else 0)
    return above


def pairs(segments: Sequence[Segment]) -> float:
    """Pairs of a token and one that it attends to, itself counted half."""
    above = depths(segments)
    return sum(segment.tokens * (depth + segment.tokens / 2) for segment, depth in zip(segments, above, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Trees of one agent's sequences, end to end: T tokens, N rows to train.

    Segments come depth first: all that continue one follow it directly. Row n says: what comes out at `predictors[n]`
    predicts `labels[n]`. A token may predict several, and the same one for several samples.
    """

    agent: str
    segments: tuple[Segment, ...]
    unshared: int  # tokens if every sample had been stored by itself
    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, each segment continues its parent
    predictors: Tensor  # [N] int64, indices into T
    labels: Tensor  # [N] int64
    temperatures: Tensor  # [N] float32
    sequences: Tensor  # [N] int64, which of the packed samples the row belongs to
    behaviour: Tensor  # [N] float32 log-probabilities of the sampler; NaN where there was none
    advantages: Tensor  # [N] float32
    weights: Tensor  # [N] float32, the update's denominator included
    kl_coef: Tensor  # [N] float32 factor of the KL term
    entropy_coef: Tensor  # [N] float32 factor of the entropy bonus
    proximal: Tensor | None = None  # [N] float32 log-probabilities under the weights at the start of the step
    reference: Tensor | None = None  # [N] float32 log-probabilities under the frozen reference
    values: Tensor | None = None  # [N] float32 the critic's values at the start of the step
    returns: Tensor | None = None  # [N] float32 the critic's targets
    ages: Tensor | None = None  # [N] float32 hand-overs since the reply's oldest token; None: all are fresh

    def padded(self, tokens: int) -> Microbatch:
        """The same with T = `tokens`: those that are added are a sequence of their own and train nothing."""
        extra = tokens - len(self.token_ids)
        if not extra:
            return self
        return replace(
            self,
            segments=(*self.segments, Segment(tokens=extra)),
            token_ids=torch.cat([self.token_ids, self.token_ids.new_zeros(extra)]),
            position_ids=torch.cat([self.position_ids, torch.arange(extra, device=self.position_ids.device)]),
        )

    def idle(self) -> Microbatch:
        """One token and one row of weight 0 with the same columns, for a rank that must keep step without work."""
        rows = {
            field.name: torch.zeros(1, dtype=value.dtype, device=value.device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        rows["temperatures"] = torch.ones_like(rows["temperatures"])
        return replace(self, segments=(Segment(tokens=1),), unshared=1, **rows)

    def to(self, device: torch.device) -> Microbatch:
        """The same with its tensors on `device`."""
        tensors = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)
