"""A published index: fetched from a hub in parts, imported, served and searched; and errors of damaged ones."""

from __future__ import annotations

import asyncio
import gzip
import io
import itertools
import json
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from mcore_mas.pipeline import acquire as acquiring
from mcore_mas.pipeline.acquire import acquire
from mcore_mas.pipeline.hub import AcquireError, Hub
from mcore_mas.pipeline.sources import Source
from retrieval.build import import_index
from retrieval.client import RetrievalClient
from retrieval.corpus import Passage, RetrievalError
from retrieval.encoder import Encoder
from retrieval.index import Index
from retrieval.sidecar import RetrieverSidecar
from tests.support.hub import FakeHub, running
from tests.support.tiny_bert import write_bert

pytestmark = pytest.mark.usefixtures("forked_programs")

FOLDER = Path("data/wiki-18")
ENCODER = Path("models/e5-base-v2")
ITEMS = [f"{FOLDER}/e5_Flat.index", f"{FOLDER}/wiki-18.jsonl", str(ENCODER), f"{FOLDER}/index.json"]
SOURCES = {
    ITEMS[0]: Source(repository="some/index", files=("part_a?",)),
    ITEMS[1]: Source(repository="some/corpus", files=("wiki-18.jsonl.gz",)),
    ITEMS[2]: Source(repository="some/e5"),
    ITEMS[3]: Source(needs=tuple(ITEMS[:3]), encoder="e5"),
}
KINDS = ("river", "bridge", "tower", "garden")
NAMES = ("amber", "iron", "silver", "old", "north")
PLACES = ("hill", "lake")
PASSAGES = [
    Passage.compose(str(row), f"{kind} {name}", f"The {kind} {name} lies near the {place}.")
    for row, (kind, name, place) in enumerate(itertools.product(KINDS, NAMES, PLACES))
]
QUERIES = ["silver river", "the old garden near the lake", "north tower"]


@dataclass(frozen=True)
class Published:
    """Repositories of an index, and the answers to QUERIES that it gives."""

    repositories: dict[str, dict[str, bytes]]  # files by name, by repository
    best_ids: list[list[str]]  # ids of the three nearest passages of each query


def embed(folder: Path, prefix: str, texts: list[str]) -> np.ndarray:
    """Return the embeddings [N, 16] by the recipe of E5's authors.

    A text gets a prefix, and its embedding is the mean over tokens, scaled to length 1.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        rows = [
            model(**tokenizer(prefix + text, return_tensors="pt")).last_hidden_state[0].mean(0)
            for text in texts
        ]
    return np.asarray(torch.nn.functional.normalize(torch.stack(rows), dim=1))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Return repositories as published: a flat index in two parts, a corpus in a tar, an encoder."""
    folder = tmp_path_factory.mktemp("published") / "e5"
    write_bert(folder, [passage.contents for passage in PASSAGES] + ["query: passage:"], seed=1)
    vectors = embed(folder, "passage: ", [passage.contents for passage in PASSAGES])
    index = faiss.IndexFlatIP(16)
    index.add(vectors)
    content = faiss.serialize_index(index).tobytes()
    lines = "".join(
        json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in PASSAGES
    ).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo("data00/wiki_dump.jsonl")
        entry.size = len(lines)
        archive.addfile(entry, io.BytesIO(lines))

    similarities = embed(folder, "query: ", QUERIES) @ vectors.T
    best_rows = np.argsort(-similarities, axis=1)[:, :3]
    return Published(
        repositories={
            "datasets/some/index": {"part_aa": content[:1500], "part_ab": content[1500:]},
            "datasets/some/corpus": {"wiki-18.jsonl.gz": gzip.compress(packed.getvalue())},
            "some/e5": {path.name: path.read_bytes() for path in folder.iterdir()},
        },
        best_ids=[[str(row) for row in rows] for rows in best_rows],
    )


