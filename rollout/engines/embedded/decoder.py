"""Decoder model (Qwen2, Qwen3 and its mixtures of experts, Llama) over cached keys and values, in plain torch.

Low-rank adapters (multi-LoRA): each row of a batch is computed with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, pairwise, product

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.engines.embedded.cache import Cache, Decoding
from rollout.models.architecture import Architecture, Experts
from rollout.models.fused_weights import AdapterShape, AdapterWeights, Layer, Weights
from rollout.models.layout import Projection
from rollout.models.tensors import WeightStream

QUERY_BLOCK = (
    128  # prompt tokens per attention product: bounds its memory, skips most of the masked half
)

# Inductor's linear layer, where torch is built with oneDNN. For few rows it takes up to a third less time than MKL's
# product, whose own copy of the weight, in blocks, is made anew in each; a call costs 15 us more.
_one_dnn: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_WORTH_BLOCKS = 1 << 18  # elements of a weight from which on that pays; in bfloat16 it always does
# Whether a processor multiplies in bfloat16, twice as fast as in float32; one without AVX512-BF16 takes 3 to 6 times as
# long (measured with oneDNN kept to older instructions)
_has_bf16: Callable[[], bool] = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
_BLOCKED_ROWS = 256  # of an input at most: for each number of rows oneDNN compiles kernels, in about a millisecond each


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Prompt tokens to run through the model: positions [start, start + T) of one cache row."""

    row: int
    start: int
    ids: np.ndarray  # [T] int64
    source: int  # row that holds positions [0, start); `row` itself when they are already in place
    adapter: int = 0  # number of the one it is computed with; 0: none
    copies: list[int] = field(
        default_factory=list
    )  # rows that get what it computes, as they have the same prompt


