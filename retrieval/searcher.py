"""Search of an index by vectors, by words (BM25), or by both rankings fused."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from retrieval.corpus import Passage, RetrievalError
from retrieval.encoder import Encoder
from retrieval.index import Index
from retrieval.wire import MAX_TOPK, Ranking

RRF_K = 60  # constant of reciprocal rank fusion, as its authors chose it
# Rows of each ranking that are fused. They do not depend on k, so the answer for a smaller k is
# a prefix of the answer for a larger one.
FUSED_ROWS = MAX_TOPK


@dataclass(frozen=True, slots=True)
class Searcher:
    """An index with the encoder of its queries, in two stages: `encode`, then `search`."""

    index: Index
    encoder: Encoder | None  # None: only ranking "bm25" is possible
    ranking: Ranking = "dense"

    def encode(self, queries: Sequence[str]) -> np.ndarray:
        """Return the vectors of queries, float32 `[Q, dim]`; `[Q, 0]` if only words rank."""
        if self.encoder is None or self.ranking == "bm25":
            return np.empty((len(queries), 0))
        return self.encoder.encode_queries(queries)

    def search(self, queries: Sequence[str], vectors: np.ndarray, k: int) -> list[list[Passage]]:
        """Return the k best passages of each query with their scores, best first.

        Raises:
            RetrievalError: the index lacks the vectors or the words that the ranking needs.
        """
        results = []
        for rows, scores in self._rank(queries, vectors, k):
            best = zip(rows[:k].tolist(), scores[:k].tolist(), strict=True)
            results.append([replace(self.index.corpus[row], score=score) for row, score in best])
        return results

    def __call__(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Encode queries and search for them."""
        return self.search(queries, self.encode(queries), k)

    def _rank(
        self, queries: Sequence[str], vectors: np.ndarray, k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the rows and scores of each query."""
        if self.ranking == "dense":
            rows, scores = self.index.search(vectors, k)
            return list(zip(rows, scores, strict=True))

        if self.index.bm25 is None:
            raise RetrievalError(
                f"the index has no words to rank by; build it with retriever.ranking={self.ranking}"
            )
        by_words = [self.index.bm25.search(query, FUSED_ROWS) for query in queries]
        if self.ranking == "bm25":
            return by_words

        dense_rows, _ = self.index.search(vectors, FUSED_ROWS)
        return [
            fuse_rankings(dense, words)
            for dense, (words, _) in zip(dense_rows, by_words, strict=True)
        ]


def fuse_rankings(*rankings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fuse rankings of rows by reciprocal rank (Cormack, Clarke and Buettcher, SIGIR 2009).

    With ranks from 1, a row scores the sum over the rankings of 1 / (60 + rank). Equal scores go by
    row.

    Returns:
        Rows of all rankings, int64, best first, and their scores.
    """
    score_of_row: dict[int, float] = {}
    for ranking in rankings:
        for rank, row in enumerate(ranking.tolist(), start=1):
            score_of_row[row] = score_of_row.get(row, 0.0) + 1 / (RRF_K + rank)
    rows = sorted(score_of_row, key=lambda row: (-score_of_row[row], row))
    return np.array(rows, dtype=np.int64), np.array([score_of_row[row] for row in rows])
