"""Low-rank adapters of a decoder (multi-LoRA): each row of a batch is computed with its own adapter.

Letters of shapes: N rows of a batch, R ranks of all adapters together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.models.adapter_weights import AdapterShape, AdapterWeights
from rollout.models.architecture import Architecture
from rollout.models.layout import Projection

# Linear layers of a decoder layer, with the projections that each fuses, in the order of its outputs.
_FUSED: dict[str, tuple[Projection, ...]] = {
    "qkv": ("q", "k", "v"),
    "out": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}

# Function of (linear layer, input [N, inputs], output [N, outputs]) that adds the adapters' share of
# the output in place.
AddLowRank = Callable[[str, Tensor, Tensor], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProjectionAdapters:
    """A and B of all adapters for one projection of a decoder layer.

    Attributes:
        projection: name of the projection.
        a: A [R, inputs], a view of the A of the linear layer.
        b: (scale B)ᵀ [R, outputs of the projection].
        outputs: slice of the projection in the output of the linear layer.
    """

    projection: Projection
    a: Tensor
    b: Tensor
    outputs: slice


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinearAdapters:
    """A and B of all adapters for one linear layer of a decoder layer.

    Attributes:
        a: A of all adapted projections, one above the other [projections R, inputs].
        projections: the adapted projections, in the order of `a`.
    """

    a: Tensor
    projections: list[_ProjectionAdapters]


_LayerAdapters = dict[str, _LinearAdapters]  # by linear layer


class LowRank:
    """A and B of several adapters side by side, as if they were one adapter of all their ranks R.

    The product of a row with all A is set to 0 at the ranks of other adapters. So a batch takes one
    product with A for each linear layer and one with B for each projection, however many adapters it
    has, and no row is computed with the adapter of another row.
    """

    def __init__(
        self, architecture: Architecture, adapters: Sequence[AdapterShape], device: torch.device
    ) -> None:
        """Allocate the adapters, which are 0 and so have no effect before `put`."""
        ends = [0, *accumulate(adapter.rank for adapter in adapters)]
        total_rank = ends[-1]
        self._ranks = [slice(first, last) for first, last in pairwise(ends)]
        self._scales = [adapter.scale for adapter in adapters]

        # [1 + adapters, R]: True at the ranks that do not belong to the adapter; row 0 stands for no
        # adapter.
        self._masked_ranks = torch.ones(
            1 + len(adapters), total_rank, dtype=torch.bool, device=device
        )
        for number, ranks in enumerate(self._ranks, 1):
            self._masked_ranks[number, ranks] = False

        output_slices = _output_slices(architecture)
        targets: set[Projection] = set()
        for adapter in adapters:
            targets.update(adapter.targets)
        self._layers: list[_LayerAdapters] = []
        for _ in range(architecture.layers):
            layer: _LayerAdapters = {}
            for linear, fused in _FUSED.items():
                adapted = [projection for projection in fused if projection in targets]
                if not adapted:
                    continue
                inputs = architecture.projections[adapted[0]][1]
                a = torch.zeros(len(adapted) * total_rank, inputs, device=device)
                projections = []
                for projection, a_part in zip(adapted, a.chunk(len(adapted)), strict=True):
                    outputs = architecture.projections[projection][0]
                    projections.append(
                        _ProjectionAdapters(
                            projection=projection,
                            a=a_part,
                            b=torch.zeros(total_rank, outputs, device=device),
                            outputs=output_slices[projection],
                        )
                    )
                layer[linear] = _LinearAdapters(a=a, projections=projections)
            self._layers.append(layer)

    def put(self, number: int, weights: AdapterWeights) -> None:
        """Replace the weights of adapter `number`, counted from 1; 0 is the base model.

        Raises:
            EngineError: a tensor has infinite values or NaN. The products of all adapters together
                would spread them to rows of other adapters.
        """
        for name, tensor in weights.tensors():
            if not tensor.isfinite().all():
                raise EngineError(
                    f"the adapter's tensor '{name}' has numbers that are not finite; look at the "
                    "training that produced it"
                )
        ranks = self._ranks[number - 1]
        scale = self._scales[number - 1]
        for layer, new_weights in zip(self._layers, weights.layers, strict=True):
            for linear_adapters in layer.values():
                for adapted in linear_adapters.projections:
                    if adapted.projection not in new_weights:
                        continue  # a projection that only other adapters have
                    new_a, new_b = new_weights[adapted.projection]
                    adapted.a[ranks] = new_a
                    adapted.b[ranks] = scale * new_b.t()

    def for_rows(self, adapter_numbers: Tensor) -> list[AddLowRank]:
        """Return a function for each layer, which adds the output of each row's adapter.

        Args:
            adapter_numbers: number of each row's adapter [N]; 0 for none.
        """
        masked_ranks = self._masked_ranks[adapter_numbers, None]  # [N, 1, R]
        return [partial(self._add, layer, masked_ranks) for layer in self._layers]

    def _add(
        self, layer: _LayerAdapters, masked_ranks: Tensor, linear: str, x: Tensor, output: Tensor
    ) -> None:
        """Add scale B A x to `output` [N, outputs] of a linear layer, each row with its own adapter.

        Args:
            layer: adapters of the decoder layer.
            masked_ranks: [N, 1, R] True at the ranks that do not belong to the adapter of the row.
            linear: name of the linear layer.
            x: [N, inputs] input of the linear layer.
            output: output of the linear layer, which is changed in place.
        """
        if linear not in layer:
            return
        adapters = layer[linear]
        low = F.linear(x, adapters.a)  # [N, projections R]
        low = low.unflatten(-1, (len(adapters.projections), -1)).masked_fill_(masked_ranks, 0.0)
        for index, adapted in enumerate(adapters.projections):
            output[:, adapted.outputs].addmm_(low[:, index], adapted.b)


def _output_slices(architecture: Architecture) -> dict[Projection, slice]:
    """Return the slice of each projection in the output of its linear layer."""
    slices: dict[Projection, slice] = {}
    for fused in _FUSED.values():
        first = 0
        for projection in fused:
            last = first + architecture.projections[projection][0]
            slices[projection] = slice(first, last)
            first = last
    return slices