class CachedDecoder:
    """Weights and their forward passes; holds no sequence state."""

    exact = False  # whether a token's logits have the same bits in any batch

    def __init__(
        self,
        shape: Architecture,
        max_length: int,
        halves: tuple[Weights, Weights] | None = None,
        device: str = "cpu",
        adapters: Sequence[AdapterShape] = (),
        bf16: bool = False,
    ) -> None:
        """Compute on `device` (EngineError if there is none), with `adapters` that add nothing before they are `put`.

        `halves` are the buffers of the active and of the next weights, in the host's memory, of their own if not
        given. A GPU computes from a copy of the active one, and so does what multiplies in bfloat16 (`bf16`, where the
        processor can; norms, attention, keys and values stay float32).
        """
        self.shape, self.max_length = shape, max_length
        self.device = _usable(device)
        self.dtype = (
            torch.bfloat16 if bf16 and (self.device.type != "cpu" or _has_bf16()) else torch.float32
        )
        self.halves = halves or (Weights(shape), Weights(shape))
        self.half = 0  # the one in use
        self._active = self.weights  # what is computed with
        self._blocked: dict[
            Tensor, Tensor
        ] = {}  # large weights in the blocks that oneDNN multiplies
        self.adapters = LowRank(shape, adapters, self.device) if adapters else None
        angles = torch.outer(torch.arange(max_length).float(), shape.inverse_frequencies())
        # |rotation|^2 = D^-1/2: rotating both the query and the key also scales their product.
        rotation = torch.polar(torch.full_like(angles, shape.head_dim**-0.25), angles)
        self._rotation = rotation.to(self.device)  # [M, D/2] complex
        self._floor = torch.tensor(shape.norm_eps**0.5, device=self.device)

    @property
    def weights(self) -> Weights:
        """The weights in use, in the host's memory."""
        return self.halves[self.half]

    def load(self, stream: WeightStream) -> None:
        """Replace all weights by a stream of (Hugging Face name, full tensor), as `Weights.fill`; all or nothing."""
        self.halves[1 - self.half].fill(stream)
        self.adopt(1 - self.half)

    def adopt(self, half: int) -> None:
        """Compute from `half`, which is filled."""
        self.half = half
        self.restore()

    def release(self) -> None:
        """Give copies of the weights back."""
        self._active, self._blocked = self.weights, {}

    @torch.inference_mode()
    def restore(self) -> None:
        """Have the weights in use where they are computed with."""
        held, storage = self.weights, self._active.storage
        if self.device.type != "cpu" or self.dtype != torch.float32:
            if self._active in self.halves:
                storage = torch.empty_like(storage, device=self.device, dtype=self.dtype)
            held = Weights(self.shape, storage.copy_(held.storage))
        self._active, self._blocked = held, {} if self.exact else _in_blocks(held)

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    @torch.inference_mode()
    def prefill(self, cache: Cache, spans: Sequence[Span]) -> Tensor:
        """Run the spans, fill their cache rows, and return the logits [len(spans), V] after each span's last token.

        Spans take effect in order: one may start from positions that an earlier one writes.
        """
        sizes = [len(span.ids) for span in spans]
        ends = np.cumsum(sizes)
        positions = self._put(
            np.concatenate([np.arange(s.start, s.start + len(s.ids)) for s in spans])
        )
        last = self._put(ends - 1)
        x = F.embedding(
            self._put(np.concatenate([span.ids for span in spans])), self._active.embed
        ).float()
        rotation = self._rotation[positions][:, None]
        numbers = np.array([span.adapter for span in spans])
        low, chosen = self._low_rank(np.repeat(numbers, sizes)), list[Tensor]()
        final = (
            self.shape.layers - 1 if cache.routing is None else -1
        )  # all tokens' experts are wanted, of all layers
        for index, layer in enumerate(self._active.layers):
            q, k, v = self._project(layer, x, rotation, low[index])
            if index == final:
                x, low = (
                    x[last],
                    self._low_rank(numbers),
                )  # from here on only the last token of each span is wanted
            mixed = x.new_empty(len(x), q[0].numel())
            for n, (span, size, end) in enumerate(zip(spans, sizes, ends.tolist(), strict=True)):
                tokens = slice(end - size, end)
                if span.source != span.row:
                    cache.copy(span.source, span.row, span.start, index)
                keys, values = cache.keys[index, span.row], cache.values[index, span.row]
                stop = span.start + size
                keys[:, :, span.start : stop] = k[tokens].permute(1, 2, 0)
                values[:, span.start : stop] = v[tokens].transpose(0, 1)
                if index == final:
                    mixed[n] = self._attend(q[end - 1 : end], keys, values, stop - 1)
                else:
                    mixed[tokens] = self._attend(q[tokens], keys, values, span.start)
            x = self._finish(layer, x, mixed, low[index], chosen)
        if cache.routing is not None:
            x = x[last]
            _note(cache.routing, spans, _numbers(chosen))
        return self._logits(x)

    @torch.inference_mode()
    def decode(self, cache: Cache, batch: Decoding, ids: np.ndarray) -> Tensor:
        """Run one token `ids` [N] in each row of the batch; logits [N, V]."""
        low, chosen = self._low_rank(batch.adapters), list[Tensor]()
        blocks = cache.blocks(batch, alone=self.exact)
        row, position = self._put(batch.rows), self._put(batch.positions)
        x = F.embedding(self._put(ids), self._active.embed).float()
        rotation = self._rotation[position][:, None]
        for index, layer in enumerate(self._active.layers):
            q, k, v = self._project(layer, x, rotation, low[index])
            keys, values = cache.keys[index], cache.values[index]
            keys[row, :, :, position] = k
            values[row, :, position] = v
            parts = [
                block.attend(q[block.part], keys, values, index, exact=self.exact)
                for block in blocks
            ]
            mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
            x = self._finish(layer, x, mixed, low[index], chosen)
        if cache.routing is not None:
            cache.routing[batch.rows, batch.positions] = _numbers(chosen)
        return self._logits(x)

    def _low_rank(self, numbers: np.ndarray) -> Sequence[Add]:
        """By layer, what adds to a linear layer's output [N, rows] what the adapters by row [N] make of its input."""
        if self.adapters is None:
            return [lambda *_: None] * self.shape.layers
        return self.adapters.of_rows(self._put(numbers))

    def _project(
        self, layer: Layer, x: Tensor, rotation: Tensor, add: Add
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, H, D], rotated keys and values [N, KV, D] of the residual stream `x` [N, hidden]."""
        shape, x = self.shape, self._norm(x, layer.input_norm)
        qkv = self._times(x, layer.qkv, layer.qkv_bias)
        add("qkv", x, qkv)
        qkv = qkv.view(len(x), -1, shape.head_dim)
        qk, v = qkv[:, : shape.heads + shape.kv_heads], qkv[:, shape.heads + shape.kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat(
                [
                    self._norm(qk[:, : shape.heads], layer.q_norm),
                    self._norm(qk[:, shape.heads :], layer.k_norm),
                ],
                1,
            )
        torch.view_as_complex(qk.unflatten(-1, (-1, 2))).mul_(rotation)
        return qk[:, : shape.heads], qk[:, shape.heads :], v

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """Causal attention of queries [T, H, D] at positions start.. over one row; [T, H * D]."""
        groups, kv_heads = self.shape.heads // self.shape.kv_heads, self.shape.kv_heads
        out = q.new_empty(len(q), q[0].numel())
        for first in range(0, len(q), QUERY_BLOCK):
            block = q[first : first + QUERY_BLOCK]
            size, seen = len(block), start + first + len(block)
            folded = (
                block.unflatten(1, (kv_heads, groups))
                .permute(1, 2, 0, 3)
                .reshape(kv_heads, groups * size, -1)
            )
            mixed = self._mixed(folded, keys, values, size, seen)
            out[first : first + size] = (
                mixed.reshape(kv_heads * groups, size, -1).transpose(0, 1).flatten(1)
            )
        return out

    def _mixed(self, q: Tensor, keys: Tensor, values: Tensor, size: int, seen: int) -> Tensor:
        """Attention of queries [KV, groups * size, D] to the first `seen` keys, the latest `size` of them causally."""
        scores = torch.bmm(q, keys[:, :, :seen])
        if size > 1:
            mask = q.new_full((size, size), float("-inf")).triu_(1)
            scores.view(-1, size, seen)[:, :, seen - size :].add_(mask)
        return torch.bmm(scores.softmax(-1), values[:, :seen])

    def _finish(
        self, layer: Layer, x: Tensor, mixed: Tensor, add: Add, chosen: list[Tensor]
    ) -> Tensor:
        """What leaves a layer [N, hidden]; of a sparse one the experts [N, k] of each token join `chosen`."""
        x = self._plus(x, mixed, layer.out)
        add("out", mixed, x)
        normed = self._norm(x, layer.post_norm)
        if layer.router is not None:
            chosen.append(_add_experts(self._times, self.shape.experts, layer, x, normed))
            return x
        gate_up = self._times(normed, layer.gate_up)
        add("gate_up", normed, gate_up)
        wide = _gated(gate_up)
        x.add_(self._times(wide, layer.down))
        add("down", wide, x)
        return x

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root mean square normalisation, in half the time of torch's for few rows."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5)
        return x.div(length.hypot_(self._floor)).mul_(weight)

    def _logits(self, x: Tensor) -> Tensor:
        return self._times(self._norm(x, self._active.norm), self._active.head)

    def _times(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x weightᵀ + bias, in new memory."""
        if x.dtype != weight.dtype:
            out = self._times(x.to(weight.dtype), weight).to(x.dtype)
            return out if bias is None else out.add_(bias)
        blocked = self._blocked.get(weight)
        if blocked is None or _one_dnn is None or len(x) > _BLOCKED_ROWS:
            return F.linear(x, weight, bias)
        return _one_dnn(x, blocked, bias, "none", [], "")

    def _plus(self, x: Tensor, mixed: Tensor, weight: Tensor) -> Tensor:
        whole = weight not in self._blocked and weight.dtype == x.dtype
        return torch.addmm(x, mixed, weight.t()) if whole else self._times(mixed, weight).add_(x)


