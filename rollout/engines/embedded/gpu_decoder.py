"""Decoder model on a GPU, with Triton kernels between its matrix products.

Letters of shapes: N rows of a decoding batch, T tokens, V vocabulary, H query heads, KV key and value
heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.base.terminal import say
from rollout.engines.embedded.cache import KVCache
from rollout.engines.embedded.decoder import (
    CachedDecoder,
    PromptSpan,
    record_routing,
    stack_experts,
)
from rollout.engines.embedded.gpu_inputs import upload_arrays
from rollout.engines.embedded.gpu_memory import PREFILL_TOKENS, rows_that_fit
from rollout.engines.embedded.gpu_ops import (
    add_norm,
    attend_to_cache,
    decoding_splits,
    decoding_tile_rows,
    fused_silu_and_mul,
    query_blocks,
    rotate_and_store,
)
from rollout.engines.embedded.low_rank import AddLowRank
from rollout.engines.embedded.products import add_experts
from rollout.models.architecture import Architecture
from rollout.models.fused_weights import DecoderWeights, LayerWeights


def make_decoder(
    shape: Architecture,
    max_length: int,
    halves: tuple[DecoderWeights, DecoderWeights] | None = None,
    *,
    device: str = "cpu",
    **settings: Any,
) -> CachedDecoder:
    """Return a decoder for a device: `CachedDecoder` for a CPU, else `GpuDecoder`.

    Args:
        settings: `adapters` and `bf16` of `CachedDecoder`.
    """
    kind = CachedDecoder if device == "cpu" else GpuDecoder
    return kind(shape, max_length, halves, device, **settings)


class GpuDecoder(CachedDecoder):
    """Decoder whose matrices, keys and values are in `dtype`; the residual stream is float32.

    Attention reads each row of the cache up to its own length, so no `AttentionPlanner` cuts a batch
    into blocks of rows: `GpuSteps` calls `decode_inputs` instead of `decode`.
    """

    on_gpu = True
    prefill_tokens = PREFILL_TOKENS

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.cache_dtype = self.dtype
        # Cosine and sine of each position and pair, times D^-1/4 [M, D / 2, 2]
        self._cos_sin = torch.view_as_real(self._rotation)
        self._heads_per_kv = self.shape.heads // self.shape.kv_heads

    def rows_that_fit(self, rows: int) -> int:
        """Return how many of `rows` sequences the free memory of a GPU has room for.

        Raises:
            EngineError: not even one fits.
        """
        if self.device.type != "cuda":
            return rows
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        fitting = rows_that_fit(
            self.shape,
            rows,
            self.max_length,
            free_bytes,
            bf16=self.dtype == torch.bfloat16,
            adapters=self.adapters is not None,
        )
        if fitting < rows:
            say(f"the GPU has memory for {fitting} of {rows} engine.slots; other requests wait")
        return fitting

    @torch.inference_mode()
    def decode_inputs(
        self,
        cache: KVCache,
        token_ids: Tensor,
        adapter_numbers: Tensor,
        coordinates: Tensor,
        blocks: Tensor,
    ) -> Tensor:
        """Compute one token in each row, and write its key and value into the cache.

        Args:
            cache: the cache.
            token_ids, adapter_numbers, coordinates, blocks: arrays of `decoding_inputs`, on the
                device.

        Returns:
            Logits [N, V].
        """
        kv_heads = self.shape.kv_heads
        attend = partial(
            attend_to_cache,
            blocks=blocks,
            tile_rows=decoding_tile_rows(self._heads_per_kv),
            splits=decoding_splits(len(token_ids), kv_heads, self.max_length),
        )
        x, experts = self._compute_layers(cache, token_ids, adapter_numbers, coordinates, attend)
        if cache.routing is not None:
            host_coordinates = coordinates.cpu().numpy()
            cache.routing[host_coordinates[:, 0], host_coordinates[:, 1]] = stack_experts(experts)
        return self._logits(x)

    def _compute_spans(
        self, cache: KVCache, spans: Sequence[PromptSpan], *, last_only: bool
    ) -> Tensor:
        """Compute the spans, and write their keys and values into the cache; see `CachedDecoder`."""
        parts = [
            self._compute_independent_spans(cache, part, last_only=last_only)
            for part in independent_spans(spans)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _compute_independent_spans(
        self, cache: KVCache, spans: Sequence[PromptSpan], *, last_only: bool
    ) -> Tensor:
        """Compute spans in one pass; none may start from keys that another one computes.

        See `CachedDecoder._compute_spans` for the result.
        """
        for span in spans:
            if span.source != span.row:
                cache.copy_prefix(span.source, [span.row], span.start)
        rows = np.array([span.row for span in spans])
        starts = np.array([span.start for span in spans])
        sizes = np.array([len(span.token_ids) for span in spans])
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        host_blocks, tile_rows = query_blocks(rows, starts, sizes, self._heads_per_kv, self.dtype)
        token_ids, adapter_numbers, coordinates, blocks, last = upload_arrays(
            [
                np.concatenate([span.token_ids for span in spans]),
                np.repeat([span.adapter for span in spans], sizes),
                np.stack([np.repeat(rows, sizes), positions], 1),
                host_blocks,
                np.cumsum(sizes) - 1,
            ],
            self.device,
        )
        attend = partial(attend_to_cache, blocks=blocks, tile_rows=tile_rows, splits=1)
        x, experts = self._compute_layers(cache, token_ids, adapter_numbers, coordinates, attend)
        if cache.routing is not None:
            record_routing(cache.routing, spans, stack_experts(experts))
        return x[last] if last_only else x

    def _compute_layers(
        self,
        cache: KVCache,
        token_ids: Tensor,
        adapter_numbers: Tensor,
        coordinates: Tensor,
        attend: Any,
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute all layers for tokens, and write their keys and values into the cache.

        Args:
            token_ids: [T].
            adapter_numbers: number of each token's adapter [T]; 0 for none.
            coordinates: cache row and position of each token [T, 2].
            attend: function of queries [T, H, D] and a layer's keys and values [S, KV, M, D], which
                returns the attention [T, H, D].

        Returns:
            Output of the last layer [T, hidden], and the experts [T, k] of each sparse layer.
        """
        low_rank = self._low_rank_of(adapter_numbers)
        experts: list[Tensor] = []
        x = F.embedding(token_ids, self._active.embed).float()
        # Output of the latest attention or MLP, which the next `add_norm` adds to `x` in place.
        delta: Tensor | None = None
        eps = self.shape.norm_eps
        for index, layer in enumerate(self._active.layers):
            add_low_rank = low_rank[index]
            keys = cache.keys[index].transpose(-1, -2)
            values = cache.values[index]
            normed = add_norm(x, delta, layer.input_norm, eps, self.dtype)
            qkv = self._linear("qkv", normed, layer.qkv, add_low_rank, layer.qkv_bias)
            q = rotate_and_store(
                qkv, layer.q_norm, layer.k_norm, self._cos_sin, coordinates, keys, values, eps
            )
            attended = attend(q, keys, values).flatten(1)
            delta = self._linear("out", attended, layer.out, add_low_rank)
            if layer.router is None:
                delta = self._mlp(layer, x, delta, add_low_rank)
            else:
                assert self.shape.experts is not None
                # in float32, because rounding could change which experts are chosen
                normed = add_norm(x, delta, layer.post_norm, eps, torch.float32)
                experts.append(add_experts(self._multiply, self.shape.experts, layer, x, normed))
                delta = None  # `add_experts` has added the output of the experts to `x`
        if delta is not None:
            x.add_(delta)
        return x, experts

    def _mlp(
        self, layer: LayerWeights, x: Tensor, delta: Tensor, add_low_rank: AddLowRank | None
    ) -> Tensor:
        """Add `delta` to `x` in place, and return the output of the MLP."""
        normed = add_norm(x, delta, layer.post_norm, self.shape.norm_eps, self.dtype)
        gate_up = self._linear("gate_up", normed, layer.gate_up, add_low_rank)
        wide = fused_silu_and_mul(gate_up, self.dtype)
        return self._linear("down", wide, layer.down, add_low_rank)

    def _linear(
        self,
        name: str,
        x: Tensor,
        weight: Tensor,
        add_low_rank: AddLowRank | None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return x weightᵀ + bias plus the output of the adapters, which is added in float32."""
        product = F.linear(x, weight, bias)
        if add_low_rank is not None:
            product = product.float()
            add_low_rank(name, x.float(), product)
        return product

    def _low_rank_of(self, adapter_numbers: Tensor) -> Sequence[AddLowRank | None]:
        """Return a function for each layer, which adds the output of each token's adapter.

        The functions are None if the decoder has no adapters.
        """
        if self.adapters is None:
            return [None] * self.shape.layers
        return self.adapters.for_rows(adapter_numbers)

    def _logits(self, x: Tensor) -> Tensor:
        """Return float32 logits [N, V], which are not rounded to the type of the factors."""
        head = self._active.head
        normed = add_norm(x.contiguous(), None, self._active.norm, self.shape.norm_eps, self.dtype)
        if self.dtype == torch.float32:
            return F.linear(normed, head)
        if self.device.type == "cpu":  # where torch.mm has no `out_dtype`
            return F.linear(normed.float(), head.float())
        return torch.mm(normed, head.t(), out_dtype=torch.float32)


def independent_spans(spans: Sequence[PromptSpan]) -> list[list[PromptSpan]]:
    """Split spans, in order, into parts in which none starts from keys that another one computes."""
    parts: list[list[PromptSpan]] = []
    written: set[int] = set()
    for span in spans:
        needs_earlier = span.source != span.row and span.source in written
        if not parts or needs_earlier:
            parts.append([])
            written = set()
        parts[-1].append(span)
        written.add(span.row)
    return parts
