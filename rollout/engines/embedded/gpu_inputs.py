"""Inputs of passes on a GPU: several arrays go there in one copy, for which the host does not wait."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from rollout.engines.embedded.cache import DecodeBatch


def decoding_inputs(batch: DecodeBatch, token_ids: np.ndarray) -> list[np.ndarray]:
    """Return the inputs of a decoding pass of N rows.

    They are token ids [N], adapters [N], cache row and position of each token [N, 2], and blocks of
    one query each for `attend_to_cache` [N, 4].
    """
    count = len(token_ids)
    coordinates = np.stack([batch.rows, batch.positions], 1)
    ones = np.ones(count, dtype=np.int64)
    blocks = np.stack([batch.rows, np.arange(count), ones, batch.positions], 1)
    return [token_ids, batch.adapters, coordinates, blocks]


def pack_arrays(arrays: Sequence[np.ndarray]) -> Tensor:
    """Concatenate arrays as int32, in page-locked memory if there is a GPU.

    The bits of float32 arrays stay as they are.
    """
    parts = [
        array.view(np.int32) if array.dtype == np.float32 else array.astype(np.int32)
        for array in arrays
    ]
    packed = torch.from_numpy(np.concatenate([part.ravel() for part in parts]))
    return packed.pin_memory() if torch.cuda.is_available() else packed


def unpack_arrays(packed: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Return the parts of `packed` in the shapes of the arrays that `pack_arrays` concatenated.

    Parts of float32 arrays are viewed as float32; the others stay int32.
    """
    ends = accumulate((array.size for array in arrays), initial=0)
    tensors = []
    for array, (start, end) in zip(arrays, pairwise(ends), strict=True):
        tensor = packed[start:end].view(array.shape)
        tensors.append(tensor.view(torch.float32) if array.dtype == np.float32 else tensor)
    return tensors


def upload_arrays(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays to a device, integers as int32."""
    return unpack_arrays(pack_arrays(arrays).to(device, non_blocking=True), arrays)
