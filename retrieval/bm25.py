"""Ranking by words (BM25), with an index that bm25s builds, saves and loads."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import bm25s
import numpy as np

from retrieval.corpus import Corpus
from retrieval.digests import cached_sha256

BM25_FOLDER = "bm25"  # in the index folder
_QUIET: dict[str, Any] = {"show_progress": False}


class BM25Index:
    """A BM25 index (Lucene's variant, k1 1.5, b 0.75) whose arrays are mapped into memory."""

    def __init__(self, index_dir: Path) -> None:
        """Open the BM25 index in an index folder."""
        folder = str(index_dir / BM25_FOLDER)
        self._bm25 = bm25s.BM25.load(folder, mmap=True, verbosity=0, **_QUIET)

    @staticmethod
    def build(corpus: Corpus, index_dir: Path) -> None:
        """Index the words of a corpus into an index folder.

        bm25s has the whole corpus, its words and the index in memory at once.
        """
        tokens = bm25s.tokenize([passage.contents for passage in corpus], **_QUIET)
        bm25 = bm25s.BM25()
        bm25.index(tokens, **_QUIET)
        folder = index_dir / BM25_FOLDER
        # A running server keeps the deleted files, because it has them mapped.
        shutil.rmtree(folder, ignore_errors=True)
        bm25.save(str(folder), **_QUIET)

    def search(self, query: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the k best rows, int64, and their scores, best first; ties are broken by row number.

        A passage that shares no word with the query scores 0.
        """
        (words,) = bm25s.tokenize([query], return_ids=False, **_QUIET)
        ids = self._bm25.get_tokens_ids(words)  # without words that no passage has
        scores = np.asarray(self._bm25.get_scores_from_ids(ids))
        k = min(k, len(scores))
        # Sort only the rows that reach the k-th best score.
        threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
        rows = np.flatnonzero(scores >= threshold)
        best = rows[np.argsort(-scores[rows], kind="stable")[:k]]
        return best, scores[best]


def bm25_sha256(index_dir: Path, *, reread: bool = False) -> str:
    """Return a digest of all files of the BM25 index in an index folder, or "" if there is none."""
    paths = sorted((index_dir / BM25_FOLDER).glob("[!.]*"))
    if not paths:
        return ""
    digests = "".join(cached_sha256(path, reread=reread) for path in paths)
    return hashlib.sha256(digests.encode()).hexdigest()
