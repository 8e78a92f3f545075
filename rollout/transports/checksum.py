"""A checksum of a tensor's bytes that costs one pass at the speed of memory."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

_RUN = 512  # neighbouring bytes that are added up, as integers of 64 bits
_BLOCK = 1 << 20  # bytes, whole runs: the second reader finds them in the processor's cache
_SMALL = 1 << 16  # bytes: what is not larger is not added up


def checksum(tensor: Tensor) -> str:
    """16 hexadecimal digits; a changed, moved or missing value changes them, and so does another shape.

    The bytes, in the order of the tensor's indices, are cut into runs of 512, each run is added up as integers modulo
    2^64, and sha256 takes the sums in their order and the shape; of a small tensor, and after the last run, it takes
    the bytes themselves. Any single changed bit is noticed, and whatever moves, unless it stays within its run.
    """
    return _pass(tensor.detach().cpu().contiguous(), None)


def copy(tensor: Tensor, target: Tensor) -> str:
    """Copy into the float32 `target`, which has as many elements, and return the checksum of what was read.

    Where the target lies in one piece this is one pass: a block is added up while the processor's cache still holds it.
    """
    data = tensor.detach().to("cpu", torch.float32).contiguous()
    if target.is_contiguous():
        return _pass(data, _bytes(target))
    target.copy_(data.reshape(target.shape))
    return _pass(data, None)


def _pass(data: Tensor, target: np.ndarray | None) -> str:
    if data.storage_offset() * data.element_size() % 8:
        data = data.clone()  # torch reads integers at multiples of their size only
    flat = _bytes(data)
    hasher = hashlib.sha256(str(list(data.shape)).encode())
    whole = len(flat) // _RUN * _RUN if len(flat) > _SMALL else 0
    for first in range(0, whole, _BLOCK):
        block = flat[first : min(first + _BLOCK, whole)]
        if target is not None:
            target[first : first + len(block)] = block
        # torch adds up without holding Python's lock, numpy does not
        sums = torch.from_numpy(block.view(np.int64)).view(-1, _RUN // 8).sum(1)
        hasher.update(sums.numpy().data)
    if target is not None:
        target[whole:] = flat[whole:]
    hasher.update(flat[whole:].data)
    return hasher.hexdigest()[:16]


def _bytes(tensor: Tensor) -> np.ndarray:
    flat: np.ndarray = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat
