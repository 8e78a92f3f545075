"""Index building: passages are encoded in shards that go on where they stopped, and become an index of FAISS."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict, replace
from itertools import accumulate
from os.path import relpath
from pathlib import Path

import faiss
import numpy as np

from mcore_mas.retrieval.corpus import Corpus
from mcore_mas.retrieval.encoder import Encoder
from mcore_mas.retrieval.index import (
    INDEX_FORMAT,
    INDEX_TYPES,
    MANIFEST,
    PUBLISHED,
    TRAINED_ON,
    VECTORS,
    Index,
    Manifest,
    check_canary,
    expect,
    read_vectors,
)
from mcore_mas.retrieval.lexical import Facets, Lexical
from mcore_mas.rollout.base.failpoints import failpoint
from mcore_mas.rollout.base.files import atomic_path, known_sha256, sealed, write_json
from mcore_mas.rollout.base.processes import say

CHUNK = 4096  # passages encoded together; shards begin at a multiple of it, so that their number changes no bit
TELL_S = 30.0  # between two lines of progress


def shard_name(number: int, shards: int) -> str:
    """The file of a shard's vectors, `[rows, dim]` float32 and nothing else."""
    return f"{number:04}-of-{shards:04}.f32"


def shard_rows(total: int, number: int, shards: int) -> range:
    """The rows of a shard, of `total`."""
    chunks = -(-total // CHUNK)
    return range(*(min(total, chunks * edge // shards * CHUNK) for edge in (number, number + 1)))


def encode_shard(
    corpus_path: Path | str, folder: Path | str, encoder: Encoder, number: int = 0, shards: int = 1
) -> Path:
    """Encode the rows of one shard into `folder`; what an earlier try of the same has finished is kept.

    Raises:
        RetrievalError: a line of the corpus is malformed (file:line), or a vector is not finite.
    """
    corpus, path = Corpus(Path(corpus_path)), Path(folder) / shard_name(number, shards)
    rows, line = shard_rows(len(corpus), number, shards), 4 * encoder.identity.dim
    of = {"encoder": asdict(encoder.identity), "corpus_sha256": known_sha256(corpus.path)}
    partial, about = path.with_suffix(".partial"), path.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not about.exists() or json.loads(about.read_bytes()) != of:
        path.unlink(missing_ok=True)
        partial.unlink(missing_ok=True)
        write_json(about, of)
    if path.exists() and path.stat().st_size == len(rows) * line:
        return path
    with partial.open("ab") as file:
        done = file.tell() // line // CHUNK * CHUNK
        file.truncate(done * line)
        rate, told = _Rate(f"shard {number} of {shards}", len(rows), done), time.monotonic()
        for first in range(rows.start + done, rows.stop, CHUNK):
            texts = [corpus[row].contents for row in range(first, min(first + CHUNK, rows.stop))]
            file.write(encoder.encode_passages(texts).tobytes())
            file.flush()
            failpoint(f"index.encoded:{path.name}")
            done += len(texts)
            if time.monotonic() - told > TELL_S or done == len(rows):
                told = time.monotonic()
                say(rate.line(done))
        os.fsync(file.fileno())
    return partial.rename(path)


class _Rate:
    """How fast passages are encoded."""

    def __init__(self, what: str, total: int, done: int) -> None:
        self._what, self._total, self._first, self._began = what, total, done, time.monotonic()

    def line(self, done: int) -> str:
        """What is done, how fast, and how long the rest takes at that."""
        rate = (done - self._first) / max(time.monotonic() - self._began, 1e-9)
        left = (self._total - done) / max(rate, 1e-9) / 60
        kept = f" ({self._first} were there)" if self._first else ""
        return f"{self._what}: {done} of {self._total} passages{kept}, {rate:.0f} a second, {left:.0f} minutes left"


def build_index(
    corpus_path: Path | str,
    out_dir: Path | str,
    encoder: Encoder | None,
    kind: str = "flat",
    *,
    shards: int = 1,
    lexical: bool = False,
) -> Manifest:
    """Write `vectors.faiss`, then `index.json`; an unfinished folder does not open.

    Shards that are in `out_dir`/shards are taken from there, the others encoded first.

    Args:
        encoder: None makes an index of words alone.
        kind: a name in INDEX_TYPES.
        lexical: with an index of words (BM25) beside it.

    Raises:
        RetrievalError: a line of the corpus is malformed (file:line), or a vector is not finite.
    """
    corpus_path, out_dir = Path(corpus_path), Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / MANIFEST).unlink(missing_ok=True)
    corpus = Corpus(corpus_path)
    index = _vectors(corpus, out_dir, encoder, kind, shards) if encoder else None
    manifest = _manifest(out_dir / VECTORS, corpus, index, encoder, INDEX_TYPES[kind].tolerance)
    if lexical or not encoder:
        manifest = replace(manifest, lexical_sha256=Lexical.build(corpus, out_dir))
    write_json(out_dir / MANIFEST, sealed(asdict(manifest)))
    if shards == 1:  # else they are the files of other jobs
        shutil.rmtree(out_dir / "shards", ignore_errors=True)
    return manifest


def _vectors(corpus: Corpus, out_dir: Path, encoder: Encoder, kind: str, shards: int) -> faiss.Index:
    """The index of all shards, which is also written."""
    files = [encode_shard(corpus.path, out_dir / "shards", encoder, number, shards) for number in range(shards)]
    dim, total = encoder.identity.dim, len(corpus)
    parts: list[np.ndarray] = [
        np.memmap(path, np.float32, "r").reshape(-1, dim) for path in files if path.stat().st_size
    ]
    index = faiss.index_factory(dim, INDEX_TYPES[kind].factory(total, dim), faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:
        stride = -(-total // TRAINED_ON)
        befores = accumulate(map(len, parts), initial=0)
        index.train(np.concatenate([part[-n % stride :: stride] for part, n in zip(parts, befores, strict=False)]))
    for part in parts:
        for first in range(0, len(part), CHUNK):
            index.add(np.ascontiguousarray(part[first : first + CHUNK]))
    with atomic_path(out_dir / VECTORS) as temporary:
        faiss.write_index(index, str(temporary))
    return index


def import_index(vectors: Path, corpus_path: Path, encoder: Encoder) -> Manifest:
    """Write the manifest of a published FAISS file beside it, once it is seen to be of this corpus and this encoder.

    Raises:
        RetrievalError: the file is no inner-product index that vectors can be read back from, or counts, dimensions
            or a few passages encoded again do not agree.
    """
    index = read_vectors(vectors)
    corpus = Corpus(corpus_path)
    expect(vectors, "metric", index.metric_type, faiss.METRIC_INNER_PRODUCT)
    expect(vectors, "dim", index.d, encoder.identity.dim)
    expect(corpus_path, "number of lines", len(corpus), index.ntotal)
    manifest = _manifest(vectors, corpus, index, encoder, PUBLISHED)
    check_canary(Index(manifest, index, corpus), encoder)
    write_json(vectors.parent / MANIFEST, sealed(asdict(manifest)))
    return manifest


def _manifest(
    vectors: Path, corpus: Corpus, index: faiss.Index | None, encoder: Encoder | None, tolerance: float
) -> Manifest:
    return Manifest(
        format=INDEX_FORMAT,
        encoder=encoder.identity if encoder else None,
        dim=index.d if index else 0,
        ntotal=len(corpus),
        corpus=relpath(corpus.path.resolve(), vectors.resolve().parent),
        corpus_sha256=known_sha256(corpus.path),
        index_sha256=known_sha256(vectors) if index else "",
        vectors=vectors.name,
        tolerance=tolerance,
        facets_sha256=Facets.build(corpus, vectors.parent),
    )