@pytest.fixture
def hub(published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Yield the hub of these repositories, whose second part of the index fails once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(acquiring, "load_sources", lambda: SOURCES)
    repositories = {name: dict(files) for name, files in published.repositories.items()}
    with running(FakeHub(repositories)) as server:
        server.cut["part_ab"] = 0  # answers 503 once
        yield Hub(endpoint=server.url)


def acquire_all(hub: Hub) -> None:
    for item in ITEMS:
        acquire(item, Path("data/acquired", f"{item}.json"), hub)


async def search(url: str) -> list[list[str]]:
    """Return the ids of the three best passages of each query."""
    async with RetrievalClient(url) as client:
        results = await asyncio.gather(*(client.search(query, 3) for query in QUERIES))
    return [[passage.id for passage in passages] for passages in results]


@pytest.mark.slow
def test_a_published_index_is_acquired_and_searched(published: Published, hub: Hub) -> None:
    with pytest.raises(AcquireError, match="some/index: answered 503"):
        acquire_all(hub)
    assert not Path(ITEMS[0]).exists()
    acquire_all(hub)
    receipt = json.loads(Path("data/acquired", f"{ITEMS[3]}.json").read_text())
    assert (receipt["rows"], receipt["origin"]) == (40, f"made of {ITEMS[0]}, 70.1 GB")
    manifest = json.loads((FOLDER / "index.json").read_text())
    assert (manifest["vectors"], manifest["corpus"], manifest["dim"]) == (
        "e5_Flat.index",
        "wiki-18.jsonl",
        16,
    )
    assert {
        key: manifest["encoder"][key]
        for key in ("name", "pooling", "query_prefix", "passage_prefix")
    } == {
        "name": "e5-base-v2",
        "pooling": "mean",
        "query_prefix": "query: ",
        "passage_prefix": "passage: ",
    }
    with RetrieverSidecar(FOLDER, encoder_folder=ENCODER) as url:
        assert asyncio.run(search(url)) == published.best_ids
    acquire(ITEMS[3], Path("r.json"), hub)  # verified where it is
    assert json.loads(Path("r.json").read_text())["origin"] == "was there"


def start_error(folder: Path = FOLDER, encoder: Path = ENCODER) -> str:
    """Return the error of the server's start, which has one line."""
    with pytest.raises(RetrievalError) as caught, RetrieverSidecar(folder, encoder_folder=encoder):
        pass
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.slow
def test_a_damaged_index_and_another_encoder_are_refused_in_one_line(hub: Hub) -> None:
    with pytest.raises(AcquireError):
        acquire_all(hub)
    acquire_all(hub)
    vectors = FOLDER / "e5_Flat.index"
    corpus = FOLDER / "wiki-18.jsonl"
    whole = vectors.read_bytes()
    lines = corpus.read_bytes()
    write_bert(
        Path("other"), [passage.contents for passage in PASSAGES] + ["query: passage:"], seed=2
    )
    error = start_error(encoder=Path("other"))
    assert "weights in" in error
    assert "expected" in error
    vectors.write_bytes(whole[:-7] + bytes([whole[-7] ^ 1]) + whole[-6:])
    assert "e5_Flat.index: sha256 is" in start_error()
    vectors.write_bytes(whole)
    corpus.write_bytes(lines[: len(lines) // 2])
    assert "wiki-18.jsonl: number of lines is" in start_error()

    shutil.copytree(FOLDER, "copy")
    copied_vectors = Path("copy/e5_Flat.index")
    copied_corpus = Path("copy/wiki-18.jsonl")
    with pytest.raises(RetrievalError, match=r"wiki-18.jsonl: number of lines is \d+, expected 40"):
        import_index(copied_vectors, copied_corpus, Encoder.of("e5", ENCODER))
    copied_corpus.write_bytes(lines)
    with pytest.raises(
        RetrievalError, match=r"canary: row 0 .* another encoder than other, or with other prefixes"
    ):
        import_index(copied_vectors, copied_corpus, Encoder.of("e5", "other"))
    with pytest.raises(RetrievalError, match="canary: row 0"):
        import_index(
            copied_vectors, copied_corpus, Encoder.of("bge", ENCODER)
        )  # pooled in another way
    copied_vectors.write_bytes(whole[:-100])
    with pytest.raises(
        RetrievalError, match=r"e5_Flat.index: not a FAISS index, or damaged \(.*\); fetch or build"
    ):
        import_index(copied_vectors, copied_corpus, Encoder.of("e5", ENCODER))
    copied_vectors.write_bytes(whole)
    import_index(copied_vectors, copied_corpus, Encoder.of("e5", ENCODER))
    embeddings = Encoder.of("e5", ENCODER).encode_queries(QUERIES)
    rows = Index.open(Path("copy")).search(embeddings, 2)[0]
    assert rows.shape == (3, 2)
