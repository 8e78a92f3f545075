"""Inner-product index (FAISS) over a corpus, exact or not, in a folder with a manifest of what it holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import faiss
import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from retrieval.corpus import Corpus, Passage, RetrievalError
from retrieval.encoder import Encoder, EncoderIdentity
from retrieval.lexical import DEPTH, FACETS, Facets, Lexical, fused, lexical_digest
from retrieval.lexical import FOLDER as LEXICAL
from retrieval.scan import Scan, open_scan
from retrieval.wire import MAX_TOPK, BadRequest, Ranking, Where
from rollout.base.files import known_sha256, read_json, unsealed

_FAISS: Any = faiss  # whose stubs lack parameters of a search
MANIFEST = "index.json"
VECTORS = "vectors.faiss"
INDEX_FORMAT = "inner-product/2"
SCORE_DECIMALS = (
    5  # coarser than float32 noise in passage vectors, so equal passages tie and go by id
)
SPARE, SPARE_HALF = (
    8,
    64,
)  # candidates beyond k that are scored again, of a full and of a rougher scan
PROBED = 32  # cells of IVF that a query looks into
SCORED = 1 << 16  # vectors that are taken at a time to be scored in float64
ROUGH = 1 << 12  # of those that a filter leaves, in float32
BREADTH = 128  # candidates that a search of HNSW keeps
# how far a stored vector may be from its passage's, as a share of that one's inner product with itself
EXACT = 1e-3
PUBLISHED = 2e-2  # made in half precision, or quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an index folder claims; every claim is checked when it is opened."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    format: str
    encoder: EncoderIdentity | None  # None: there are words and no vectors
    dim: int
    ntotal: int  # vectors, and rows of the corpus
    corpus: str  # path of the corpus, relative to the index folder
    corpus_sha256: str
    index_sha256: str
    vectors: str = VECTORS  # FAISS's file, beside the manifest
    tolerance: float = EXACT
    lexical_sha256: str = ""  # of the BM25 index beside it, where there is one
    facets_sha256: str = ""  # of the table that filters need, which older indexes lack


def read_vectors(path: Path) -> faiss.Index:
    """FAISS's file, its vectors mapped and shared with other processes, which can be read back by row.

    Raises:
        RetrievalError: it is not there, or no index of FAISS, or damaged.
    """
    if not path.is_file():
        raise RetrievalError(f"{path} does not exist; build the index again")
    try:
        # nothing in the file is larger than the file, whatever it says of itself
        faiss.set_deserialization_vector_byte_limit(path.stat().st_size)
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rpartition("Error: ")[2]
        raise RetrievalError(
            f"{path}: no index of FAISS, or damaged ({reason}); fetch or build it again"
        ) from None
    if isinstance(index, faiss.IndexIVF):
        index.make_direct_map()
        index.nprobe = min(PROBED, index.nlist)
    if isinstance(index, faiss.IndexHNSW):
        index.hnsw.efSearch = BREADTH
    return index


def read_manifest(index_dir: Path | str) -> Manifest:
    """The manifest of an index folder; raises RetrievalError if it is missing, damaged or of another format."""
    path = Path(index_dir) / MANIFEST
    try:
        manifest = TypeAdapter(Manifest).validate_json(json.dumps(unsealed(read_json(path))))
    except FileNotFoundError:
        raise RetrievalError(
            f"{path} does not exist: no index was finished there; build it"
        ) from None
    except (ValueError, RecursionError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        raise RetrievalError(f"{path} is damaged ({why}); build the index again") from None
    expect(path, "format", manifest.format, INDEX_FORMAT)
    expect(path, "dim", manifest.dim, manifest.encoder.dim if manifest.encoder else 0)
    return manifest


@dataclass(slots=True, eq=False)
class Index:
    """An opened index: unit vectors by row, and the corpus those rows come from."""

    manifest: Manifest
    _vectors: faiss.Index | None
    corpus: Corpus
    scan: Scan | None = None  # finds candidates in place of the vectors
    lexical: Lexical | None = None
    facets: Facets | None = None

    @classmethod
    def open(
        cls,
        index_dir: Path | str,
        *,
        encoder: EncoderIdentity | None = None,
        verify: bool = False,
        backend: str = "faiss",
        device: str = "cpu",
    ) -> Index:
        """Open a folder and see that it is what its manifest says.

        Args:
            encoder: the identity that will encode the queries.
            verify: read every file again; otherwise those that have not changed since their digest was made are
                trusted.
            backend: `faiss` or `torch`, which scans a flat index in half precision; the answers are the same.
            device: `cpu` or `cuda`.

        Raises:
            RetrievalError: of the first thing that is not as its manifest says.
        """
        index_dir = Path(index_dir)
        manifest = read_manifest(index_dir)
        if encoder is not None and manifest.encoder is not None:
            for field in fields(EncoderIdentity):
                built, given = getattr(manifest.encoder, field.name), getattr(encoder, field.name)
                expect(f"encoder given for {index_dir}", field.name, given, built)
        corpus = Corpus((index_dir / manifest.corpus).resolve())
        expect(corpus.path, "number of lines", len(corpus), manifest.ntotal)
        expect(
            corpus.path, "sha256", known_sha256(corpus.path, again=verify), manifest.corpus_sha256
        )
        index = cls(manifest, None, corpus)
        if manifest.encoder is not None:
            path = index_dir / manifest.vectors
            if path.is_file():
                expect(path, "sha256", known_sha256(path, again=verify), manifest.index_sha256)
            vectors = read_vectors(path)
            expect(path, "metric", vectors.metric_type, faiss.METRIC_INNER_PRODUCT)
            expect(path, "dim", vectors.d, manifest.dim)
            expect(path, "ntotal", vectors.ntotal, manifest.ntotal)
            index._vectors, index.scan = vectors, open_scan(vectors, backend, device)
        if manifest.lexical_sha256:
            expect(
                index_dir / LEXICAL,
                "sha256",
                lexical_digest(index_dir, again=verify),
                manifest.lexical_sha256,
            )
            index.lexical = Lexical(index_dir / LEXICAL)
        if manifest.facets_sha256:
            path = index_dir / FACETS
            expect(
                path,
                "sha256",
                known_sha256(path, again=verify) if path.is_file() else None,
                manifest.facets_sha256,
            )
            index.facets = Facets(path)
        return index

    def rows_with(self, where: Where) -> np.ndarray | None:
        """The rows that a filter leaves, None for all; BadRequest if too many, or the index is older than filters."""
        if where and self.facets is None:
            raise BadRequest("where: the index knows nothing to filter by; build it again")
        return self.facets.rows(where) if where and self.facets else None

    @property
    def _stored(self) -> faiss.Index:
        if self._vectors is None:
            raise RetrievalError(
                "the index has words and no vectors; say --ranking bm25, or build it with them"
            )
        return self._vectors

    def search(
        self, vectors: np.ndarray, k: int, among: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The `K = min(k, ntotal)` best rows for each vector: ids `[Q, K]` int64 and scores `[Q, K]` float64.

        With `among`, rows `[n]` in order, all of these are scored, and no others, each read once for all vectors.

        Scores are inner products in float64, rounded to SCORE_DECIMALS; equal scores go by id. A query's answer does
        not depend on the other queries, and up to MAX_TOPK a smaller k gives a prefix of a larger one's. Raises
        RetrievalError.
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
        k = min(k, self.manifest.ntotal if among is None else len(among))
        ids = np.empty((len(vectors), k), dtype=np.int64)
        scores = np.empty((len(vectors), k), dtype=np.float64)
        if among is not None and k:
            for row, likely in enumerate(self._likely(vectors, k, among)):
                ids[row], scores[row] = self._best(vectors[row], k, likely)
        elif len(vectors) and k:
            # an index that is not exact gives the same candidates whatever k is: its ties have no end to look for
            depth = k if self._exact else min(max(k, MAX_TOPK), self.manifest.ntotal)
            rough_scores, rough_ids = self._rough(
                vectors, depth + (SPARE if self.scan is None else SPARE_HALF)
            )
            for row, vector in enumerate(vectors):
                found = self._enough(vector, depth, rough_ids[row], rough_scores[row])
                ids[row], scores[row] = self._rank(vector, k, *found)
        return ids, scores

    @property
    def _exact(self) -> bool:
        return not isinstance(self._vectors, faiss.IndexIVF | faiss.IndexHNSW)

    def _rough(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores and rows of about the k best, from the scan where it can."""
        k = min(k, self.manifest.ntotal)
        if self.scan is not None and k <= self.scan.most:
            return self.scan.search(vectors, k)
        scores, ids = self._stored.search(vectors, k)
        return np.asarray(scores), np.asarray(ids)

    def _enough(
        self, vector: np.ndarray, depth: int, ids: np.ndarray, scores: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The candidates that were found (-1 is none), of the whole index if those are fewer than `depth`."""
        if (ids >= 0).sum() < depth:
            whole: Any = self._stored
            settings: Any = None
            if isinstance(whole, faiss.IndexIVF):
                settings = _FAISS.SearchParametersIVF(nprobe=whole.nlist)
            elif isinstance(
                whole, faiss.IndexHNSW
            ):  # no breadth leads to a passage that the graph does not reach
                whole = whole.storage
            (scores,), (ids,) = whole.search(
                vector[None], min(depth + SPARE, self.manifest.ntotal), params=settings
            )
        found = ids >= 0
        return ids[found], scores[found]

    def _rank(
        self, vector: np.ndarray, k: int, rough_ids: np.ndarray, rough_scores: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        # Whatever could still tie with the k-th must be among the candidates before ids can break ties.
        margin = 2 * 10.0**-SCORE_DECIMALS * max(1.0, float(np.abs(rough_scores[0])))
        if (
            self.scan is not None
        ):  # whose score of a row outside may be too low, and that of the k-th too high
            margin += 2 * self.scan.error * float(np.linalg.norm(vector))
        while (
            self._exact
            and len(rough_ids) < self.manifest.ntotal
            and rough_scores[k - 1] - rough_scores[-1] <= margin
        ):
            (rough_scores,), (rough_ids,) = self._rough(vector[None], 4 * len(rough_ids))
        return self._best(vector, k, np.sort(rough_ids))

    def _likely(self, vectors: np.ndarray, k: int, rows: np.ndarray) -> list[np.ndarray]:
        """Of rows that are in order, for each vector all that may be among its k best, by products in float32.

        Such a product is off by less than (dim + 2) 2^-24 |q| |x|, whatever the order of its sum (Higham, 2002, 3.1).
        """
        errors, longest = (self.manifest.dim + 2) * 2.0**-24 * np.linalg.norm(vectors, axis=1), 0.0
        least = np.full(len(vectors), -np.inf)
        kept = [(np.empty(0, np.float32), rows[:0])] * len(vectors)
        for part in np.split(rows, range(ROUGH, len(rows), ROUGH)):
            block = self._stored.reconstruct_batch(part)
            longest = max(longest, float(np.einsum("nd,nd->n", block, block).max()) ** 0.5)
            for query, scores in enumerate(vectors @ block.T):
                better = scores >= least[query]
                rough = np.concatenate([kept[query][0], scores[better]])
                found = np.concatenate([kept[query][1], part[better]])
                if len(rough) > k:
                    least[query] = np.partition(rough, -k)[-k] - 2 * (
                        errors[query] * longest + 10.0**-SCORE_DECIMALS
                    )
                    better = rough >= least[query]
                    rough, found = rough[better], found[better]
                kept[query] = rough, found
        return [found for _, found in kept]

    def _best(self, vector: np.ndarray, k: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The k best of some rows, which are in order, and their scores."""
        parts = np.split(rows, range(SCORED, len(rows), SCORED))
        exact = np.concatenate(
            [
                self._stored.reconstruct_batch(part).astype(np.float64) @ vector.astype(np.float64)
                for part in parts
            ]
        )
        exact = np.round(exact, SCORE_DECIMALS) + 0.0  # + 0.0 turns -0.0 into 0.0
        best = np.argsort(-exact, kind="stable")[:k]
        return rows[best], exact[best]


@dataclass(frozen=True, slots=True)
class Searcher:
    """The best passages of an index by vectors, by words (BM25), or both fused, in two stages for two threads."""

    index: Index
    encoder: Encoder | None  # None: words alone rank
    ranking: Ranking = "dense"

    def encode(self, queries: Sequence[str]) -> np.ndarray:
        """`[Q, dim]` float32; `[Q, 0]` where words alone rank."""
        if self.encoder is None or self.ranking == "bm25":
            return np.empty((len(queries), 0))
        return self.encoder.encode_queries(queries)

    def search(
        self, asked: Sequence[tuple[str, Where]], vectors: np.ndarray, k: int
    ) -> list[list[Passage]]:
        """The k best passages with scores for each query and its filter, best first.

        Raises:
            RetrievalError: the index has not what the ranking needs.
        """
        found: list[list[Passage]] = [[]] * len(asked)
        for where in dict.fromkeys(where for _, where in asked):
            places = [place for place, one in enumerate(asked) if one[1] == where]
            rankings = self._ranked(
                [asked[place][0] for place in places], vectors[places], k, where
            )
            for place, (ids, scores) in zip(places, rankings, strict=True):
                best = zip(ids[:k].tolist(), scores[:k].tolist(), strict=True)
                found[place] = [
                    replace(self.index.corpus[id], score=score, about={}) for id, score in best
                ]
        return found

    def _ranked(
        self, queries: list[str], vectors: np.ndarray, k: int, where: Where
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Rows and scores for each query."""
        index, rows = self.index, self.index.rows_with(where)
        rankings: list[tuple[np.ndarray, np.ndarray]] = []
        if self.ranking != "bm25":
            rankings = list(
                zip(
                    *index.search(vectors, k if self.ranking == "dense" else DEPTH, rows),
                    strict=True,
                )
            )
        if self.ranking == "dense":
            return rankings
        if index.lexical is None:
            raise RetrievalError(
                f"the index has no words to rank by; build it with retriever.ranking={self.ranking}"
            )
        words = [index.lexical.search(query, DEPTH, rows) for query in queries]
        both = zip(rankings, words, strict=True) if rankings else ()
        return [fused(dense[0], lexical[0]) for dense, lexical in both] or words

    def __call__(self, queries: Sequence[str], k: int, where: Where = ()) -> list[list[Passage]]:
        """Both stages."""
        return self.search([(query, where) for query in queries], self.encode(queries), k)


def check_canary(index: Index, encoder: Encoder) -> None:
    """Encodes the first, middle and last passage again; raises RetrievalError unless the index holds and finds them."""
    total = len(index.corpus)
    for row in sorted({0, total // 2, total - 1}):
        vector = encoder.encode_passages([index.corpus[row].contents])
        stored = float(index._stored.reconstruct(row) @ vector[0])
        own = float(vector[0] @ vector[0])
        best = float(index.search(vector, 1)[1][0, 0])
        margin = index.manifest.tolerance * own
        if abs(stored - own) > margin or best < stored - margin:
            raise RetrievalError(
                f"canary: row {row} of the index scores {stored:.4f} against its own passage, expected {own:.4f}; "
                f"it was built with another encoder than {encoder.identity.name}, or other prefixes; build it again"
            )


def expect(where: Path | str, what: str, got: object, expected: object) -> None:
    if got != expected:
        raise RetrievalError(
            f"{where}: {what} is {got!r}, expected {expected!r}; "
            "build the index again, or restore the files it was built from"
        )
