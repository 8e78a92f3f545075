"""Index building: passages are encoded in shards that go on where they stopped, and become an index of some kind."""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from math import isqrt
from os.path import relpath
from pathlib import Path

import faiss
import numpy as np

from retrieval.corpus import Corpus
from retrieval.encoder import Encoder
from retrieval.index import (
    EXACT,
    INDEX_FORMAT,
    MANIFEST,
    PUBLISHED,
    VECTORS,
    Index,
    Manifest,
    check_canary,
    expect,
    read_vectors,
)
from retrieval.lexical import Facets, Lexical
from rollout.base.failpoints import failpoint
from rollout.base.files import atomic_path, known_sha256, sealed, write_json
from rollout.base.processes import say

CHUNK = 4096  # passages encoded together; shards begin at a multiple of it, so that their number changes no bit
TELL_S = 30.0  # between two lines of progress

TRAINED_ON = 100_000  # passages that an index learns its cells and ranges from, at most
PER_CELL = 39  # FAISS warns below so many of them for a cell of IVF, and for a centroid of PQ
PQ_DIMS = 8  # of a vector that one code of PQ stands for
CODED = 0.5  # by PQ, of which only a hint is left


def cells_of(n: int) -> int:
    """Cells of an IVF over n passages, of which each has enough to be learnt from."""
    return max(1, min(4 * isqrt(n), min(n, TRAINED_ON) // PER_CELL))


def codes_of(n: int, dim: int) -> tuple[int, int]:
    """Codes that PQ makes of a vector, and their bits: 8, or what n passages can teach."""
    codes = next(codes for codes in range(max(1, dim // PQ_DIMS), 0, -1) if dim % codes == 0)
    return codes, max(1, min(8, (min(n, TRAINED_ON) // PER_CELL).bit_length() - 1))


@dataclass(frozen=True, slots=True)
class IndexType:
    """A kind of index: FAISS's name of it for n passages of some dimension, how true its vectors are, and its size."""

    factory: Callable[[int, int], str]
    tolerance: float
    row_bytes: Callable[[int, int], float]  # (n, dim) -> bytes of one passage in it


INDEX_TYPES: dict[str, IndexType] = {  # `retriever.index` names one
    "flat": IndexType(lambda n, dim: "Flat", EXACT, lambda n, dim: 4 * dim),
    "sq8": IndexType(lambda n, dim: "SQ8", PUBLISHED, lambda n, dim: dim),
    # with the cells' centres, and the number of each of its passages
    "ivf": IndexType(
        lambda n, dim: f"IVF{cells_of(n)},Flat",
        PUBLISHED,
        lambda n, dim: 4 * dim + 8 + 4 * dim * cells_of(n) / n,
    ),
    "ivfpq": IndexType(
        # np: none of the hours of sorting codes for a search by Hamming distance, which is not used
        lambda n, dim: "IVF{},PQ{}x{}np".format(cells_of(n), *codes_of(n, dim)),
        CODED,
        lambda n, dim: (
            codes_of(n, dim)[0] * codes_of(n, dim)[1] / 8 + 8 + 4 * dim * cells_of(n) / n
        ),
    ),
    "hnsw": IndexType(
        lambda n, dim: "HNSW32", PUBLISHED, lambda n, dim: 4 * dim + 4 * 64 + 12
    ),  # and 64 neighbours
}


def shard_name(number: int, shards: int) -> str:
    """The file of a shard's vectors, `[rows, dim]` float32 and nothing else."""
    return f"{number:04}-of-{shards:04}.f32"


def shard_rows(total: int, number: int, shards: int) -> range:
    """The rows of a shard, of `total`."""
    chunks = -(-total // CHUNK)
    return range(*(min(total, chunks * edge // shards * CHUNK) for edge in (number, number + 1)))


def encode_shard(
    corpus_path: Path, folder: Path, encoder: Encoder, number: int = 0, shards: int = 1
) -> Path:
    """Encode the rows of one shard into `folder`; what an earlier try of the same has finished is kept.

    Raises:
        RetrievalError: a line of the corpus is malformed (file:line), or a vector is not finite.
    """
    corpus, path = Corpus(corpus_path), folder / shard_name(number, shards)
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
        done = kept = file.tell() // line // CHUNK * CHUNK
        file.truncate(done * line)
        there, began = f" ({kept} were there)" if kept else "", time.monotonic()
        told = began
        for first in range(rows.start + done, rows.stop, CHUNK):
            texts = [corpus[row].contents for row in range(first, min(first + CHUNK, rows.stop))]
            file.write(encoder.encode_passages(texts).tobytes())
            file.flush()
            failpoint(f"index.encoded:{path.name}")
            done += len(texts)
            if time.monotonic() - told > TELL_S or done == len(rows):
                told = time.monotonic()
                rate = (done - kept) / max(told - began, 1e-9)
                left = f"{rate:.0f} a second, {(len(rows) - done) / max(rate, 1e-9) / 60:.0f} minutes left"
                say(f"shard {number} of {shards}: {done} of {len(rows)} passages{there}, {left}")
        os.fsync(file.fileno())
    return partial.rename(path)


def build_index(
    passages: Path,
    out: Path,
    encoder: Encoder | None,
    kind: str = "flat",
    *,
    shards: int = 1,
    lexical: bool = False,
) -> Manifest:
    """Write `vectors.faiss`, then `index.json`; an unfinished folder does not open.

    Shards that are in `out`/shards are taken from there, the others encoded first.

    Args:
        encoder: None makes an index of words alone.
        kind: a name in INDEX_TYPES.
        lexical: with an index of words (BM25) beside it.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST).unlink(missing_ok=True)
    corpus = Corpus(passages)
    index = _vectors(corpus, out, encoder, kind, shards) if encoder else None
    manifest = _manifest(out / VECTORS, corpus, index, encoder, INDEX_TYPES[kind].tolerance)
    if lexical or not encoder:
        manifest = replace(manifest, lexical_sha256=Lexical.build(corpus, out))
    write_json(out / MANIFEST, sealed(asdict(manifest)))
    if shards == 1:  # else they are the files of other jobs
        shutil.rmtree(out / "shards", ignore_errors=True)
    return manifest


def _vectors(
    corpus: Corpus, out_dir: Path, encoder: Encoder, kind: str, shards: int
) -> faiss.Index:
    """The index of all shards, which is also written."""
    files = [
        encode_shard(corpus.path, out_dir / "shards", encoder, number, shards)
        for number in range(shards)
    ]
    dim, total = encoder.identity.dim, len(corpus)
    parts: list[np.ndarray] = [
        np.memmap(path, np.float32, "r").reshape(-1, dim) for path in files if path.stat().st_size
    ]
    index = faiss.index_factory(
        dim, INDEX_TYPES[kind].factory(total, dim), faiss.METRIC_INNER_PRODUCT
    )
    if not index.is_trained:
        stride = -(-total // TRAINED_ON)
        befores = accumulate(map(len, parts), initial=0)
        index.train(
            np.concatenate(
                [part[-n % stride :: stride] for part, n in zip(parts, befores, strict=False)]
            )
        )
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
    vectors: Path,
    corpus: Corpus,
    index: faiss.Index | None,
    encoder: Encoder | None,
    tolerance: float,
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
