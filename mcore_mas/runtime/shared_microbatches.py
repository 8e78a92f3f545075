"""Micro-batches in Ray's object store, which the ranks of a machine share."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from mcore_mas.megatron.batch import Microbatch

# Fields of each micro-batch by name, with NumPy arrays in place of tensors.
SharedMicrobatches = Sequence[dict[str, Any]]


def share_microbatches(microbatches: Sequence[Microbatch]) -> Any:
    """Put micro-batches into the object store; return the reference that actors get as an argument.

    Ray maps arrays into the memory of the processes that read them. The routing of a mixture of
    experts, which can be gigabytes, is therefore stored once per machine.
    """
    return ray.put(
        [
            {name: _to_array(getattr(microbatch, name)) for name in Microbatch.__slots__}
            for microbatch in microbatches
        ]
    )


def map_microbatches(shared: SharedMicrobatches) -> list[Microbatch]:
    """Convert the content of the object store to micro-batches.

    The routing is not copied, and must not be written. All other tensors are copies, because a
    user's loss may write to them.
    """
    with warnings.catch_warnings():
        # torch warns that the store is read-only.
        warnings.simplefilter("ignore")
        return [
            Microbatch(**{name: _to_tensor(name, value) for name, value in fields.items()})
            for fields in shared
        ]


def _to_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) else value


def _to_tensor(name: str, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    # Only `routing` remains a read-only view of the store, because it can be gigabytes.
    return torch.from_numpy(value if name == "routing" else value.copy())
