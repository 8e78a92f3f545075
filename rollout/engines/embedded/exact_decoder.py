"""Decoder of the exact mode: logits have the same bits in any batch, and in the trainer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.engines.embedded.decoder import CachedDecoder
from rollout.engines.embedded.low_rank import AddLowRank
from rollout.models.batch_invariant import (
    KEY_MULTIPLE,
    products_are_batch_invariant,
    row_attention,
    row_product,
)
from rollout.models.fused_weights import LayerWeights


def exact_decoder(decoder: CachedDecoder) -> CachedDecoder:
    """Return an exact decoder of the same weights, or `decoder` itself if there can be none.

    Exact decoding needs a CPU, float32, no adapters, and a matrix library whose products are
    batch-invariant (see `models/batch_invariant.py`).
    """
    on_cpu = decoder.device.type == "cpu"
    if not on_cpu or decoder.adapters is not None or decoder.dtype != torch.float32:
        return decoder
    layer = decoder.weights.layers[0]
    mlp = [layer.gate_up, layer.down]
    if layer.router is not None:
        mlp = [weight[0] for weight in mlp]  # of the first expert
    if not products_are_batch_invariant([layer.qkv, layer.out, *mlp, decoder.weights.head]):
        return decoder
    exact = ExactDecoder(decoder.shape, decoder.max_length, decoder.halves)
    exact.adopt(decoder.half)
    return exact


class ExactDecoder(CachedDecoder):
    """Decoder with the operations of a trainer whose `TrainerSpec` is deterministic.

    It takes 1.6 times as long as `CachedDecoder`.
    """

    exact = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        frequencies = self.shape.inverse_frequencies()
        angles = torch.outer(torch.arange(self.max_length).float(), frequencies)
        angles = torch.cat([angles, angles], -1)
        self._rotation = torch.stack([angles.cos(), angles.sin()], -1)  # [M, D, 2]

    def _project(
        self, layer: LayerWeights, x: Tensor, rotation: Tensor, add_low_rank: AddLowRank
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize and project `x`; see `CachedDecoder`.

        As in the trainer, the elements that are rotated together are half a head apart, and the
        scale is in the queries alone.

        Args:
            layer: weights of the layer.
            x: [N, hidden].
            rotation: cosines and sines [N, 1, D, 2].
            add_low_rank: not used, because exact decoders have no adapters.
        """
        shape = self.shape
        normed = self._norm(x, layer.input_norm)
        qkv = self._multiply(normed, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, shape.head_dim))
        q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        q = _pairs_to_halves(q)
        k = _pairs_to_halves(k)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._norm(q, _pairs_to_halves(layer.q_norm))
            k = self._norm(k, _pairs_to_halves(layer.k_norm))
        cos, sin = rotation.unbind(-1)
        q = _rotate(q, cos, sin)
        k = _rotate(k, cos, sin)
        return q * shape.head_dim**-0.5, k, v

    def _attend_block(
        self, q: Tensor, keys: Tensor, values: Tensor, size: int, visible: int
    ) -> Tensor:
        """Attend with batch-invariant products; see `CachedDecoder`.

        The number of keys is rounded up to a multiple of `KEY_MULTIPLE`, and the mask hides the rest.
        """
        width = KEY_MULTIPLE * -(-visible // KEY_MULTIPLE)
        key_positions = torch.arange(width)
        query_positions = torch.arange(visible - size, visible)
        is_visible = key_positions <= query_positions[:, None]
        mask = torch.where(is_visible, 0.0, -torch.inf)  # [size, width]
        heads_per_kv = q.shape[1] // size
        mask = mask.repeat(heads_per_kv, 1)[None]
        return row_attention(q, keys[:, :, :width], values[:, :width], mask)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.shape.norm_eps)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = row_product(x, weight)
        return product if bias is None else product + bias

    def _multiply_add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return residual + row_product(x, weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [..., D], whose halves have the elements that are rotated together."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _pairs_to_halves(pairs: Tensor) -> Tensor:
    """Reorder [..., D] so that elements that are rotated together are half a head apart."""
    halves: Tensor = pairs.unflatten(-1, (-1, 2)).transpose(-1, -2)
    return halves.flatten(-2)
