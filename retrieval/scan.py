"""Scans: rough scores of all vectors of an exact index in half precision, on a device; the best are scored again."""

from typing import Any

import faiss
import numpy as np
import torch

from retrieval.corpus import RetrievalError

BLOCK = 1 << 20  # rows scored at a time
GPU_MOST = 2048  # neighbours that FAISS finds on a GPU


class TorchScan:
    """bf16 products on any device of torch; half the memory of the vectors, on that device."""

    def __init__(self, vectors: np.ndarray, device: str) -> None:
        """Copy `vectors` `[N, dim]` float32."""
        # the bound below takes sums in float32, of which cuBLAS may else keep parts in bf16
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.most = len(vectors)
        self._rows = torch.empty(vectors.shape, dtype=torch.bfloat16, device=device)
        norm = 0.0
        for first in range(0, len(vectors), BLOCK):
            block = torch.from_numpy(vectors[first : first + BLOCK].copy())
            norm = max(norm, float(block.norm(dim=1).max()))
            self._rows[first : first + BLOCK] = block.bfloat16()
        # u = 2^-9: both factors are rounded, |error| <= 2u |q| |x|, and so is the sum, <= u |q| |x|
        self.error = 3.1 * 2.0**-9 * norm

    @torch.inference_mode()
    def search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rough scores and rows `[Q, k]`, best first, of queries `[Q, dim]` float32."""
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
        """Copy a flat index; RetrievalError if this FAISS is one for CPUs, or there is no GPU."""
        library: Any = faiss
        if not hasattr(library, "GpuMultipleClonerOptions") or not library.get_num_gpus():
            raise RetrievalError(
                "FAISS finds no GPU here; take retrieval/environment.yml, or --backend torch"
            )
        options = library.GpuMultipleClonerOptions()
        options.shard, options.useFloat16 = True, True
        # empty, then filled in pages: of a full one FAISS puts a float32 copy on a single GPU first
        self._index = library.index_cpu_to_all_gpus(faiss.IndexFlatIP(index.d), co=options)
        vectors = _stored(index)
        self._index.add(vectors)
        self.most = GPU_MOST
        blocks = (vectors[first : first + BLOCK] for first in range(0, len(vectors), BLOCK))
        norm = max(float(np.linalg.norm(block, axis=1).max()) for block in blocks)
        self.error = 3.1 * 2.0**-11 * norm  # as above, u = 2^-11

    def search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `TorchScan.search`."""
        scores, ids = self._index.search(vectors, k)
        return scores, ids


# finds candidates; a rough score is off by at most `error` times the query's norm, and it finds `most` at most
Scan = TorchScan | FaissGpuScan


def open_scan(index: faiss.Index, backend: str, device: str) -> Scan | None:
    """A scan of a flat index; None where FAISS itself searches on the CPU, as it does all other kinds.

    Raises:
        RetrievalError: the index is not exact, or the device is not there.
    """
    flat = isinstance(index, faiss.IndexFlat)
    if backend == "faiss" and (device == "cpu" or not flat):
        return None
    if not flat:
        raise RetrievalError(
            f"{type(index).__name__}: only a flat index is scanned by {backend}; build one"
        )
    if backend == "faiss":
        return FaissGpuScan(index)
    return TorchScan(_stored(index), device)


def _stored(index: Any) -> np.ndarray:
    """`[N, dim]` float32 of a flat index: the mapped file and not a copy."""
    return np.asarray(
        faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d).reshape(index.ntotal, index.d)
    )
