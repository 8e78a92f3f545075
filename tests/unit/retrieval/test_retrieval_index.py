"""Search of an index: exact scores, ties by row, the same answer in any batch and for any k."""

from pathlib import Path

import faiss
import numpy as np
import pytest

from retrieval.build import build_index
from retrieval.corpus import Passage, RetrievalError, write_corpus
from retrieval.encoder import Encoder, minilm_folder
from retrieval.index import SCORE_DECIMALS, Index, check_canary
from tests.support.retrieval import SENTENCES, index_over, unit_vectors
from tests.support.tiny_bert import write_bert


def test_ranking_by_hand(tmp_path: Path, index_dir: Path) -> None:
    index = index_over(tmp_path, index_dir, [[0.6, 0.8], [1, 0], [0, 1], [1, 0]])
    rows, scores = index.search(np.array([[1, 0], [0, -1]]), 3)
    assert rows.tolist() == [[1, 3, 0], [1, 3, 0]]
    assert scores.tolist() == [[1.0, 1.0, 0.6], [0.0, 0.0, -0.8]]


def test_k_above_ntotal_gives_every_row_once(tmp_path: Path, index_dir: Path) -> None:
    index = index_over(tmp_path, index_dir, [[0.6, 0.8], [1, 0]])
    rows, scores = index.search(np.array([[0, 1]]), 100)
    assert rows.tolist() == [[0, 1]]
    assert scores.tolist() == [[0.8, 0.0]]


def test_more_ties_than_candidates_go_by_row(tmp_path: Path, index_dir: Path) -> None:
    # 300 rows whose float32 noise would otherwise order them, and one better row at the end.
    noise = 1 + 1e-7 * np.random.default_rng(0).standard_normal(300)
    index = index_over(tmp_path, index_dir, [[0.5 * n, 0.5] for n in noise] + [[0.9, 0.1]])
    for batch in (1, 40):  # FAISS takes another path from 20 queries on
        rows, scores = index.search(np.tile(np.array([[1.0, 0.0]]), (batch, 1)), 5)
        assert (rows == [300, 0, 1, 2, 3]).all()
        assert (scores == [0.9, 0.5, 0.5, 0.5, 0.5]).all()


def test_a_bad_query_vector_is_an_error(tmp_path: Path, index_dir: Path) -> None:
    index = index_over(tmp_path, index_dir, [[0.6, 0.8]])
    with pytest.raises(RetrievalError, match="not finite"):
        index.search(np.array([[np.nan, 0]]), 1)
    with pytest.raises(RetrievalError, match=r"shape \(1, 3\), expected \[Q, 2\]"):
        index.search(np.zeros((1, 3)), 1)
    with pytest.raises(RetrievalError, match="k is 0"):
        index.search(np.zeros((1, 2)), 0)
    assert index.search(np.zeros((0, 2)), 4)[0].shape == (0, 1)


@pytest.mark.parametrize(
    ("kind", "type_name", "recall", "tolerance"),
    [
        ("flat", "IndexFlatIP", 1.0, 1e-4),
        ("sq8", "IndexScalarQuantizer", 0.95, 2e-2),
        ("ivf", "IndexIVFFlat", 1.0, 1e-4),  # all of its two cells are searched
        ("hnsw", "IndexHNSWFlat", 0.95, 1e-4),
    ],
)
def test_every_kind_of_index_finds_the_nearest(
    kind: str, type_name: str, recall: float, tolerance: float, tmp_path: Path
) -> None:
    """Compare with recall@5 of 20 queries against products of all vectors in float64."""
    write_bert(tmp_path / "bert", [*SENTENCES, "query: passage:"], seed=3)
    encoder = Encoder.of("e5", tmp_path / "bert")
    corpus = tmp_path / "corpus.jsonl"
    write_corpus(corpus, (Passage(str(row), text) for row, text in enumerate(SENTENCES)))
    build_index(corpus, tmp_path / kind, encoder, kind)
    assert type(faiss.read_index(str(tmp_path / kind / "vectors.faiss"))).__name__ == type_name

    index = Index.open(tmp_path / kind, encoder=encoder.identity)
    check_canary(index, encoder)
    queries = encoder.encode_queries(SENTENCES[::5])
    rows, scores = index.search(queries, 5)
    passages = encoder.encode_passages(SENTENCES).astype(np.float64)
    exact = np.round(queries.astype(np.float64) @ passages.T, SCORE_DECIMALS)
    nearest = np.argsort(-exact, axis=1, kind="stable")[:, :5]
    recalls = [len(set(a) & set(b)) / 5 for a, b in zip(rows, nearest, strict=True)]
    assert np.mean(recalls) >= recall
    assert np.abs(scores - np.take_along_axis(exact, rows, 1)).max() < tolerance
    # However few an approximate search finds at first, k passages are returned.
    assert index.search(queries[:1], 100)[0].shape == (1, 100)


@pytest.mark.parametrize("factory", ["IVF64,Flat", "HNSW32"])
def test_a_smaller_k_gives_a_prefix_also_in_an_approximate_index(
    factory: str, tmp_path: Path, index_dir: Path
) -> None:
    """Forty rows hold the same vector; which of them a query gets does not depend on its batch."""
    vectors = unit_vectors(2560, 8)
    vectors[::64] = vectors[0]
    flat = index_over(tmp_path, index_dir, vectors)
    approximate = faiss.index_factory(8, factory, faiss.METRIC_INNER_PRODUCT)
    approximate.train(vectors)
    approximate.add(vectors)
    if factory.startswith("IVF"):
        approximate.make_direct_map()
    index = Index(flat.manifest, approximate, flat.corpus)
    most_rows, most_scores = index.search(vectors[:20], 100)
    for k in (1, 3, 10):
        rows, scores = index.search(vectors[:20], k)
        assert (rows == most_rows[:, :k]).all()
        assert (scores == most_scores[:, :k]).all()
    assert index.search(vectors[:1], 3)[0].tolist() == [[0, 64, 128]]


def test_passages_that_a_graph_does_not_reach_are_found(tmp_path: Path, index_dir: Path) -> None:
    vectors = np.eye(8, dtype=np.float32)
    flat = index_over(tmp_path, index_dir, vectors)
    graph = faiss.IndexHNSWFlat(8, 4, faiss.METRIC_INNER_PRODUCT)
    graph.add(vectors)
    no_neighbours = faiss.vector_to_array(graph.hnsw.neighbors) * 0 - 1
    faiss.copy_array_to_vector(no_neighbours, graph.hnsw.neighbors)
    assert (graph.search(vectors[7:], 8)[1] >= 0).sum() == 1
    rows, scores = Index(flat.manifest, graph, flat.corpus).search(vectors[7:], 3)
    assert (rows.tolist(), scores.tolist()) == ([[7, 0, 1]], [[1.0, 0.0, 0.0]])


def test_the_canary_finds_an_index_of_other_vectors(index_dir: Path) -> None:
    other = Encoder(minilm_folder(), name="x", pooling="cls")
    with pytest.raises(RetrievalError, match=r"canary: row 0 .* built with another encoder"):
        check_canary(Index.open(index_dir), other)
