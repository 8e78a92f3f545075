"""Sampling masks of the rows of a head, for the part of the vocabulary that one rank computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Logit of a token that cannot be sampled. Unlike -∞, its product with a probability of 0 is 0.
FORBIDDEN_LOGIT = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnMasks:
    """Sampling masks of N rows, for the columns of one tensor-parallel rank.

    Attributes:
        masks: [M, bytes] uint8 masks over the whole vocabulary; see `Microbatch.masks`.
        rows: [N] int64 index of each row's mask.
        first_column: token id of the rank's first column.
        columns: number of the rank's columns without padding.
    """

    masks: Tensor
    rows: Tensor
    first_column: int
    columns: int

    def apply(self, logits: Tensor, chunk: slice) -> None:
        """Set the logits of tokens that cannot be sampled to `FORBIDDEN_LOGIT`, in place.

        Args:
            logits: [n, columns with padding] of the rows `chunk`.
        """
        tokens = torch.arange(self.columns, device=logits.device) + self.first_column
        bits = torch.ones_like(tokens, dtype=torch.uint8) << (tokens % 8).to(torch.uint8)
        is_forbidden = (self.masks[self.rows[chunk]][:, tokens // 8] & bits) == 0
        logits[:, : self.columns].masked_fill_(is_forbidden, FORBIDDEN_LOGIT)
