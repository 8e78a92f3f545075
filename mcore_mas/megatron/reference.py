"""The frozen reference: a second set of weights that takes the place of the trained ones for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from mcore_mas.megatron.models import Architecture
from mcore_mas.megatron.sources import Source
from mcore_mas.megatron.weights import scatter


class Reference:
    """One CPU copy of this rank's shard of full tensors, read when first needed."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        architecture: Architecture,
        source: Callable[[], Callable[[str], Source]],
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
            scatter(frozen, self._architecture, self._source())
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
