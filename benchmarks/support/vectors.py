"""Indexes of many vectors that look like an encoder's, without the hours of encoding them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from retrieval.build import build_index, shard_name
from retrieval.corpus import Passage, write_corpus
from retrieval.encoder import Encoder
from rollout.base.files import known_sha256, write_json

ENCODED, BLOCK = 500, 100_000


def towns(total: int) -> Iterator[Passage]:
    """Short passages."""
    return (
        Passage.compose(str(n), f"Town {n}", f"Town {n} lies on the river {n % 17}.")
        for n in range(total)
    )


def spread_index(folder: Path, encoder: Encoder, total: int) -> None:
    """A flat index of `total` passages: some encoded, all others near one of those.

    A vector near another is (x + 0.7 e) of length 1, with e a random unit vector.
    """
    corpus = folder.with_suffix(".jsonl")
    write_corpus(corpus, towns(total))
    base = encoder.encode_passages([passage.contents for passage in towns(min(total, ENCODED))])
    shard = folder / "shards" / shard_name(0, 1)
    shard.parent.mkdir(parents=True)
    write_json(
        shard.with_suffix(".json"),
        {"encoder": asdict(encoder.identity), "corpus_sha256": known_sha256(corpus)},
    )
    random = np.random.default_rng(0)
    last = encoder.encode_passages([json.loads(line)["contents"] for line in _ends(corpus, total)])
    with shard.open("wb") as file:
        for first in range(0, total, BLOCK):
            rows = np.arange(first, min(first + BLOCK, total))
            noise = random.standard_normal((len(rows), base.shape[1]), dtype=np.float32)
            noise *= 0.7 / np.linalg.norm(noise, axis=1, keepdims=True)
            vectors = np.where(
                (rows < len(base))[:, None], base[rows % len(base)], base[rows % len(base)] + noise
            )
            for row, own in zip(
                (total // 2, total - 1), last, strict=True
            ):  # which the start encodes again
                vectors[rows == row] = own
            file.write(
                (vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
                .astype(np.float32)
                .tobytes()
            )
    build_index(corpus, folder, encoder)


def _ends(corpus: Path, total: int) -> list[str]:
    wanted = {total // 2, total - 1}
    with corpus.open(encoding="utf-8") as file:
        return [line for row, line in enumerate(file) if row in wanted]
