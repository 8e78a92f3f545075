"""Offloading of a trainer's memory, so that a colocated engine can use the GPU."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from mcore_mas.megatron.host_memory import BlockMemory, flat_storages


class Offload:
    """Gradient buffers that are freed for a while, and other tensors that are moved to host memory.

    The storages are emptied and filled in place, so that every view of them stays valid: a parameter
    in its buffer, a gradient, an optimizer's part.
    """

    def __init__(
        self,
        gradients: Iterable[Tensor],
        offloaded_tensors: Callable[[], Iterable[Tensor]],
        host_memory: BlockMemory,
    ) -> None:
        """Prepare; nothing is moved yet.

        Args:
            gradients: buffers whose values `sleep` drops, and which are zero after `wake`.
            offloaded_tensors: called at each `sleep`; returns the tensors that are moved.
            host_memory: memory to which they are moved.
        """
        self._gradients = flat_storages(gradients)
        self._offloaded_tensors = offloaded_tensors
        self._host_memory = host_memory
        self._offloaded: list[Tensor] = []  # storages that are on the host now

    def sleep(self) -> int:
        """Free the memory; return the number of bytes that became free."""
        self._offloaded = flat_storages(self._offloaded_tensors())
        for part, slot in self._host_memory.slots(self._offloaded):
            slot.copy_(part, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # wait until the copies are complete

        storages = [*self._gradients, *self._offloaded]
        for storage in storages:
            storage.untyped_storage().resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return sum(len(storage) for storage in storages)

    def wake(self) -> None:
        """Allocate the memory again, restore the offloaded tensors bit for bit, and set the gradients to zero."""
        for storage in (*self._gradients, *self._offloaded):
            storage.untyped_storage().resize_(len(storage))
        for gradient in self._gradients:
            gradient.zero_()
        for part, slot in self._host_memory.slots(self._offloaded):
            part.copy_(slot, non_blocking=True)
        self._offloaded = []
