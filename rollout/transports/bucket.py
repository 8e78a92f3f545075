"""Tensors as one flat run of bytes: SGLang's flattened bucket, laid out without importing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

BUCKET_BYTES = 512 << 20


def buckets(weights: Iterable[tuple[str, Tensor]], limit: int = BUCKET_BYTES) -> Iterator[list[tuple[str, Tensor]]]:
    """Split a stream into lists of at most `limit` bytes, or of one larger tensor."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if held and size + tensor.nbytes > limit:
            yield held
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield held


def flatten(tensors: Iterable[tuple[str, Tensor]]) -> tuple[Tensor, list[Any]]:
    """The tensors' bytes one after the other, uint8, and for each what `FlattenedTensorMetadata` says of it.

    Wider types come first: a view as a type must start at a multiple of its size. SGLang reads the metadata by
    attribute (`_update_weights_from_flattened_bucket` in model_runner_components/weight_updater.py, 0.5.23), and a
    `SimpleNamespace` is among what it unpickles, so its own class is not needed here.
    """
    ordered = sorted(tensors, key=lambda entry: -entry[1].element_size())
    flat = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for _, tensor in ordered])
    metadata, start = [], 0
    for name, tensor in ordered:
        end = start + tensor.nbytes
        metadata.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=tensor.nbytes
            )
        )
        start = end
    return flat, metadata
