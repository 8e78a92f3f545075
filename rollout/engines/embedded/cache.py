"""KV cache of the embedded engine, and the batch of its rows that decode one token each."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout.models.architecture import Architecture
from rollout.models.batch_invariant import KEY_MULTIPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    """Rows of the cache that decode one token each. All fields are int64 [N].

    Attributes:
        rows: row numbers, ascending.
        positions: position of each row's newest token, which has no keys yet.
        groups: number of each row's group. A group with number g began with one prompt in row
            `g % S`, for a cache of S rows.
        shared: number of leading positions at which a row's keys equal those of that prompt. Two
            rows of a group have equal keys up to the smaller of their two numbers.
        adapters: number of each row's adapter; 0 for none.
    """

    rows: np.ndarray
    positions: np.ndarray
    groups: np.ndarray
    shared: np.ndarray
    adapters: np.ndarray

    def continues(self, last: DecodeBatch) -> bool:
        """Return True if this batch has the same rows as `last`, each with its next token.

        Adapters are not compared, because the attention blocks do not depend on them.
        """
        return (
            np.array_equal(last.positions + 1, self.positions)
            and np.array_equal(last.rows, self.rows)
            and np.array_equal(last.groups, self.groups)
            and np.array_equal(last.shared, self.shared)
        )


class KVCache:
    """Keys and values of `rows` sequences of at most `length` tokens.

    Attributes:
        keys: [L, S, KV, D, M] for layers, rows, KV heads, head dimension and positions. In memory, the
            elements of a token's key are contiguous. In exact mode the positions are contiguous
            instead, as `models/batch_invariant.py` needs.
        values: [L, S, KV, M, D].
        routing: experts of each token in each sparse layer [S, length, sparse layers, k]; None if not
            recorded.
    """

    def __init__(
        self,
        architecture: Architecture,
        rows: int,
        length: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        routing: bool = False,
        exact: bool = False,
        one_layer: bool = False,
    ) -> None:
        """Allocate an empty cache.

        Args:
            length: maximum number of tokens of a sequence.
            dtype: type of keys and values.
            routing: True to record the experts of a mixture's tokens.
            exact: True for the layout that exact mode needs.
            one_layer: all layers use the same memory. This is enough for sequences that are
                computed from their first token in one pass, layer by layer.
        """
        experts = architecture.experts
        self.routing: np.ndarray | None = None
        if routing and experts is not None:
            shape = (rows, length, sum(experts.sparse), experts.per_token)
            self.routing = np.zeros(shape, f"<u{experts.index_bytes}")

        # Row blocks of attention read up to the next multiple of `KEY_MULTIPLE` positions.
        length = KEY_MULTIPLE * math.ceil(length / KEY_MULTIPLE)
        if length % 128 == 0 and device.type == "cpu":
            # With a multiple of 128 positions, the keys of different heads (in exact mode, of different
            # dimensions) would lie at strides that compete for the same few sets of the CPU's cache.
            length += KEY_MULTIPLE
        leading = (1 if one_layer else architecture.layers, rows, architecture.kv_heads)
        head_dim = architecture.head_dim
        values = _zeros(*leading, length, head_dim, dtype=dtype, device=device)
        if exact:
            keys = _zeros(*leading, head_dim, length, dtype=dtype, device=device)
        else:
            keys = _zeros(*leading, length, head_dim, dtype=dtype, device=device).transpose(-1, -2)
        self.values = values.expand(architecture.layers, -1, -1, -1, -1)
        self.keys = keys.expand(architecture.layers, -1, -1, -1, -1)

    def copy_layer(self, layer: int, source: int, target: int, tokens: int) -> None:
        """Copy one layer's first `tokens` keys and values from row `source` to row `target`."""
        keys = self.keys[layer]
        values = self.values[layer]
        keys[target, :, :, :tokens] = keys[source, :, :, :tokens]
        values[target, :, :tokens] = values[source, :, :tokens]

    def copy_prefix(self, source: int, targets: list[int], tokens: int) -> None:
        """Copy the first `tokens` positions of row `source` to the rows `targets`."""
        rows = torch.tensor(targets, device=self.keys.device)
        self.keys[:, rows, :, :, :tokens] = self.keys[:, source, None, :, :, :tokens]
        self.values[:, rows, :, :tokens] = self.values[:, source, None, :, :tokens]
        if self.routing is not None:
            self.routing[targets, :tokens] = self.routing[source, :tokens]

    def routing_bytes(self, row: int, tokens: int) -> bytes:
        """Return the experts of a row's first `tokens` positions for `Completion.routing`."""
        return b"" if self.routing is None else self.routing[row, :tokens].tobytes()

    def clear(self, row: int) -> None:
        """Set the keys and values of a row to 0 after some were not finite.

        Attention also reads masked positions, and the product of a NaN and a weight of 0 is NaN.
        """
        self.keys[:, row] = 0.0
        self.values[:, row] = 0.0


def _zeros(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros; on a CPU in huge pages, because the cache has too many small ones for the TLB."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    size_bytes = dtype.itemsize * math.prod(size)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(size)
