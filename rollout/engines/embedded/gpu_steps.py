"""Decoding steps on a GPU: one copy to the GPU, one CUDA graph, and one copy back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.base.terminal import say
from rollout.engines.embedded.cache import DecodeBatch, KVCache
from rollout.engines.embedded.gpu_decoder import GpuDecoder
from rollout.engines.embedded.gpu_inputs import decoding_inputs, pack_arrays, unpack_arrays
from rollout.engines.embedded.sampling import sample_on_device

# Function that computes a step, and returns its logits and the `_sampled` of `DecodedStep`
DecodingStep = Callable[[], tuple[Tensor, Tensor]]
# Function that captures a step, and returns its outputs and the function that computes them again
Capture = Callable[[DecodingStep], tuple[tuple[Tensor, Tensor], Callable[[], object]]]


@dataclass(frozen=True, slots=True)
class DecodedStep:
    """Results of a step of N rows; the next step overwrites them.

    Attributes:
        logits: [N, V], on the device.
    """

    logits: Tensor
    _sampled: Tensor  # tokens and bits of log-probabilities, int32 [2, N or more]

    def sampled(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the GPU, and return token ids [N] and their log-probabilities [N]."""
        tokens, logprobs = self._sampled.cpu().numpy()[:, : len(self.logits)]
        return tokens.astype(np.int64), logprobs.copy().view(np.float32)


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """Graph of a step, with the memory that it reads and writes."""

    inputs: Tensor
    outputs: tuple[Tensor, Tensor]
    replay: Callable[[], object]


class GpuSteps:
    """Decoding steps with a decoder's active weights and a cache.

    A graph is captured when its number of rows is first needed. Numbers of rows are padded to a power
    of two, or to all rows of the cache, by rows that repeat the first one. Graphs hold the addresses
    of weights, adapters and cache. Updates of weights keep these addresses; sleeping does not, so
    another object must be made after it.
    """

    def __init__(
        self, decoder: GpuDecoder, cache: KVCache, *, capture: Capture | None = None
    ) -> None:
        """Keep the decoder and the cache.

        Args:
            capture: function that captures a step, such as `CudaGraphs.capture`; None: every kernel
                is launched on its own.
        """
        self._decoder = decoder
        self._cache = cache
        self._capture = capture
        self._steps: dict[int, _CapturedStep] = {}

    @torch.inference_mode()
    def run(
        self,
        batch: DecodeBatch,
        token_ids: np.ndarray,
        temperature: np.ndarray,
        uniform: np.ndarray,
    ) -> DecodedStep:
        """Decode one token in each of N rows, and sample the next ones; do not wait for the GPU.

        Args:
            batch: the rows.
            token_ids: newest token of each row, int64 [N].
            temperature: float32 [N].
            uniform: float32 [N], see `sample_tokens`.
        """
        count = len(token_ids)
        size = count if self._capture is None else self._graph_rows(count)
        # Row of the batch for each row of the padded batch; the padding repeats row 0.
        index = np.zeros(size, dtype=np.int64)
        index[:count] = np.arange(count)
        padded = DecodeBatch(
            rows=batch.rows[index],
            positions=batch.positions[index],
            groups=batch.groups[index],
            shared=batch.shared[index],
            adapters=batch.adapters[index],
        )
        inputs = decoding_inputs(padded, token_ids[index])
        inputs += [temperature[index], uniform[index]]
        logits, sampled = self._compute(size, inputs)
        return DecodedStep(logits[:count], sampled)

    def _graph_rows(self, count: int) -> int:
        """Return the number of rows of the graph for `count` rows: a power of two, or all of the cache."""
        cache_rows: int = self._cache.keys.shape[1]
        return min(1 << (count - 1).bit_length(), cache_rows)

    def _compute(self, size: int, arrays: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Copy the inputs of `size` rows to the device, and compute a step; see `DecodingStep`.

        The step is replayed from the graph of `size` rows, unless steps are not captured.
        """
        packed = pack_arrays(arrays)
        if self._capture is None:
            device_inputs = packed.to(self._decoder.device, non_blocking=True)
            return self._step(device_inputs, arrays)
        if size not in self._steps:
            captured = self._capture_step(packed, arrays)
            if captured is None:
                self._capture = None
                return self._compute(size, arrays)
            self._steps[size] = captured
        step = self._steps[size]
        step.inputs.copy_(packed, non_blocking=True)
        step.replay()
        return step.outputs

    def _capture_step(self, packed: Tensor, arrays: Sequence[np.ndarray]) -> _CapturedStep | None:
        """Capture a step with inputs in the shapes of `arrays`; return None if that fails.

        The capturing function also computes the step once, with the inputs in `packed`. That is
        harmless: the replay writes the same keys and values again.
        """
        assert self._capture is not None
        inputs = packed.to(self._decoder.device)
        try:
            outputs, replay = self._capture(lambda: self._step(inputs, arrays))
        except RuntimeError as error:
            say(
                "the decoding step could not be captured as a CUDA graph "
                f"({str(error).splitlines()[0]}); the engine goes on without graphs, more slowly"
            )
            return None
        return _CapturedStep(inputs, outputs, replay)

    def _step(self, packed: Tensor, arrays: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Compute a step on the device; see `DecodingStep`.

        Args:
            packed: inputs on the device.
            arrays: arrays of which `packed` was made, for their shapes.
        """
        *inputs, temperature, uniform = unpack_arrays(packed, arrays)
        logits = self._decoder.decode_inputs(self._cache, *inputs)
        tokens, logprobs = sample_on_device(logits, temperature, uniform)
        return logits, torch.stack([tokens.int(), logprobs.view(torch.int32)])


class CudaGraphs:
    """CUDA graphs of a device that share their memory, because one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, step: DecodingStep) -> tuple[tuple[Tensor, Tensor], Callable[[], object]]:
        """Capture a step; return its outputs and the function that computes them again.

        The step is first computed on another stream, so that Triton compiles its kernels and cuBLAS
        allocates its memory before the capture.
        """
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other engines of this process may use the GPU from their threads meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = step()
        return outputs, graph.replay
