"""A full tensor in blocks of neighbouring rows, as its shards hold them, so that nobody need put it together first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Rows = Tensor | Sequence[Tensor]  # a full tensor, or blocks of its rows in their order


def blocks_of(rows: Rows) -> Sequence[Tensor]:
    """The blocks; a full tensor is one."""
    return [rows] if isinstance(rows, Tensor) else rows


def whole(rows: Rows) -> Tensor:
    """The full tensor; blocks are copied, unless there is just one."""
    blocks = blocks_of(rows)
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks))


def shape_of(rows: Rows) -> torch.Size:
    """Shape of the full tensor."""
    if isinstance(rows, Tensor):
        return rows.shape
    return torch.Size((sum(len(block) for block in rows), *rows[0].shape[1:]))


def cut(target: Tensor, blocks: Sequence[Tensor]) -> Sequence[Tensor]:
    """The part of `target` for each block, cut in its first dimension, which may stand for several rows."""
    if len(blocks) == 1:
        return [target]
    rows = sum(len(block) for block in blocks)
    parts: Sequence[Tensor] = target.split([len(block) * len(target) // rows for block in blocks])
    return parts
