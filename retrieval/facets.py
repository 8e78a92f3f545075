"""Facets: which passages have which value, so that a search may be of some of them."""

from __future__ import annotations

from array import array
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np

from mcore_mas.retrieval.corpus import Corpus
from mcore_mas.retrieval.wire import BadRequest, Where
from mcore_mas.rollout.base.files import atomic_path, known_sha256

FACETS = "facets.npy"  # beside the manifest
MOST_ROWS = 1_000_000  # that a filter may leave: all of them are scored


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
        """The rows `[n]` int64, in order, that have one of the values of every name.

        Raises:
            BadRequest: they are more than can be scored.
        """
        found: np.ndarray | None = None
        for name, values in where:
            own = np.unique(np.concatenate([self._with(name, value) for value in values]))
            found = own if found is None else np.intersect1d(found, own, assume_unique=True)
        rows = np.empty(0, np.int64) if found is None else found.astype(np.int64)
        if len(rows) > MOST_ROWS:
            raise BadRequest(f"where: {len(rows)} passages are so, at most {MOST_ROWS} may be; say more of them")
        return rows

    def _with(self, name: str, value: str) -> np.ndarray:
        wanted = np.uint64(_hash(name, value))
        first, last = (int(np.searchsorted(self._hashes, wanted, side)) for side in ("left", "right"))
        return np.asarray(self._rows[first:last])


def _hash(name: str, value: str) -> int:
    return int.from_bytes(blake2b(f"{name}\0{value}".encode(), digest_size=8).digest(), "little")
