"""Second sets of weights: the frozen reference model, and device memory given away for colocation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from mcore_mas.megatron.state.names import LazyTensor
from mcore_mas.megatron.state.weight_import import import_weights
from rollout.models.architecture import Architecture


class ReferenceModel:
    """One CPU copy of this rank's shard of full tensors, read when first needed."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        architecture: Architecture,
        source: Callable[[], Callable[[str], LazyTensor]],
    ) -> None:
        """`parameters`, by Megatron name, are what `swapped_in` writes to and puts back; `source` opens the tensors."""
        self._parameters = parameters
        self._architecture = architecture
        self._source = source
        self._frozen: dict[str, Tensor] = {}

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The parameters hold the reference inside the block, and after it the very bits they held before.

        Raises:
            ModelError: the tensors are of no model of this shape.
        """
        if not self._frozen:
            frozen = {name: torch.empty_like(p, device="cpu") for name, p in self._parameters.items()}
            import_weights(frozen, self._architecture, self._source())
            self._frozen = frozen
        trained = {name: p.detach().to("cpu", copy=True) for name, p in self._parameters.items()}
        try:
            self._write(self._frozen)
            yield
        finally:
            self._write(trained)

    def _write(self, source: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(source[name])


class Offload:
    """Frees gradient buffers, and moves what must be kept from the GPU to pinned host memory and back.

    The storages of tensors are emptied in place, so that every view of them (a parameter in its buffer, a gradient, an
    optimizer's part) is what it was once they are filled again. On the CPU what is kept stays where it is.
    """

    def __init__(self, gradients: Iterable[Tensor], kept: Callable[[], Iterable[Tensor]]) -> None:
        """`gradients` come back as zeros; `kept` says anew at each sleep which tensors come back as they were."""
        self._gradients = list(gradients)
        self._kept = kept
        self._sizes: list[int] = []  # bytes of each gradient buffer while it is empty
        self._parked = OffloadedTensors(())

    def sleep(self) -> int:
        """Give the memory away; returns how many bytes."""
        storages = [gradient.untyped_storage() for gradient in self._gradients]
        self._sizes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)
        self._parked = OffloadedTensors(tensor for tensor in self._kept() if tensor.is_cuda)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return sum(self._sizes) + self._parked.nbytes

    def wake(self) -> None:
        """Take the memory back, with the same bits in all that was kept."""
        self._parked.restore()
        self._parked = OffloadedTensors(())
        for gradient, size in zip(self._gradients, self._sizes, strict=True):
            gradient.untyped_storage().resize_(size)
            gradient.zero_()


class OffloadedTensors:
    """The storages of tensors, emptied, with their bytes on the host."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Empty every storage of `tensors`, however many of them share it."""
        storages = {storage.data_ptr(): storage for tensor in tensors if (storage := tensor.untyped_storage()).nbytes()}
        self._held = [(storage, _host_copy(storage)) for storage in storages.values()]
        for storage, _ in self._held:
            storage.resize_(0)

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return sum(len(copy) for _, copy in self._held)

    def restore(self) -> None:
        """Fill the storages again."""
        for storage, copy in self._held:
            storage.resize_(len(copy))
            _bytes(storage).copy_(copy)


def _host_copy(storage: torch.UntypedStorage) -> Tensor:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    return copy.copy_(_bytes(storage))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