def _in_blocks(weights: Weights) -> dict[Tensor, Tensor]:
    """Copies of large weights as oneDNN multiplies them, where it does; a copy takes about 1.5 ns an element."""
    if _one_dnn is None or weights.storage.device.type != "cpu":
        return {}
    matrices = chain.from_iterable(
        (layer.qkv, layer.out, layer.gate_up, layer.down) for layer in weights.layers
    )
    least = _WORTH_BLOCKS if weights.storage.dtype == torch.float32 else 0
    large = [w for w in (weights.head, *matrices) if w.dim() == 2 and w.numel() >= least]
    return {weight: torch.ops.mkldnn._reorder_linear_weight(weight) for weight in large}


def _add_experts(
    times: Callable[[Tensor, Tensor], Tensor],
    experts: Experts | None,
    layer: Layer,
    x: Tensor,
    normed: Tensor,
) -> Tensor:
    """Add to `x` [N, hidden], in place, what tokens' experts make of `normed` [N, hidden]; which experts [N, k]."""
    assert experts is not None and layer.router is not None
    shares, chosen = (
        times(normed, layer.router.to(normed.dtype)).softmax(-1).topk(experts.per_token, dim=-1)
    )
    if experts.normalised:
        shares /= shares.sum(-1, keepdim=True)
    order = chosen.flatten().argsort(stable=True)  # places (token, choice), by expert
    sizes = chosen.flatten().bincount(minlength=experts.count).tolist()
    for expert, places in enumerate(order.split(sizes)):
        if len(places):
            tokens = places // experts.per_token
            wide = _gated(times(normed[tokens], layer.gate_up[expert]))
            out = times(wide, layer.down[expert])
            x.index_add_(0, tokens, out.mul_(shares.flatten()[places, None]))
    return chosen


def _numbers(chosen: Sequence[Tensor]) -> np.ndarray:
    """[N, sparse layers, k] from each sparse layer's [N, k]."""
    numbers: np.ndarray = torch.stack(list(chosen), 1).cpu().numpy()
    return numbers


