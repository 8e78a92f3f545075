"""Indexes of many vectors that look like an encoder's, without the hours of encoding them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from retrieval.atomic_files import write_json_file
from retrieval.build import build_index, shard_name
from retrieval.corpus import Corpus, Passage, write_corpus
from retrieval.digests import cached_sha256
from retrieval.encoder import Encoder

ENCODED_ROWS = 500
BLOCK_ROWS = 100_000


def towns(total: int) -> Iterator[Passage]:
    """Yield short passages."""
    for n in range(total):
        yield Passage.compose(str(n), f"Town {n}", f"Town {n} lies on the river {n % 17}.")


def spread_index(folder: Path, encoder: Encoder, total: int) -> None:
    """Build a flat index of `total` passages in `folder`, of which ENCODED_ROWS are encoded.

    The vectors of the others lie near those: x + 0.7 e, normalised, with an encoded vector x and a
    random unit vector e. The passages in the middle and at the end have their encoded vectors too,
    because a server encodes them again at its start and compares the vectors.
    """
    path = folder.with_suffix(".jsonl")
    write_corpus(path, towns(total))
    corpus = Corpus(path)
    encoded_rows = [*range(min(total, ENCODED_ROWS)), total // 2, total - 1]
    encoded = encoder.encode_passages([corpus[row].contents for row in encoded_rows])
    base = encoded[: min(total, ENCODED_ROWS)]

    shard = folder / "shards" / shard_name(0, 1)
    inputs = {"encoder": asdict(encoder.identity), "corpus_sha256": cached_sha256(path)}
    write_json_file(shard.with_suffix(".json"), inputs)
    random = np.random.default_rng(0)
    with shard.open("wb") as file:
        for start in range(0, total, BLOCK_ROWS):
            rows = np.arange(start, min(start + BLOCK_ROWS, total))
            noise = random.standard_normal((len(rows), base.shape[1]), dtype=np.float32)
            noise *= 0.7 / np.linalg.norm(noise, axis=1, keepdims=True)
            vectors = base[rows % len(base)] + noise
            for row, vector in zip(encoded_rows, encoded, strict=True):
                vectors[rows == row] = vector
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            file.write(vectors.astype(np.float32).tobytes())
    build_index(path, folder, encoder)
