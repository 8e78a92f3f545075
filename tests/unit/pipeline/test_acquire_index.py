"""A published index from a hub to an answer: fetched in parts, imported, served, asked; and what each damage says."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Iterator
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
PASSAGES = [
    Passage.compose(str(row), f"{kind} {name}", f"The {kind} {name} lies near the {other}.")
    for row, (kind, name, other) in enumerate(
        (kind, name, other)
        for kind in ("river", "bridge", "tower", "garden")
        for name in ("amber", "iron", "silver", "old", "north")
        for other in ("hill", "lake")
    )
]
QUERIES = ["silver river", "the old garden near the lake", "north tower"]


def oracle(folder: Path, prefix: str, texts: list[str]) -> np.ndarray:
    """Return the embeddings [N, 16] by the recipe of E5's authors: a prefix, the mean over tokens, length 1."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModel.from_pretrained(folder).eval(),
    )
    with torch.no_grad():
        rows = [
            model(**tokenizer(prefix + text, return_tensors="pt")).last_hidden_state[0].mean(0)
            for text in texts
        ]
    return np.asarray(torch.nn.functional.normalize(torch.stack(rows), dim=1))


@pytest.fixture(scope="module")
def published(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, dict[str, bytes]], list[list[str]]]:
    """Repositories as published: a flat index in two parts, a corpus in a tar, an encoder; and the right answers."""
    folder = tmp_path_factory.mktemp("published") / "e5"
    write_bert(folder, [passage.contents for passage in PASSAGES] + ["query: passage:"], seed=1)
    vectors = oracle(folder, "passage: ", [passage.contents for passage in PASSAGES])
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
    best = np.argsort(-(oracle(folder, "query: ", QUERIES) @ vectors.T), axis=1)[:, :3]
    return {
        "datasets/some/index": {"part_aa": content[:1500], "part_ab": content[1500:]},
        "datasets/some/corpus": {"wiki-18.jsonl.gz": gzip.compress(packed.getvalue())},
        "some/e5": {path.name: path.read_bytes() for path in folder.iterdir()},
    }, [[str(row) for row in rows] for rows in best]


@pytest.fixture
def hub(
    published: tuple[dict, list], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(acquiring, "load_sources", lambda: SOURCES)
    with running(FakeHub({name: dict(files) for name, files in published[0].items()})) as server:
        server.cut["part_ab"] = 0  # answers 503 once
        yield Hub(endpoint=server.url)


def acquire_all(hub: Hub) -> None:
    for item in ITEMS:
        acquire(item, Path("data/acquired", f"{item}.json"), hub)


async def ask(url: str) -> list[list[str]]:
    async with RetrievalClient(url) as client:
        results = await asyncio.gather(*(client.search(query, 3) for query in QUERIES))
    return [[passage.id for passage in passages] for passages in results]


@pytest.mark.slow
def test_from_the_hub_to_an_answer(published: tuple[dict, list], hub: Hub) -> None:
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
        assert asyncio.run(ask(url)) == published[1]
    acquire(ITEMS[3], Path("r.json"), hub)  # verified where it is
    assert json.loads(Path("r.json").read_text())["origin"] == "was there"


def start_error(folder: Path = FOLDER, encoder: Path = ENCODER) -> str:
    """Return the error of the server's start, which has one line."""
    with pytest.raises(RetrievalError) as caught, RetrieverSidecar(folder, encoder_folder=encoder):
        pass
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.slow
def test_what_is_damaged_or_does_not_belong_is_one_line(hub: Hub) -> None:
    with pytest.raises(AcquireError):
        acquire_all(hub)
    acquire_all(hub)
    vectors, corpus = FOLDER / "e5_Flat.index", FOLDER / "wiki-18.jsonl"
    whole, lines = vectors.read_bytes(), corpus.read_bytes()
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
    copied, mine = Path("copy/e5_Flat.index"), Path("copy/wiki-18.jsonl")
    with pytest.raises(RetrievalError, match=r"wiki-18.jsonl: number of lines is \d+, expected 40"):
        import_index(copied, mine, Encoder.of("e5", ENCODER))
    mine.write_bytes(lines)
    with pytest.raises(
        RetrievalError, match=r"canary: row 0 .* another encoder than other, or with other prefixes"
    ):
        import_index(copied, mine, Encoder.of("e5", "other"))
    with pytest.raises(RetrievalError, match="canary: row 0"):
        import_index(copied, mine, Encoder.of("bge", ENCODER))  # pooled in another way
    copied.write_bytes(whole[:-100])
    with pytest.raises(
        RetrievalError, match=r"e5_Flat.index: not a FAISS index, or damaged \(.*\); fetch or build"
    ):
        import_index(copied, mine, Encoder.of("e5", ENCODER))
    copied.write_bytes(whole)
    import_index(copied, mine, Encoder.of("e5", ENCODER))
    assert Index.open(Path("copy")).search(Encoder.of("e5", ENCODER).encode_queries(QUERIES), 2)[
        0
    ].shape == (3, 2)
