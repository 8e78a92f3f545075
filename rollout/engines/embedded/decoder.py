"""Decoder model over cached keys and values, in plain torch.

It supports Qwen2, Qwen3 (dense and mixtures of experts) and Llama.

Letters of shapes: N rows, T tokens of a prompt, V vocabulary, H query heads, KV key and value heads, D
head dimension, M positions, k experts of a token, C tokens of a reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.engines.embedded.attention import GroupBlock, RowBlock
from rollout.engines.embedded.cache import DecodeBatch, KVCache
from rollout.engines.embedded.low_rank import AddLowRank, LowRank
from rollout.engines.embedded.products import BlockedWeights, add_experts, has_bf16, silu_and_mul
from rollout.engines.embedded.sampling import token_logprobs
from rollout.models.adapter_weights import AdapterShape
from rollout.models.architecture import Architecture
from rollout.models.fused_weights import DecoderWeights, LayerWeights
from rollout.models.tensors import WEIGHT_UPDATE, WeightStream

# Number of prompt tokens whose queries are multiplied with the keys at a time. This bounds the memory
# of the scores, and most of the scores that the causal mask hides are not computed. Also the number of
# tokens of a reply whose logits are computed at a time.
QUERY_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpan:
    """Part of a prompt to compute: its tokens from position `start` on.

    Attributes:
        row: cache row that the keys and values of the tokens are written to.
        start: position of the first of the tokens.
        token_ids: [T] int64.
        source: row from which the keys of the positions before `start` are copied; if it is `row`,
            nothing is copied.
        adapter: number of the adapter; 0 for none.
        copies: other rows with the same prompt. `EmbeddedEngine` copies the keys to them after the pass.
    """

    row: int
    start: int
    token_ids: np.ndarray
    source: int
    adapter: int = 0
    copies: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Position behind the last token of the span."""
        return self.start + len(self.token_ids)


