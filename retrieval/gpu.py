"""Search of a flat index on GPUs, by FAISS: fp16 vectors, sharded by row over all GPUs."""

from typing import Any

import faiss
import numpy as np

from retrieval.corpus import RetrievalError

MAX_GPU_K = 2048  # largest k of FAISS on a GPU
NORM_BLOCK_ROWS = 1 << 20


class GpuFlatIndex:
    """A copy of a flat inner-product index on all GPUs of the machine.

    Its scores are rough, because they are computed in fp16. Only one thread may use it.

    Attributes:
        error: bound on the error of a score for a query vector of norm 1; it is proportional to the norm.
    """

    def __init__(self, index: faiss.IndexFlat) -> None:
        """Copy the vectors of `index`; raise RetrievalError if FAISS has no GPU."""
        library: Any = faiss
        if not hasattr(library, "GpuMultipleClonerOptions"):
            raise RetrievalError(
                "FAISS is installed for CPUs only; run `pip install --force-reinstall --no-deps faiss-gpu` "
                "after `pip install 'mcore-mas[faiss-gpu]'`, or use device cpu"
            )
        if not library.get_num_gpus():
            raise RetrievalError("FAISS finds no GPU on this machine; use device cpu")
        options = library.GpuMultipleClonerOptions()
        options.shard = True
        options.useFloat16 = True
        # An empty index is cloned, because FAISS would first copy a filled one in float32 to a
        # single GPU.
        self._index = library.index_cpu_to_all_gpus(faiss.IndexFlatIP(index.d), co=options)
        vectors = _mapped_vectors(index)
        self._index.add(vectors)

        max_norm = 0.0
        for start in range(0, len(vectors), NORM_BLOCK_ROWS):
            norms = np.linalg.norm(vectors[start : start + NORM_BLOCK_ROWS], axis=1)
            max_norm = max(max_norm, float(norms.max()))
        # With the unit roundoff u = 2^-11, rounding both factors gives |error| <= 2u |q| |x|, and
        # rounding the sum at most u |q| |x|.
        self.error = 3.1 * 2.0**-11 * max_norm

    def search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rough scores and rows of about the k best passages, `[Q, k]` each, best first."""
        scores, rows = self._index.search(vectors, k)
        return scores, rows


def _mapped_vectors(index: Any) -> np.ndarray:
    """Return the vectors of a flat index, float32 `[N, dim]`, without copying the mapped file."""
    flat = faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d)
    return np.asarray(flat.reshape(index.ntotal, index.d))
