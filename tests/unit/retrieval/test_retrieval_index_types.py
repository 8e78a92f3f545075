"""Every kind of index, and of ranking and filter, finds what is nearest."""

import asyncio
import re
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bm25s
import faiss
import numpy as np
import pytest
from bm25s.stopwords import STOPWORDS_EN

from retrieval.build import INDEX_TYPES, build_index
from retrieval.client import RetrievalClient
from retrieval.corpus import Corpus, Passage, RetrievalError, write_corpus
from retrieval.encoder import Encoder
from retrieval.index import SCORE_DECIMALS, Index, Searcher, check_canary
from retrieval.lexical import Lexical, fused
from retrieval.scan import TorchScan, open_scan
from retrieval.sidecar import Golden, RetrieverSidecar, probe
from retrieval.wire import BadRequest, check_where
from tests.support.retrieval import CLOUD, by_hand, flip_a_byte
from tests.support.tiny_bert import write_bert

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.mark.parametrize(
    ("kind", "type_name", "recall"),
    [
        ("flat", "IndexFlatIP", 1.0),
        ("sq8", "IndexScalarQuantizer", 0.95),
        ("ivf", "IndexIVFFlat", 1.0),
        ("hnsw", "IndexHNSWFlat", 0.95),
    ],
)
def test_every_kind_of_index_finds_the_nearest(
    kind: str, type_name: str, recall: float, tmp_path: Path
) -> None:
    """Recall@5 of 20 queries against the exact index; of two cells every one is probed, so IVF is exact here."""
    write_bert(tmp_path / "bert", [*CLOUD, "query: passage:"], seed=3)
    encoder = Encoder.of("e5", tmp_path / "bert")
    write_corpus(
        tmp_path / "corpus.jsonl",
        (Passage(id=str(row), contents=text) for row, text in enumerate(CLOUD)),
    )
    build_index(tmp_path / "corpus.jsonl", tmp_path / kind, encoder, kind)
    index = Index.open(tmp_path / kind, encoder=encoder.identity)
    check_canary(index, encoder)
    assert type(faiss.read_index(str(tmp_path / kind / "vectors.faiss"))).__name__ == type_name
    vectors = encoder.encode_queries(CLOUD[::5])
    ids, scores = index.search(vectors, 5)
    exact = np.round(
        vectors.astype(np.float64) @ encoder.encode_passages(CLOUD).astype(np.float64).T,
        SCORE_DECIMALS,
    )
    right = np.argsort(-exact, axis=1, kind="stable")[:, :5]
    assert np.mean([len(set(a) & set(b)) / 5 for a, b in zip(ids, right, strict=True)]) >= recall
    assert np.abs(scores - np.take_along_axis(exact, ids, 1)).max() < (
        1e-4 if kind != "sq8" else 2e-2
    )
    assert index.search(vectors[:1], 100)[0].shape == (
        1,
        100,
    )  # all of them, however few are found at first


