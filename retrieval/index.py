"""Inner-product index (FAISS) over a corpus, in a folder with a manifest of its files."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from retrieval.bm25 import BM25_FOLDER, BM25Index, bm25_sha256
from retrieval.corpus import Corpus, RetrievalError
from retrieval.digests import cached_sha256
from retrieval.encoder import Encoder, EncoderIdentity
from retrieval.gpu import MAX_GPU_K, GpuFlatIndex
from retrieval.manifest import Manifest, check_equal, read_manifest
from retrieval.wire import MAX_TOPK

# Number of decimals to which scores are rounded. Rounding removes the float32 noise of passage
# vectors, so that equal passages get equal scores and are ordered by row.
SCORE_DECIMALS = 5
# Candidates beyond k that are scored again in float64, after a search in float32 or in fp16.
SPARE_CANDIDATES = 8
SPARE_CANDIDATES_FP16 = 64
IVF_CELLS = 32  # cells that a query searches (nprobe)
HNSW_BREADTH = 128  # candidates of a search in the graph (efSearch)


def read_vectors(path: Path) -> faiss.Index:
    """Open a FAISS file with its vectors mapped into memory, so that several processes share them.

    Raises:
        RetrievalError: the file is missing, damaged, or no FAISS index.
    """
    if not path.is_file():
        raise RetrievalError(f"{path} does not exist; build the index again")
    limit = faiss.get_deserialization_vector_byte_limit()
    try:
        # No vector in the file is larger than the file, whatever a damaged header says.
        faiss.set_deserialization_vector_byte_limit(path.stat().st_size)
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rpartition("Error: ")[2]
        raise RetrievalError(
            f"{path}: not a FAISS index, or damaged ({reason}); fetch or build it again"
        ) from None
    finally:
        faiss.set_deserialization_vector_byte_limit(limit)
    if isinstance(index, faiss.IndexIVF):
        index.make_direct_map()  # lets vectors be read by row
        index.nprobe = min(IVF_CELLS, index.nlist)
    if isinstance(index, faiss.IndexHNSW):
        index.hnsw.efSearch = HNSW_BREADTH
    return index


@dataclass(slots=True, eq=False)
class Index:
    """An opened index folder.

    Attributes:
        vectors: vectors by row; None if the index has only words.
        gpu: copy of the vectors on GPUs, which finds the candidates; None without GPUs.
        bm25: index of the words, or None.
    """

    manifest: Manifest
    vectors: faiss.Index | None
    corpus: Corpus
    gpu: GpuFlatIndex | None = None
    bm25: BM25Index | None = None

    @classmethod
    def open(
        cls,
        index_dir: Path | str,
        *,
        encoder: EncoderIdentity | None = None,
        verify: bool = False,
        device: str = "cpu",
    ) -> Index:
        """Open an index folder, and check it against its manifest.

        Args:
            encoder: identity of the encoder of the queries, which must be that of the passages.
            verify: read all files again; by default digests of unchanged files come from a cache.
            device: "cpu", or "cuda" for a flat index on GPUs. Other kinds of index are searched on
                the CPU.

        Raises:
            RetrievalError: something differs from the manifest.
        """
        index_dir = Path(index_dir)
        manifest = read_manifest(index_dir)
        if encoder is not None and manifest.encoder is not None:
            for field in fields(EncoderIdentity):
                value = getattr(encoder, field.name)
                expected = getattr(manifest.encoder, field.name)
                check_equal(f"encoder given for {index_dir}", field.name, value, expected)

        corpus = Corpus((index_dir / manifest.corpus).resolve())
        corpus_sha256 = cached_sha256(corpus.path, reread=verify)
        check_equal(corpus.path, "number of lines", len(corpus), manifest.ntotal)
        check_equal(corpus.path, "sha256", corpus_sha256, manifest.corpus_sha256)
        index = cls(manifest, None, corpus)

        if manifest.encoder is not None:
            path = index_dir / manifest.vectors
            if path.is_file():
                vectors_sha256 = cached_sha256(path, reread=verify)
                check_equal(path, "sha256", vectors_sha256, manifest.index_sha256)
            index.vectors = read_vectors(path)
            check_equal(path, "metric", index.vectors.metric_type, faiss.METRIC_INNER_PRODUCT)
            check_equal(path, "dim", index.vectors.d, manifest.dim)
            check_equal(path, "ntotal", index.vectors.ntotal, manifest.ntotal)
            if device == "cuda" and isinstance(index.vectors, faiss.IndexFlat):
                index.gpu = GpuFlatIndex(index.vectors)

        if manifest.lexical_sha256:
            words_sha256 = bm25_sha256(index_dir, reread=verify)
            check_equal(index_dir / BM25_FOLDER, "sha256", words_sha256, manifest.lexical_sha256)
            index.bm25 = BM25Index(index_dir)
        return index

    @property
    def _vectors(self) -> faiss.Index:
        if self.vectors is None:
            raise RetrievalError(
                "the index has words and no vectors; set --ranking bm25, or build it with vectors"
            )
        return self.vectors

    @property
    def _is_exact(self) -> bool:
        """True if FAISS compares a query with all vectors."""
        return not isinstance(self.vectors, faiss.IndexIVF | faiss.IndexHNSW)

    def search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the `K = min(k, ntotal)` best rows for each query; return them best first with their scores.

        Scores are inner products in float64, rounded to SCORE_DECIMALS; ties are broken by row number. The
        answer to a query does not depend on the other queries, and up to MAX_TOPK a smaller k gives
        a prefix of a larger one's answer.

        Args:
            vectors: queries, `[Q, dim]`.

        Returns:
            Rows, int64 `[Q, K]`, and scores, float64 `[Q, K]`.

        Raises:
            RetrievalError: the vectors have another shape or are not finite, or k is below 1.
        """
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != self.manifest.dim:
            raise RetrievalError(
                f"query vectors have shape {vectors.shape}, expected [Q, {self.manifest.dim}]"
            )
        if not np.isfinite(vectors).all():
            raise RetrievalError("a query vector is not finite")
        if k < 1:
            raise RetrievalError(f"k is {k}, expected at least 1")

        k = min(k, self.manifest.ntotal)
        rows = np.empty((len(vectors), k), dtype=np.int64)
        scores = np.empty((len(vectors), k), dtype=np.float64)
        if len(vectors) == 0:
            return rows, scores
        # An approximate search finds other candidates if it searches for more of them. So every k
        # up to MAX_TOPK searches for MAX_TOPK candidates.
        depth = k if self._is_exact else min(max(k, MAX_TOPK), self.manifest.ntotal)
        spare = SPARE_CANDIDATES if self.gpu is None else SPARE_CANDIDATES_FP16
        all_rough_scores, all_rough_rows = self._rough_search(vectors, depth + spare)
        for query, vector in enumerate(vectors):
            if self._is_exact:
                candidates = self._widen_over_ties(
                    vector, k, all_rough_rows[query], all_rough_scores[query]
                )
            else:
                candidates = self._fill_up(vector, depth, all_rough_rows[query])
            rows[query], scores[query] = self._rank(vector, k, candidates)
        return rows, scores

    def _rough_search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return FAISS's scores and rows of the k best, `[Q, k]`; a row of -1 stands for none."""
        k = min(k, self.manifest.ntotal)
        if self.gpu is not None and k <= MAX_GPU_K:
            return self.gpu.search(vectors, k)
        scores, rows = self._vectors.search(vectors, k)
        return np.asarray(scores), np.asarray(rows)

    def _widen_over_ties(
        self, vector: np.ndarray, k: int, rough_rows: np.ndarray, rough_scores: np.ndarray
    ) -> np.ndarray:
        """Search for more candidates until none outside can have the score of the k-th one."""
        # Rounding moves both scores by up to half a unit of the last decimal. The rest of the margin is
        # for FAISS's float32, whose error grows with the scores.
        margin = 2 * 10.0**-SCORE_DECIMALS * max(1.0, float(np.abs(rough_scores[0])))
        if self.gpu is not None:
            # The rough score of a row outside may be too low by `error`, and that of the k-th row too
            # high by `error`.
            margin += 2 * self.gpu.error * float(np.linalg.norm(vector))
        while len(rough_rows) < self.manifest.ntotal:
            if rough_scores[k - 1] - rough_scores[-1] > margin:
                break
            (rough_scores,), (rough_rows,) = self._rough_search(vector[None], 4 * len(rough_rows))
        return rough_rows

    def _fill_up(self, vector: np.ndarray, depth: int, rough_rows: np.ndarray) -> np.ndarray:
        """Return the candidates of the approximate search; search all vectors if it found too few."""
        candidates = rough_rows[rough_rows >= 0]
        if len(candidates) >= depth:
            return candidates
        index: Any = self._vectors
        parameters: Any = None
        if isinstance(index, faiss.IndexIVF):
            library: Any = faiss  # its type stubs lack SearchParametersIVF
            parameters = library.SearchParametersIVF(nprobe=index.nlist)
        else:
            index = index.storage  # all vectors, including those that the graph does not reach
        count = min(depth + SPARE_CANDIDATES, self.manifest.ntotal)
        _, (rows,) = index.search(vector[None], count, params=parameters)
        return np.asarray(rows[rows >= 0])

    def _rank(
        self, vector: np.ndarray, k: int, candidates: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the k best of the candidates and their scores in float64."""
        rows = np.sort(candidates)
        stored = self._vectors.reconstruct_batch(rows).astype(np.float64)
        scores = np.round(stored @ vector.astype(np.float64), SCORE_DECIMALS)
        scores += 0.0  # turns -0.0 into 0.0
        best = np.argsort(-scores, kind="stable")[:k]
        return rows[best], scores[best]


def check_canary(index: Index, encoder: Encoder) -> None:
    """Encode the first, the middle and the last passage again, and check that the index finds them.

    Raises:
        RetrievalError: the stored vector of a passage differs, or the search does not find it.
    """
    assert index.vectors is not None, "an index without vectors has no encoder to check"
    total = len(index.corpus)
    for row in sorted({0, total // 2, total - 1}):
        vector = encoder.encode_passages([index.corpus[row].contents])
        stored_score = float(index.vectors.reconstruct(row) @ vector[0])
        expected_score = float(vector[0] @ vector[0])
        best_score = float(index.search(vector, 1)[1][0, 0])
        margin = index.manifest.tolerance * expected_score
        if abs(stored_score - expected_score) > margin or best_score < stored_score - margin:
            raise RetrievalError(
                f"canary: row {row} of the index scores {stored_score:.4f} against its own "
                f"passage, expected {expected_score:.4f}; the index was built with another encoder "
                f"than {encoder.identity.name}, or with other prefixes; build it again"
            )
