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

    Ray maps arrays into the memory of the processes that read them. The micro-batches of a step, which
    can be gigabytes, are therefore stored once per machine.
    """
    return ray.put(
        [
            {name: _to_array(getattr(microbatch, name)) for name in Microbatch.__slots__}
            for microbatch in microbatches
        ]
    )


def map_microbatches(shared: SharedMicrobatches) -> list[Microbatch]:
    """Convert the content of the object store to micro-batches, without copying any tensor.

    The tensors are read-only views of the store, and must not be written. A rank copies the
    micro-batches that it computes with, one after the other; see `Pipeline`.
    """
    with warnings.catch_warnings():
        # torch warns that the store is read-only.
        warnings.simplefilter("ignore")
        return [
            Microbatch(**{name: _to_tensor(value) for name, value in fields.items()})
            for fields in shared
        ]


def _to_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) else value


def _to_tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