class CachedDecoder:
    """Weights of a decoder and its forward passes; it holds no state of sequences.

    The host's memory has two `halves`, and each has room for all weights. One half holds the active
    weights, and the next version is written into the other. A GPU computes from a copy of the active
    half, and so does a CPU that multiplies in bfloat16.

    Attributes:
        exact: True if the logits of a token have the same bits in any batch.
        on_gpu: True if `GpuSteps` decodes, without an `AttentionPlanner`.
        prefill_tokens: a pass admits prompts until it has this many tokens.
        cache_dtype: type of keys and values.
        shape: architecture of the model.
        halves: two buffers, each for all weights.
        half: index of the active half.
        dtype: type in which matrices are multiplied. On a CPU, all else is float32.
        adapters: weights of the adapters; None if the decoder has none.
        products: matrix products with the active weights.
    """

    exact = False
    on_gpu = False
    prefill_tokens = 1024  # more would not stay in the processor's cache
    cache_dtype = torch.float32

    def __init__(
        self,
        shape: Architecture,
        max_length: int,
        halves: tuple[DecoderWeights, DecoderWeights] | None = None,
        device: str = "cpu",
        adapters: Sequence[AdapterShape] = (),
        bf16: bool = False,
    ) -> None:
        """Allocate the weights; none are loaded before `load` or `adopt`.

        Args:
            shape: architecture of the model.
            max_length: maximum number of tokens of prompt and reply.
            halves: two buffers, each for all weights; None: the decoder allocates them, uninitialised.
            device: name of the torch device that computes.
            adapters: shapes of adapters, which have no effect before they are `put`.
            bf16: multiply in bfloat16; a CPU without instructions for it multiplies in float32.

        Raises:
            EngineError: torch cannot compute on the device.
        """
        self.shape = shape
        self.max_length = max_length
        self.device = _usable_device(device)
        use_bf16 = bf16 and (self.device.type != "cpu" or has_bf16())
        self.dtype = torch.bfloat16 if use_bf16 else torch.float32
        self.halves = halves or (DecoderWeights(shape), DecoderWeights(shape))
        self.half = 0
        self.adapters = LowRank(shape, adapters, self.device) if adapters else None
        # The weights that the passes read: the active half, or its copy on the device and in `dtype`.
        self._active = self.weights
        self.products = BlockedWeights()

        angles = torch.outer(torch.arange(max_length).float(), shape.inverse_frequencies())
        # |rotation|^2 = D^-1/2: rotating the query and the key also scales their product.
        rotation = torch.polar(torch.full_like(angles, shape.head_dim**-0.25), angles)
        self._rotation = rotation.to(self.device)  # complex [M, D/2]
        self._norm_floor = torch.tensor(shape.norm_eps**0.5, device=self.device)

    def rows_that_fit(self, rows: int) -> int:
        """Return how many of `rows` sequences the device has memory for; all on a CPU."""
        return rows

    @property
    def weights(self) -> DecoderWeights:
        """The active weights in the host's memory."""
        return self.halves[self.half]

    def load(self, stream: WeightStream, where: str = WEIGHT_UPDATE) -> None:
        """Replace all weights by a stream of (Hugging Face name, full tensor).

        Args:
            stream: stream of the tensors.
            where: folder or other source of the stream, for errors.

        Raises:
            EngineError: see `DecoderWeights.fill`. The present weights stay active.
        """
        self.halves[1 - self.half].fill(stream, where)
        self.adopt(1 - self.half)

    def adopt(self, half: int) -> None:
        """Activate the weights in one of the `halves`, 0 or 1, which has been filled."""
        self.half = half
        self.restore()

    def release(self) -> None:
        """Free the copies of the active weights."""
        self._active = self.weights
        self.products = BlockedWeights()

    @torch.inference_mode()
    def restore(self) -> None:
        """Copy the active weights to the device in `dtype`, and on a CPU into blocks for oneDNN.

        An earlier copy on the device is overwritten, because CUDA graphs hold its address. In float32
        on a CPU, the passes read the active half itself.
        """
        active = self.weights
        if self.device.type != "cpu" or self.dtype != torch.float32:
            storage = self._active.storage
            if self._active in self.halves:  # no copy has been allocated yet
                storage = torch.empty_like(storage, device=self.device, dtype=self.dtype)
            active = DecoderWeights(self.shape, storage.copy_(active.storage))
        self._active = active
        self.products = BlockedWeights() if self.exact else BlockedWeights(active)

    @torch.inference_mode()
    def prefill(self, cache: KVCache, spans: Sequence[PromptSpan]) -> Tensor:
        """Compute the tokens of the spans, and write their keys and values into the cache.

        Spans take effect in order: one may start from positions that an earlier one writes.

        Returns:
            Logits after the last token of each span [spans, V].
        """
        return self._logits(self._compute_spans(cache, spans, last_only=True))

    @torch.inference_mode()
    def score(
        self,
        cache: KVCache,
        spans: Sequence[PromptSpan],
        prompt_sizes: Sequence[int],
        temperatures: Sequence[float],
    ) -> list[Tensor]:
        """Compute the log-probabilities of replies.

        Args:
            cache: memory of keys and values, which is overwritten.
            spans: prompts with their replies, each from position 0 on.
            prompt_sizes: number of tokens of each prompt, at least 1.
            temperatures: temperature of each reply.

        Returns:
            Log-probabilities [C] of each reply's tokens, in nats and on the CPU.
        """
        x = self._compute_spans(cache, spans, last_only=False)
        logprobs = []
        start = 0
        for span, prompt_size, temperature in zip(spans, prompt_sizes, temperatures, strict=True):
            end = start + len(span.token_ids)
            hidden = x[start + prompt_size - 1 : end - 1]
            labels = self._to_device(span.token_ids[prompt_size:])
            # The logits are computed for a block of tokens at a time, because those of a whole reply
            # may be larger than the model.
            parts = [
                token_logprobs(self._logits(rows), row_labels, temperature)
                for rows, row_labels in zip(
                    hidden.split(QUERY_BLOCK), labels.split(QUERY_BLOCK), strict=True
                )
            ]
            logprobs.append(torch.cat(parts).cpu())
            start = end
        return logprobs

    def _compute_spans(
        self, cache: KVCache, spans: Sequence[PromptSpan], *, last_only: bool
    ) -> Tensor:
        """Compute the spans, and write their keys and values into the cache.

        Returns:
            Output of the last layer, for all tokens [sum of T, hidden], or with `last_only` for the
            last token of each span [spans, hidden].
        """
        sizes = [len(span.token_ids) for span in spans]
        ends = np.cumsum(sizes)
        last = self._to_device(ends - 1)
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        rotation = self._rotation[self._to_device(positions)][:, None]
        token_ids = np.concatenate([span.token_ids for span in spans])
        x = F.embedding(self._to_device(token_ids), self._active.embed).float()

        adapter_numbers = np.array([span.adapter for span in spans])
        low_rank = self._low_rank(np.repeat(adapter_numbers, sizes))
        experts: list[Tensor] = []
        # In the last layer, the last tokens alone can be computed, unless the experts of all tokens
        # are recorded.
        can_reduce = last_only and cache.routing is None
        reduced_layer = self.shape.layers - 1 if can_reduce else -1
        for index, layer in enumerate(self._active.layers):
            q, k, v = self._project(layer, x, rotation, low_rank[index])
            reduced = index == reduced_layer
            if reduced:
                x = x[last]
                low_rank = self._low_rank(adapter_numbers)
            attended = x.new_empty(len(x), q[0].numel())
            for number, (span, size, end) in enumerate(
                zip(spans, sizes, ends.tolist(), strict=True)
            ):
                tokens = slice(end - size, end)
                if span.source != span.row:
                    cache.copy_layer(index, span.source, span.row, span.start)
                keys = cache.keys[index, span.row]
                values = cache.values[index, span.row]
                keys[:, :, span.start : span.end] = k[tokens].permute(1, 2, 0)
                values[:, span.start : span.end] = v[tokens].transpose(0, 1)
                if reduced:
                    attended[number] = self._attend(q[end - 1 : end], keys, values, span.end - 1)
                else:
                    attended[tokens] = self._attend(q[tokens], keys, values, span.start)
            x = self._finish_layer(layer, x, attended, low_rank[index], experts)

        if cache.routing is not None:
            record_routing(cache.routing, spans, stack_experts(experts))
        return x[last] if last_only and not can_reduce else x

    @torch.inference_mode()
    def decode(
        self,
        cache: KVCache,
        batch: DecodeBatch,
        blocks: Sequence[RowBlock | GroupBlock],
        token_ids: np.ndarray,
    ) -> Tensor:
        """Compute one token in each row of the batch, and write its key and value into the cache.

        Args:
            blocks: attention blocks of the batch.
            token_ids: newest token of each row, int64 [N].

        Returns:
            Logits [N, V].
        """
        low_rank = self._low_rank(batch.adapters)
        experts: list[Tensor] = []
        rows = self._to_device(batch.rows)
        positions = self._to_device(batch.positions)
        rotation = self._rotation[positions][:, None]
        x = F.embedding(self._to_device(token_ids), self._active.embed).float()
        for index, layer in enumerate(self._active.layers):
            q, k, v = self._project(layer, x, rotation, low_rank[index])
            keys = cache.keys[index]
            values = cache.values[index]
            keys[rows, :, :, positions] = k
            values[rows, :, positions] = v
            parts = [
                block.attend(q[block.part], keys, values, index, exact=self.exact)
                for block in blocks
            ]
            attended = parts[0] if len(parts) == 1 else torch.cat(parts)
            x = self._finish_layer(layer, x, attended, low_rank[index], experts)
        if cache.routing is not None:
            cache.routing[batch.rows, batch.positions] = stack_experts(experts)
        return self._logits(x)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _low_rank(self, adapter_numbers: np.ndarray) -> Sequence[AddLowRank]:
        """Return a function for each layer, which adds the output of each row's adapter.

        See `LowRank.for_rows`. The functions add nothing if the decoder has no adapters.
        """
        if self.adapters is None:
            return [_add_nothing] * self.shape.layers
        return self.adapters.for_rows(self._to_device(adapter_numbers))

    def _project(
        self, layer: LayerWeights, x: Tensor, rotation: Tensor, add_low_rank: AddLowRank
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize and project `x` [N, hidden] to queries [N, H, D], keys and values [N, KV, D].

        Queries and keys are normalized too, if the model has norms for them, and then rotated and
        scaled by `rotation` [N, 1, D / 2], complex.
        """
        shape = self.shape
        x = self._norm(x, layer.input_norm)
        qkv = self._multiply(x, layer.qkv, layer.qkv_bias)
        add_low_rank("qkv", x, qkv)
        qkv = qkv.view(len(x), -1, shape.head_dim)
        qk_heads = shape.heads + shape.kv_heads
        qk = qkv[:, :qk_heads]
        v = qkv[:, qk_heads:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._norm(qk[:, : shape.heads], layer.q_norm)
            k = self._norm(qk[:, shape.heads :], layer.k_norm)
            qk = torch.cat([q, k], 1)
        torch.view_as_complex(qk.unflatten(-1, (-1, 2))).mul_(rotation)
        return qk[:, : shape.heads], qk[:, shape.heads :], v

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """Return the causal attention [T, H D] of queries [T, H, D] over a row.

        Args:
            keys: keys of the row [KV, D, M].
            values: values of the row [KV, M, D].
            start: position of the first query.
        """
        kv_heads = self.shape.kv_heads
        heads_per_kv = self.shape.heads // kv_heads
        attended = q.new_empty(len(q), q[0].numel())
        for first in range(0, len(q), QUERY_BLOCK):
            block = q[first : first + QUERY_BLOCK]
            size = len(block)
            visible = start + first + size
            folded = (
                block.unflatten(1, (kv_heads, heads_per_kv))
                .permute(1, 2, 0, 3)
                .reshape(kv_heads, heads_per_kv * size, -1)
            )
            block_attended = self._attend_block(folded, keys, values, size, visible)
            attended[first : first + size] = (
                block_attended.reshape(kv_heads * heads_per_kv, size, -1).transpose(0, 1).flatten(1)
            )
        return attended

    def _attend_block(
        self, q: Tensor, keys: Tensor, values: Tensor, size: int, visible: int
    ) -> Tensor:
        """Return the attention [KV, H / KV · size, D] of the queries of `size` tokens.

        Args:
            q: [KV, H / KV · size, D].
            keys: keys of the row [KV, D, M].
            values: values of the row [KV, M, D].
            size: number of tokens.
            visible: number of leading keys that the last of these tokens attends to. The mask is
                causal in the last `size` of these keys, and all tokens attend to those before.
        """
        scores = torch.bmm(q, keys[:, :, :visible])
        if size > 1:
            mask = q.new_full((size, size), float("-inf")).triu_(1)
            scores.view(-1, size, visible)[:, :, visible - size :].add_(mask)
        return torch.bmm(scores.softmax(-1), values[:, :visible])

    def _finish_layer(
        self,
        layer: LayerWeights,
        x: Tensor,
        attended: Tensor,
        add_low_rank: AddLowRank,
        experts: list[Tensor],
    ) -> Tensor:
        """Return the layer's output [N, hidden]: output projection and MLP, each with its residual.

        A sparse layer appends the experts [N, k] of its tokens to `experts`.

        Args:
            layer: weights of the layer.
            x: [N, hidden] input of the layer; it may be overwritten.
            attended: [N, H D] output of the attention.
            add_low_rank: adds the adapters of the rows.
            experts: experts of the sparse layers before this one.
        """
        x = self._multiply_add(x, attended, layer.out)
        add_low_rank("out", attended, x)
        normed = self._norm(x, layer.post_norm)
        if layer.router is not None:
            assert self.shape.experts is not None
            experts.append(add_experts(self._multiply, self.shape.experts, layer, x, normed))
            return x
        gate_up = self._multiply(normed, layer.gate_up)
        add_low_rank("gate_up", normed, gate_up)
        wide = silu_and_mul(gate_up)
        x.add_(self._multiply(wide, layer.down))
        add_low_rank("down", wide, x)
        return x

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply RMSNorm, for few rows in half the time of `F.rms_norm`."""
        rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5)
        # `hypot_` adds eps below the root, because `_norm_floor` is the root of eps.
        return x.div(rms.hypot_(self._norm_floor)).mul_(weight)

    def _logits(self, x: Tensor) -> Tensor:
        return self._multiply(self._norm(x, self._active.norm), self._active.head)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.products.multiply(x, weight, bias)

    def _multiply_add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self.products.multiply_add(residual, x, weight)


def _add_nothing(*_: object) -> None:
    """Add nothing; this is the `AddLowRank` of a decoder without adapters."""


def stack_experts(experts: Sequence[Tensor]) -> np.ndarray:
    """Stack the experts [N, k] of each sparse layer to [N, sparse layers, k]."""
    stacked: np.ndarray = torch.stack(list(experts), 1).cpu().numpy()
    return stacked


def record_routing(routing: np.ndarray, spans: Sequence[PromptSpan], experts: np.ndarray) -> None:
    """Write the experts of the spans' tokens [sum of T, sparse layers, k] into the cache's `routing`.

    For a span that starts from the keys of another row, the experts of that prefix are copied too.
    """
    end = 0
    for span in spans:
        if span.source != span.row:
            routing[span.row, : span.start] = routing[span.source, : span.start]
        first = end
        end += len(span.token_ids)
        routing[span.row, span.start : span.end] = experts[first:end]


def _usable_device(device: str) -> torch.device:
    """Return a torch device by its name; raise EngineError if torch cannot compute on it."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        # torch asserts that it was built for the device.
        raise EngineError(
            f"torch cannot compute on device '{device}' here ({str(error).splitlines()[0]})"
        ) from error