def _note(routing: np.ndarray, spans: Sequence[Span], numbers: np.ndarray) -> None:
    """Write down, in the cache's `routing`, the experts of the spans' tokens, which lie end to end in `numbers`."""
    end = 0
    for span in spans:
        if span.source != span.row:
            routing[span.row, : span.start] = routing[span.source, : span.start]
        first, end = end, end + len(span.ids)
        routing[span.row, span.start : span.start + len(span.ids)] = numbers[first:end]


def _gated(gate_up: Tensor) -> Tensor:
    half = gate_up.shape[-1] // 2
    return F.silu(gate_up[..., :half]).mul_(gate_up[..., half:])


def _usable(device: str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for it
        raise EngineError(
            f"torch cannot compute on device '{device}' here ({str(error).splitlines()[0]})"
        ) from error


# of a decoder's layer the linear layers, with the projections that each fuses, in the order of its rows
_FUSED: dict[str, tuple[Projection, ...]] = {
    "qkv": ("q", "k", "v"),
    "out": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
Add = Callable[
    [str, Tensor, Tensor], object
]  # (linear layer, its input [N, inputs], its output [N, rows], in place)
# by linear layer A of its projections, one above the other [R ..., inputs], and by projection its place in the layer's
# output and (scale · B)ᵀ [R, rows]
_SideBySide = dict[str, tuple[Tensor, dict[Projection, tuple[slice, Tensor]]]]


class LowRank:
    """The A and B of several adapters side by side, as if they were one of all their ranks, R.

    A row's product with all A is set to 0 where the rank is not its adapter's; so a batch takes two products for each
    projection, however many adapters are in it, and no row sees another's adapter.
    """

    def __init__(
        self, shape: Architecture, adapters: Sequence[AdapterShape], device: torch.device
    ) -> None:
        """All zero, and so without effect, before `put`."""
        ends = [0, *accumulate(adapter.rank for adapter in adapters)]
        self._ranks = [slice(first, last) for first, last in pairwise(ends)]
        self._scales = [adapter.scale for adapter in adapters]
        # by number of an adapter, of which 0 is none, which ranks are others'
        self._others = torch.ones(1 + len(adapters), ends[-1], dtype=torch.bool, device=device)
        for number, ranks in enumerate(self._ranks, 1):
            self._others[number, ranks] = False
        places: dict[Projection, slice] = {}
        for fused in _FUSED.values():
            rows = pairwise(accumulate((shape.projections[x][0] for x in fused), initial=0))
            places |= {x: slice(*own) for x, own in zip(fused, rows, strict=True)}
        held = {x for adapter in adapters for x in adapter.targets}
        self._layers: list[_SideBySide] = [{} for _ in range(shape.layers)]
        for layer, linear in product(self._layers, _FUSED):
            if own := [x for x in _FUSED[linear] if x in held]:
                a = torch.zeros(len(own) * ends[-1], shape.projections[own[0]][1], device=device)
                b = {x: torch.zeros(ends[-1], shape.projections[x][0], device=device) for x in own}
                layer[linear] = a, {x: (places[x], b[x]) for x in own}

    def put(self, number: int, weights: AdapterWeights) -> None:
        """Compute adapter `number`, counted from 1, with `weights` from now on.

        Raises:
            EngineError: they are not finite; in the products they would reach other adapters' rows.
        """
        for name, tensor in weights.tensors():
            if not tensor.isfinite().all():
                raise EngineError(
                    f"the adapter's tensor '{name}' has numbers that are not finite; see what trained it"
                )
        ranks, scale = self._ranks[number - 1], self._scales[number - 1]
        for layer, own in zip(self._layers, weights.layers, strict=True):
            for held, parts in layer.values():
                for x, rows in zip(parts, held.chunk(len(parts)), strict=True):
                    if x in own:
                        rows[ranks], parts[x][1][ranks] = own[x][0], scale * own[x][1].t()

    def of_rows(self, numbers: Tensor) -> list[Add]:
        """By layer, what adds for each row [N] what its adapter, by number, adds."""
        others = self._others[numbers, None]
        return [partial(self._add, layer, others) for layer in self._layers]

    def _add(self, layer: _SideBySide, others: Tensor, linear: str, x: Tensor, out: Tensor) -> None:
        """Add to `out` [N, rows], in place, scale · B A x of each row but for ranks that are `others` [N, 1, R]."""
        if linear not in layer:
            return
        a, parts = layer[linear]
        low = F.linear(x, a).unflatten(-1, (len(parts), -1)).masked_fill_(others, 0.0)
        for number, (rows, b) in enumerate(parts.values()):
            out[:, rows].addmm_(low[:, number], b)
