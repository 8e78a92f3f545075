"""Low-rank adapters of one model in the embedded engine (multi-LoRA): each row of a batch is computed with its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_mas.rollout.base.errors import EngineError
from mcore_mas.rollout.models.architecture import Architecture
from mcore_mas.rollout.models.fused_weights import AdapterShape, AdapterWeights
from mcore_mas.rollout.models.layout import Projection

# of a decoder's layer the linear layers, with the projections that each fuses, in the order of its rows
_FUSED: dict[str, tuple[Projection, ...]] = {
    "qkv": ("q", "k", "v"),
    "out": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
Add = Callable[[str, Tensor, Tensor], object]  # (linear layer, its input [N, inputs], its output [N, rows], in place)


class LowRank:
    """The A and B of several adapters side by side, as if they were one of all their ranks, R.

    A row's product with all A is set to 0 where the rank is not its adapter's; so a batch takes two products for each
    projection, however many adapters are in it, and no row sees another's adapter.
    """

    def __init__(self, shape: Architecture, adapters: Sequence[AdapterShape], device: torch.device) -> None:
        """All zero, and so without effect, before `put`."""
        ends = [0, *accumulate(adapter.rank for adapter in adapters)]
        self._ranks = [slice(first, last) for first, last in pairwise(ends)]
        self._scales = [adapter.scale for adapter in adapters]
        # by number of an adapter, of which 0 is none, which ranks are others'
        self._others = torch.ones(1 + len(adapters), ends[-1], dtype=torch.bool, device=device)
        for number, ranks in enumerate(self._ranks, 1):
            self._others[number, ranks] = False
        held = {x for adapter in adapters for x in adapter.targets}
        self._layers = [_Layer(shape, held, ends[-1], device) for _ in range(shape.layers)]

    def put(self, number: int, weights: AdapterWeights) -> None:
        """Compute adapter `number`, counted from 1, with `weights` from now on.

        Raises:
            EngineError: they are not finite; in the products they would reach other adapters' rows.
        """
        for name, tensor in weights.tensors():
            if not tensor.isfinite().all():
                raise EngineError(f"the adapter's tensor '{name}' has numbers that are not finite; see what trained it")
        ranks, scale = self._ranks[number - 1], self._scales[number - 1]
        for layer, own in zip(self._layers, weights.layers, strict=True):
            for x, (a, b) in own.items():
                layer.a[x][ranks] = a
                layer.b[x][ranks] = scale * b.t()

    def of_rows(self, numbers: Tensor) -> list[Add]:
        """By layer, what adds for each row [N] what its adapter, by number, adds."""
        others = self._others[numbers, None]
        return [partial(layer.add, others) for layer in self._layers]


class _Layer:
    """Of a decoder layer, by projection, A [R, inputs] and (scale · B)ᵀ [R, rows]; a linear layer's A lie in one."""

    def __init__(self, shape: Architecture, held: set[Projection], ranks: int, device: torch.device) -> None:
        self.a: dict[Projection, Tensor] = {}
        self.b: dict[Projection, Tensor] = {}
        self._fused: dict[str, tuple[Tensor, list[tuple[slice, Tensor]]]] = {}
        for linear, projections in _FUSED.items():
            own = [x for x in projections if x in held]
            rows = list(accumulate((shape.projections[x][0] for x in projections), initial=0))
            places = {x: slice(first, last) for x, (first, last) in zip(projections, pairwise(rows), strict=True)}
            inputs = shape.projections[projections[0]][1]
            a = torch.zeros(len(own), ranks, inputs, device=device)
            for number, x in enumerate(own):
                self.a[x] = a[number]
                self.b[x] = torch.zeros(ranks, shape.projections[x][0], device=device)
            if own:
                self._fused[linear] = a.flatten(0, 1), [(places[x], self.b[x]) for x in own]

    def add(self, others: Tensor, linear: str, x: Tensor, out: Tensor) -> None:
        """Add to `out` [N, rows], in place, scale · B A x of each row but for ranks that are `others` [N, 1, R]."""
        if linear not in self._fused:
            return
        a, parts = self._fused[linear]
        low = F.linear(x, a).unflatten(-1, (len(parts), -1)).masked_fill_(others, 0.0)
        for number, (rows, b) in enumerate(parts):
            out[:, rows].addmm_(low[:, number], b)
