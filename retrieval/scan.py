"""Scans: rough scores of all vectors of an exact index in half precision, on a device; the best are scored again."""

from __future__ import annotations

from typing import Any, Protocol

import faiss
import numpy as np
import torch

from mcore_mas.retrieval.corpus import RetrievalError

BLOCK = 1 << 20  # rows scored at a time
GPU_MOST = 2048  # neighbours that FAISS finds on a GPU


class Scan(Protocol):
    """Finds candidates.

    Attributes:
        error: a rough score is off by at most this, times the query's norm.
        most: neighbours that it finds, at most.
    """

    error: float
    most: int

    def search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rough scores and rows `[Q, k]`, best first, of queries `[Q, dim]` float32."""


class TorchScan:
    """bf16 products on any device of torch; half the memory of the vectors, on that device."""

    def __init__(self, vectors: np.ndarray, device: str) -> None:
        """Copy `vectors` `[N, dim]` float32."""
        self.most = len(vectors)
        self._rows = torch.empty(vectors.shape, dtype=torch.bfloat16, device=device)
        norm = 0.0
        for first in range(0, len(vectors), BLOCK):
            block = torch.from_numpy(vectors[first : first + BLOCK].copy())
            norm = max(norm, float(block.norm(dim=1).max()))
            self._rows[first : first + BLOCK] = block.to(device)
        # u = 2^-9: both factors are rounded, |error| <= 2u |q| |x|, and so is the sum, <= u |q| |x|
        self.error = 3.1 * 2.0**-9 * norm

    @torch.inference_mode()
    def search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        queries = torch.from_numpy(vectors).to(self._rows)
        scores = torch.empty((len(vectors), 0), device=queries.device)
        ids = torch.empty((len(vectors), 0), dtype=torch.long, device=queries.device)
        for first in range(0, self.most, BLOCK):
            found = queries @ self._rows[first : first + BLOCK].T  # [Q, rows of the block]
            best = found.topk(min(k, found.shape[1]), dim=1)
            both = torch.cat([scores, best.values.float()], 1)
            scores, kept = both.topk(min(k, both.shape[1]), dim=1)
            ids = torch.cat([ids, best.indices + first], 1).gather(1, kept)
        return scores.cpu().numpy(), ids.cpu().numpy()


class FaissGpuScan:
    """FAISS over all GPUs of the machine: fp16, rows in shards. One thread only may ask it."""

    def __init__(self, index: faiss.Index) -> None:
        """Copy a flat index.

        Raises:
            RetrievalError: this FAISS is one for CPUs, or there is no GPU.
        """
        library: Any = faiss
        if not hasattr(library, "GpuMultipleClonerOptions") or not library.get_num_gpus():
            raise RetrievalError("FAISS finds no GPU here; take retrieval/environment.yml, or --backend torch")
        options = library.GpuMultipleClonerOptions()
        options.shard, options.useFloat16 = True, True
        self._index = library.index_cpu_to_all_gpus(index, co=options)
        self.most = GPU_MOST
        norm = max(
            float(np.linalg.norm(index.reconstruct_n(first, min(BLOCK, index.ntotal - first)), axis=1).max())
            for first in range(0, index.ntotal, BLOCK)
        )
        self.error = 3.1 * 2.0**-11 * norm  # as above, u = 2^-11

    def search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores, ids = self._index.search(vectors, k)
        return scores, ids


def open_scan(index: faiss.Index, backend: str, device: str) -> Scan | None:
    """A scan of a flat index; None where FAISS itself searches on the CPU.

    Raises:
        RetrievalError: the index is not exact, or the device is not there.
    """
    if backend == "faiss" and device == "cpu":
        return None
    if not isinstance(index, faiss.IndexFlat):
        raise RetrievalError(
            f"{type(index).__name__}: only a flat index is scanned by {backend} on {device}; build one"
        )
    if backend == "faiss":
        return FaissGpuScan(index)
    if device == "cuda" and not torch.cuda.is_available():
        raise RetrievalError("torch finds no GPU here; take --device cpu")
    stored = faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d)  # the mapped file, not a copy
    return TorchScan(stored.reshape(index.ntotal, index.d), device)