def test_codes_of_a_byte_for_eight_dimensions_find_what_is_near() -> None:
    made = INDEX_TYPES["ivfpq"]
    assert made.factory(21_015_324, 768) == "IVF2564,PQ96x8np"  # 100,000 / 39 cells are learnt
    assert made.factory(100, 16) == "IVF2,PQ2x1np"  # and as many codes as 100 vectors teach
    random = np.random.default_rng(0)
    vectors = random.standard_normal((3000, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = faiss.index_factory(64, made.factory(3000, 64), faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    index.nprobe = 32
    noisy = vectors[:200] + 0.3 / 8 * random.standard_normal((200, 64)).astype(np.float32)
    found = index.search(noisy, 10)[1]
    assert np.mean([row in ids for row, ids in enumerate(found)]) > 0.9


def test_torch_scans_in_half_precision_and_answers_the_same(
    tmp_path: Path, index_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that bf16 cannot tell apart are all scored again; blocks of the scan are merged."""
    monkeypatch.setattr("retrieval.scan.BLOCK", 700)
    made = np.random.default_rng(0).standard_normal((3000, 8)).astype(np.float32)
    made[500:900] = made[0] + 1e-4 * made[500:900]
    index = by_hand(
        tmp_path, index_dir, (made / np.linalg.norm(made, axis=1, keepdims=True)).tolist()
    )
    scan = TorchScan(index._vectors.reconstruct_n(0, 3000), "cpu")
    assert 3.1 / 512 <= scan.error < 3.11 / 512  # of unit vectors
    half = Index(index.manifest, index._vectors, index.corpus, scan=scan)
    queries = np.concatenate([made[:3], made[700:703], 5 * made[2000:2020]])
    for k in (1, 10, 100):
        for exact, found in zip(index.search(queries, k), half.search(queries, k), strict=True):
            assert (exact == found).all()
    with pytest.raises(
        RetrievalError, match="IndexIDMap: only a flat index is scanned by torch; build one"
    ):
        open_scan(faiss.IndexIDMap(faiss.IndexFlatIP(2)), "torch", "cpu")
    with pytest.raises(RetrievalError, match="FAISS finds no GPU here"):
        open_scan(index._vectors, "faiss", "cuda")


@pytest.mark.parametrize(("factory", "type_name"), [("IVF64,Flat", "ivf"), ("HNSW32", "hnsw")])
def test_a_smaller_k_gives_a_prefix_also_of_an_index_that_is_not_exact(
    factory: str, type_name: str, tmp_path: Path, index_dir: Path
) -> None:
    """Forty rows are the same vector: which of them a query gets does not depend on what shares its search."""
    made = np.random.default_rng(0).standard_normal((2560, 8)).astype(np.float32)
    made[::64] = made[0]
    flat = by_hand(
        tmp_path, index_dir, (made / np.linalg.norm(made, axis=1, keepdims=True)).tolist()
    )
    vectors = faiss.index_factory(8, factory, faiss.METRIC_INNER_PRODUCT)
    vectors.train(flat._vectors.reconstruct_n(0, 2560))
    vectors.add(flat._vectors.reconstruct_n(0, 2560))
    if type_name == "ivf":
        vectors.make_direct_map()
    index = Index(flat.manifest, vectors, flat.corpus)
    most = index.search(made[:20], 100)
    for k in (1, 3, 10):
        for few, many in zip(index.search(made[:20], k), most, strict=True):
            assert (few == many[:, :k]).all()
    assert index.search(made[:1], 3)[0].tolist() == [[0, 64, 128]]


def test_passages_that_a_graph_does_not_reach_are_found(tmp_path: Path, index_dir: Path) -> None:
    made = np.eye(8, dtype=np.float32)
    flat = by_hand(tmp_path, index_dir, made.tolist())
    graph = faiss.IndexHNSWFlat(8, 4, faiss.METRIC_INNER_PRODUCT)
    graph.add(made)
    nowhere = faiss.vector_to_array(graph.hnsw.neighbors) * 0 - 1
    faiss.copy_array_to_vector(nowhere, graph.hnsw.neighbors)
    assert (graph.search(made[7:], 8)[1] >= 0).sum() == 1
    ids, scores = Index(flat.manifest, graph, flat.corpus).search(made[7:], 3)
    assert (ids.tolist(), scores.tolist()) == ([[7, 0, 1]], [[1.0, 0.0, 0.0]])


class ClonerOptions:
    """As in FAISS for GPUs."""

    shard = useFloat16 = False  # noqa: N815 - its names


class Resources(list):
    """Likewise."""

    push_back = list.append


@pytest.mark.parametrize("gpus", [1, 2])
def test_faiss_on_gpus_answers_the_same(
    gpus: int, tmp_path: Path, index_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this FAISS, one for CPUs, lacks is by hand: as GpuCloner.cpp makes shards, of real vectors in fp16."""

    def clone(
        resources: list, devices: Any, index: faiss.Index, options: ClonerOptions
    ) -> faiss.Index:
        assert (len(resources), devices.size(), index.ntotal) == (
            gpus,
            gpus,
            0,
        )  # a full one is copied in float32
        assert (options.shard, options.useFloat16) == (True, True)
        of_gpus = [
            faiss.IndexScalarQuantizer(index.d, faiss.ScalarQuantizer.QT_fp16, index.metric_type)
            for _ in range(gpus)
        ]
        if gpus == 1:
            return of_gpus[0]
        shards = faiss.IndexShards(index.d, True, True)
        for one in of_gpus:
            shards.add_shard(one)
        return shards

    for module in (faiss, faiss.gpu_wrappers):
        monkeypatch.setattr(module, "get_num_gpus", lambda: gpus)
    monkeypatch.setattr(faiss, "GpuMultipleClonerOptions", ClonerOptions, raising=False)
    monkeypatch.setattr(faiss.gpu_wrappers, "GpuResourcesVector", Resources, raising=False)
    monkeypatch.setattr(faiss.gpu_wrappers, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss.gpu_wrappers, "index_cpu_to_gpu_multiple", clone, raising=False)
    made = np.random.default_rng(0).standard_normal((3000, 8)).astype(np.float32)
    made[500:900] = made[0] + 1e-4 * made[500:900]
    index = by_hand(
        tmp_path, index_dir, (made / np.linalg.norm(made, axis=1, keepdims=True)).tolist()
    )
    scan = open_scan(index._vectors, "faiss", "cuda")
    assert scan is not None
    assert 3.1 / 2048 <= scan.error < 3.11 / 2048
    on_gpus = Index(index.manifest, index._vectors, index.corpus, scan=scan)
    queries = np.concatenate([made[:3], made[700:703], 5 * made[2000:2020]])
    for k in (1, 10, 100, 2900):  # more than 2048 come from the file
        for exact, found in zip(index.search(queries, k), on_gpus.search(queries, k), strict=True):
            assert (exact == found).all()


def test_words_and_both_rankings_by_hand(
    tmp_path: Path, encoder: Encoder, passages: list[Passage]
) -> None:
    write_corpus(tmp_path / "corpus.jsonl", passages)
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index", encoder, lexical=True)
    index = Index.open(tmp_path / "index", encoder=encoder.identity)
    assert index.lexical is not None
    # a word in one of five passages: idf = ln(1 + 4.5 / 1.5) = ln 4, times 1 / (1 + 1.5 (.25 + .75 length / mean))
    lengths = [
        sum(
            word not in STOPWORDS_EN for word in re.findall(r"(?u)\b\w\w+\b", text.contents.lower())
        )
        for text in passages
    ]
    expected = np.log(4) / (1 + 1.5 * (0.25 + 0.75 * lengths[4] / np.mean(lengths)))
    rows, scores = index.lexical.search("a baker", 3)
    assert (rows.tolist(), scores.tolist()) == ([4, 0, 1], pytest.approx([expected, 0, 0]))
    assert index.lexical.search("zzz", 9)[0].tolist() == [0, 1, 2, 3, 4]
    (hits,) = Searcher(index, encoder, "bm25")(["baker"], 2)
    assert [hit.id for hit in hits] == ["4", "0"]
    ids, scores = fused(np.array([3, 1]), np.array([1, 0]))
    assert ids.tolist() == [1, 3, 0]
    assert scores.tolist() == [1 / 62 + 1 / 61, 1 / 61, 1 / 62]
    dense, hybrid = (
        Searcher(index, encoder, how)(["the baker", "weaver"], 5) for how in ("dense", "hybrid")
    )
    assert [hits[0].id for hits in hybrid] == ["4", "0"]
    ranks = [[hit.id for hit in dense[0]].index("4") + 1, 1]
    assert hybrid[0][0].score == sum(1 / (60 + rank) for rank in ranks)
    (tmp_path / "index/bm25/vocab.index.json").write_text("{}")
    with pytest.raises(RetrievalError, match=r"bm25: sha256 is"):
        Index.open(tmp_path / "index")
    shutil.rmtree(tmp_path / "index/bm25")
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index", encoder)
    with pytest.raises(
        RetrievalError, match=r"no words to rank by; build it with retriever\.ranking=hybrid"
    ):
        Searcher(Index.open(tmp_path / "index"), encoder, "hybrid")(["baker"], 1)


def peak(work: Callable[[], object]) -> int:
    """Bytes that Python and numpy had at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_words_are_indexed_in_parts_as_by_bm25s_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, with a third of the memory."""
    monkeypatch.setattr("retrieval.lexical.PART", 70)
    random = np.random.default_rng(0)
    texts = [
        " ".join(f"Wort{n}" for n in random.zipf(1.2, random.integers(1, 60)) % 500)
        for _ in range(3000)
    ]
    texts[7] = texts[2999] = "the a of"  # passages without words
    write_corpus(
        tmp_path / "c.jsonl", (Passage(id=str(n), contents=text) for n, text in enumerate(texts))
    )
    whole = bm25s.BM25()

    def at_once() -> None:
        whole.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)

    most, corpus = peak(at_once), Corpus(tmp_path / "c.jsonl")
    whole.save(str(tmp_path / "whole"), show_progress=False)
    assert peak(lambda: Lexical.build(corpus, tmp_path)) < most / 3
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "bm25").glob("[!.]*"))
    for name in files:
        assert (tmp_path / "bm25" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes(), name


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_filters_leave_the_passages_that_are_so(
    kind: str, tmp_path: Path, encoder: Encoder
) -> None:
    kinds = ["town", "river", "town"]
    write_corpus(
        tmp_path / "c.jsonl",
        (
            Passage(
                id=str(n),
                contents=f'"Place {n // 2}"\nNumber {n}.',
                about={"kind": kinds[n % 3], "n": n % 5},
            )
            for n in range(30)
        ),
    )
    build_index(tmp_path / "c.jsonl", tmp_path / "index", encoder, kind, lexical=True)
    index = Index.open(tmp_path / "index", encoder=encoder.identity)

    def rows(**where: str | list[str]) -> list[int]:
        found = index.rows_with(check_where(where))
        assert found is not None
        return found.tolist()

    assert rows(kind="river", n="1") == [1, 16]
    assert rows(n=["0", "4"], kind=["river", "town"]) == [
        0,
        4,
        5,
        9,
        10,
        14,
        15,
        19,
        20,
        24,
        25,
        29,
    ]
    assert rows(title="Place 3") == [6, 7]
    assert (rows(kind="sea"), rows(kin="dsea"), index.rows_with(())) == ([], [], None)
    for how in ("dense", "bm25", "hybrid"):
        search = Searcher(index, encoder, how)
        both = search(["number 16", "place"], 5, check_where({"kind": "river", "n": ["1", "2"]}))
        assert [sorted(int(hit.id) for hit in hits) for hits in both] == [[1, 7, 16, 22]] * 2
        assert (both[0][0].id, search(["number 16"], 5, check_where({"kind": "sea"}))) == (
            "16",
            [[]],
        )
        alone = search(["number 16"], 30)[0]
        scores = {hit.id: hit.score for hit in alone}
        if how != "hybrid":
            assert [hit.score for hit in both[0]] == [scores[hit.id] for hit in both[0]]
    mixed = [("number 16", ()), ("number 16", check_where({"title": "Place 0"})), ("number 3", ())]
    found = search.search(mixed, search.encode([query for query, _ in mixed]), 3)
    assert [[len(hits) for hits in found], {hit.id for hit in found[1]}] == [[3, 2, 3], {"0", "1"}]
    monkey = Index(replace(index.manifest, facets_sha256=""), None, index.corpus)
    with pytest.raises(BadRequest, match="knows nothing to filter by; build it again"):
        monkey.rows_with(check_where({"title": "x"}))
    flip_a_byte(tmp_path / "index/facets.npy")
    with pytest.raises(RetrievalError, match=r"facets\.npy: sha256 is"):
        Index.open(tmp_path / "index")


class Reading:
    """Vectors that count how many of them are read."""

    def __init__(self, vectors: faiss.Index) -> None:
        self.vectors, self.read = vectors, 0

    def reconstruct_batch(self, rows: np.ndarray) -> np.ndarray:
        self.read += len(rows)
        return self.vectors.reconstruct_batch(rows)


@pytest.mark.parametrize("factory", ["Flat", "SQ8", "IVF4,Flat", "HNSW8"])
def test_what_a_filter_leaves_is_read_once_for_a_batch(
    factory: str, tmp_path: Path, index_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores in float32 find the candidates, among them all that it cannot tell apart; answers are those of float64."""
    monkeypatch.setattr("retrieval.index.ROUGH", 300)
    made = np.random.default_rng(0).standard_normal((3000, 8)).astype(np.float32)
    made[500:900] = made[0] + 1e-6 * made[500:900]
    index = by_hand(tmp_path, index_dir, made.tolist())
    vectors = faiss.index_factory(8, factory, faiss.METRIC_INNER_PRODUCT)
    vectors.train(made)
    vectors.add(made)
    if factory.startswith("IVF"):
        vectors.make_direct_map()
    stored, rows = vectors.reconstruct_n(0, 3000).astype(np.float64), np.arange(1, 3000, 3)
    queries = np.concatenate([made[:3], 5 * made[2000:2017]])
    exact = np.round(queries.astype(np.float64) @ stored[rows].T, SCORE_DECIMALS)
    for k in (1, 10, 100, 5000):
        reading = Reading(vectors)
        index = Index(index.manifest, reading, index.corpus)  # type: ignore[arg-type]
        ids, scores = index.search(queries, k, rows)
        best = np.argsort(-exact, axis=1, kind="stable")[:, :k]
        assert (ids == rows[best]).all() and (scores == np.take_along_axis(exact, best, 1)).all()
        assert reading.read < 2 * len(rows) or k > 10  # each of 20 queries read all
        for query in range(0, 20, 7):
            alone = index.search(queries[query : query + 1], k, rows)
            assert (alone[0][0] == ids[query]).all() and (alone[1][0] == scores[query]).all()


def test_a_filter_that_leaves_too_much_is_refused(
    index_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrieval.lexical.MOST_ROWS", 1)
    with pytest.raises(
        BadRequest, match="where: 2 passages are so, at most 1 may be; say more of them"
    ):
        Index.open(index_dir).rows_with(check_where({"title": ["Iron Bridge", "Hugo Brandt"]}))
    monkeypatch.setattr("retrieval.lexical.MOST_COUNTED", 1)
    monkeypatch.setattr(
        "retrieval.lexical.np.unique", None
    )  # nothing is put in order to be counted
    with pytest.raises(
        BadRequest, match="where: over 1 passages are so, at most 1 may be; say more of them"
    ):
        Index.open(index_dir).rows_with(check_where({"title": ["Iron Bridge", "Hugo Brandt"]}))


def test_words_need_no_vectors(tmp_path: Path, passages: list[Passage]) -> None:
    write_corpus(tmp_path / "corpus.jsonl", passages)
    manifest = build_index(tmp_path / "corpus.jsonl", tmp_path / "index", None)
    assert (manifest.encoder, manifest.dim, manifest.ntotal) == (None, 0, 5)
    assert sorted(path.name for path in (tmp_path / "index").glob("[!.]*")) == [
        "bm25",
        "facets.npy",
        "index.json",
    ]
    with RetrieverSidecar(tmp_path / "index", extra_args=("--ranking", "bm25")) as url:
        golden = [Golden("baker", frozenset({"4"}))]
        found = asyncio.run(probe(url, golden))
        assert (found["recall_at_1"], found["encoder"]) == (1.0, "none")

        async def ask() -> list[list[str]]:
            async with RetrievalClient(url) as client:
                hits = [
                    await client.search("baker", 2, {"title": title})
                    for title in ("Hugo Brandt", "no such")
                ]
                with pytest.raises(BadRequest, match="where"):
                    await client.search("baker", 2, {"title": 3})  # type: ignore[dict-item]
                return [[hit.id for hit in some] for some in hits]

        assert asyncio.run(ask()) == [["2"], []]
    with pytest.raises(
        RetrievalError, match="has words and no vectors; say --ranking bm25, or build it with them"
    ):
        RetrieverSidecar(tmp_path / "index").__enter__()
    with pytest.raises(RetrievalError, match="the index has words and no vectors"):
        Index.open(tmp_path / "index").search(np.empty((1, 0)), 1)
