"""The decoder of the deterministic mode: a token's logits have the same bits in any batch, and in the trainer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.engines.embedded.decoder import Add, CachedDecoder
from rollout.models.exact import COLUMNS, products_are_exact, row_attention, row_product
from rollout.models.fused_weights import Layer


def exact_decoder(decoder: CachedDecoder) -> CachedDecoder:
    """A decoder of the same weights that computes exactly; the same one where that is not possible.

    It is on a CPU in float32 without adapters, where the library's products are as `models/exact.py` needs them.
    """
    if (
        decoder.device.type != "cpu"
        or decoder.adapters is not None
        or decoder.dtype != torch.float32
    ):
        return decoder
    layer = decoder.weights.layers[0]
    wide = [w if layer.router is None else w[0] for w in (layer.gate_up, layer.down)]
    if not products_are_exact([layer.qkv, layer.out, *wide, decoder.weights.head]):
        return decoder
    exact = ExactDecoder(decoder.shape, decoder.max_length, decoder.halves)
    exact.adopt(decoder.half)
    return exact


class ExactDecoder(CachedDecoder):
    """Operation by operation what Megatron computes with `TrainerSpec.deterministic`; slower by half."""

    exact = True

    def __init__(self, *args: Any) -> None:
        """As `CachedDecoder`."""
        super().__init__(*args)
        angles = torch.outer(
            torch.arange(self.max_length).float(), self.shape.inverse_frequencies()
        )
        angles = torch.cat([angles, angles], -1)
        self._rotation = torch.stack([angles.cos(), angles.sin()], -1)  # [M, D, 2]

    def _project(
        self, layer: Layer, x: Tensor, rotation: Tensor, add: Add
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As above, by cosines and sines [N, 1, D, 2]: halves of a head are rotated, not neighbours."""
        shape = self.shape
        qkv = self._times(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias).unflatten(
            -1, (-1, shape.head_dim)
        )
        *parts, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        parts = [_halves(part) for part in parts]
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm, layer.k_norm
            parts = [
                self._norm(part, _halves(norm)) for part, norm in zip(parts, norms, strict=True)
            ]
        cos, sin = rotation.unbind(-1)
        q, k = (
            part * cos + torch.cat([-part.chunk(2, -1)[1], part.chunk(2, -1)[0]], -1) * sin
            for part in parts
        )
        return q * shape.head_dim**-0.5, k, v

    def _mixed(self, q: Tensor, keys: Tensor, values: Tensor, size: int, seen: int) -> Tensor:
        wide = COLUMNS * -(-seen // COLUMNS)
        near = torch.arange(wide) <= torch.arange(seen - size, seen)[:, None]
        mask = torch.where(near, 0.0, -torch.inf).repeat(q.shape[1] // size, 1)[None]
        return row_attention(q, keys[:, :, :wide], values[:, :wide], mask)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.shape.norm_eps)

    def _times(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = row_product(x, weight)
        return product if bias is None else product + bias

    def _plus(self, x: Tensor, mixed: Tensor, weight: Tensor) -> Tensor:
        return x + row_product(mixed, weight)


def _halves(pairs: Tensor) -> Tensor:
    """[..., D] in which the two elements that are rotated together are half a head apart, in place of neighbours."""
    halves: Tensor = pairs.unflatten(-1, (-1, 2)).transpose(-1, -2)
    return halves.flatten(-2)
