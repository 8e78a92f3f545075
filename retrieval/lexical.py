"""Search besides vectors: by words (BM25), and facets, which passages have which value."""

import hashlib
import math
from array import array
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import bm25s
import numpy as np

from retrieval.corpus import Corpus
from retrieval.wire import MAX_TOPK, BadRequest, Where
from rollout.base.files import atomic_folder, atomic_path, known_sha256

FOLDER = "bm25"  # beside the manifest
RRF_K = 60  # of reciprocal rank fusion, its authors' own
PART = 5_000  # passages whose words are in memory at a time
_QUIET: dict[str, Any] = {"show_progress": False}


class Lexical:
    """An opened BM25 index (Lucene's variant, k1 1.5, b 0.75), its arrays mapped."""

    def __init__(self, folder: Path) -> None:
        self._bm25 = bm25s.BM25.load(str(folder), mmap=True, verbosity=0, **_QUIET)

    @staticmethod
    def build(corpus: Corpus, out_dir: Path) -> str:
        """Write the index of a corpus below `out_dir`, to the bit that of `bm25s.BM25().index`; its digest.

        Passages are read twice, a part at a time: their words are counted, then each score is put in its place. So
        memory holds the index and a part. The score of a word w in a passage d of n (Lucene's variant):

            ln(1 + (n - df(w) + 0.5) / (df(w) + 0.5)) tf / (k1 (1 - b + b |d| / mean |d|) + tf)
        """
        vocabulary: dict[str, int] = {}
        found, total, n = np.zeros(0, np.int64), 0, len(corpus)
        for words, _, counts, _ in _postings(corpus, vocabulary):
            more = np.bincount(words, minlength=len(vocabulary))
            more[: len(found)] += found
            found, total = more, total + int(counts.sum())
        idf = np.array(
            [math.log(1 + (n - df + 0.5) / (df + 0.5)) for df in found.tolist()], np.float32
        )
        ends = np.concatenate([[0], np.cumsum(found)])
        index, heads = bm25s.BM25(), ends[:-1].copy()
        data, rows = np.empty(ends[-1], index.dtype), np.empty(ends[-1], index.int_dtype)
        for words, own, counts, lengths in _postings(corpus, vocabulary):
            here, first, sizes = np.unique(words, return_index=True, return_counts=True)
            places = np.arange(len(words)) + np.repeat(heads[here] - first, sizes)
            norms = index.k1 * (1 - index.b + index.b * lengths / (total / n))
            data[places], rows[places] = idf[words] * (counts / (norms + counts)), own
            heads[here] += sizes
        vocabulary[""] = len(vocabulary)
        index.vocab_dict, index.nonoccurrence_array = vocabulary, None
        index.scores = {"data": data, "indices": rows, "indptr": ends, "num_docs": n}
        with atomic_folder(out_dir / FOLDER, 0o755) as folder:
            index.save(str(folder), **_QUIET)
        return lexical_digest(out_dir)

    def search(
        self, query: str, k: int, among: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best rows int64, of `among` or all, and their scores, best first; equal scores go by row.

        What shares no word scores 0.
        """
        (words,) = bm25s.tokenize([query], return_ids=False, **_QUIET)
        known = [word for word in words if word in self._bm25.vocab_dict]
        scores = (
            np.asarray(self._bm25.get_scores(known))
            if known
            else np.zeros(self._bm25.scores["num_docs"])
        )
        if among is not None:
            scores = scores[among]
        k = min(k, len(scores))
        if not k:
            return np.empty(0, np.int64), np.empty(0)
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        rows = np.flatnonzero(scores >= least)
        best = rows[np.argsort(-scores[rows], kind="stable")[:k]]
        return best if among is None else among[best], scores[best]


def _postings(corpus: Corpus, vocabulary: dict[str, int]) -> Iterator[tuple[np.ndarray, ...]]:
    """For a part of the corpus after the other its postings `[P]` int64, by word and row: words, rows, counts, and how
    many words the passage has.

    New words are added to the vocabulary.
    """
    for first in range(0, len(corpus), PART):
        some = range(first, min(first + PART, len(corpus)))
        ids, own = bm25s.tokenize([corpus[row].contents for row in some], **_QUIET)
        numbers = np.array([vocabulary.setdefault(word, len(vocabulary)) for word in own], np.int64)
        lengths = np.array([*map(len, ids)])
        words = numbers[np.fromiter(chain.from_iterable(ids), np.int64, lengths.sum())]
        pairs, counts = np.unique(words << 32 | np.repeat(some, lengths), return_counts=True)
        rows = pairs & 0xFFFFFFFF
        yield pairs >> 32, rows, counts, lengths[rows - first]


def fused(*rankings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows of several rankings, best first, with their scores; equal ones go by row.

    Reciprocal rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009), ranks from 1:

        score(d) = sum over rankings of 1 / (60 + rank of d)
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, row in enumerate(ranking.tolist(), start=1):
            scores[row] = scores.get(row, 0.0) + 1 / (RRF_K + rank)
    rows = sorted(scores, key=lambda row: (-scores[row], row))
    return np.array(rows, dtype=np.int64), np.array([scores[row] for row in rows])


DEPTH = MAX_TOPK  # rows of each ranking that are fused; fixed, so that a smaller k gives a prefix of a larger one's


def lexical_digest(out_dir: Path, *, again: bool = False) -> str:
    """One digest of all files of the index below `out_dir`, "" where there is none."""
    files = sorted(path for path in (out_dir / FOLDER).glob("*") if not path.name.startswith("."))
    return (
        hashlib.sha256(
            "".join(known_sha256(path, again=again) for path in files).encode()
        ).hexdigest()
        if files
        else ""
    )


FACETS = "facets.npy"  # beside the manifest
MOST_ROWS = 1_000_000  # that a filter may leave: all of them are scored
MOST_COUNTED = 4_000_000  # that may be as the rarest of its names says: they are put in order


class Facets:
    """An opened table, mapped: hashes of (name, value), sorted, and the rows of the corpus that have it.

    Hashes have 64 bits: of 10^8 pairs, one that is asked for is mistaken with a chance of 10^-11.
    """

    def __init__(self, path: Path) -> None:
        self._hashes, self._rows = np.load(path, mmap_mode="r")
        self.rows = lru_cache(16)(self._found)

    @staticmethod
    def build(corpus: Corpus, out_dir: Path) -> str:
        """Write the table of a corpus into `out_dir`; its digest."""
        hashes, rows = array("Q"), array("Q")
        for row, passage in enumerate(corpus):
            for name, value in passage.facts():
                hashes.append(_hash(name, value))
                rows.append(row)
        both = np.array([hashes, rows], dtype=np.uint64)
        with atomic_path(out_dir / FACETS) as temporary, temporary.open("wb") as file:
            np.save(file, both[:, np.lexsort(both[::-1])])
        return known_sha256(out_dir / FACETS)

    def _found(self, where: Where) -> np.ndarray:
        """The rows `[n]` int64, in order, that have one of the values of every name, unless they are too many."""
        named = [[self._with(name, value) for value in values] for name, values in where]
        named.sort(
            key=lambda parts: sum(map(len, parts))
        )  # that with the fewest first, and no other is copied
        rows = (
            np.unique(np.concatenate(named[0])) if sum(map(len, named[0])) <= MOST_COUNTED else None
        )
        for parts in named[1:]:
            rows = (
                None if rows is None else rows[np.any([_in(rows, part) for part in parts], axis=0)]
            )
        if rows is None or len(rows) > MOST_ROWS:
            many = f"over {MOST_COUNTED}" if rows is None else len(rows)
            raise BadRequest(
                f"where: {many} passages are so, at most {MOST_ROWS} may be; say more of them"
            )
        return rows

    def _with(self, name: str, value: str) -> np.ndarray:
        wanted = np.uint64(_hash(name, value))
        first, last = (
            int(np.searchsorted(self._hashes, wanted, side)) for side in ("left", "right")
        )
        return np.asarray(self._rows[first:last]).view(np.int64)


def _in(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which of `rows` are among the others, both in order."""
    places = np.searchsorted(others, rows)
    found = places < len(others)
    found[found] = others[places[found]] == rows[found]
    return found


def _hash(name: str, value: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(f"{name}\0{value}".encode(), digest_size=8).digest(), "little"
    )
