"""Ranking by vectors, by words, and by both."""

import re
import shutil
from pathlib import Path

import bm25s
import numpy as np
import pytest
from bm25s.stopwords import STOPWORDS_EN

from retrieval.bm25 import BM25Index
from retrieval.build import build_index
from retrieval.corpus import Corpus, Passage, RetrievalError, write_corpus
from retrieval.encoder import Encoder
from retrieval.index import Index
from retrieval.searcher import Searcher, fuse_rankings
from tests.support.retrieval import SENTENCES


@pytest.fixture(scope="module")
def index_with_words(
    tmp_path_factory: pytest.TempPathFactory, passages: list[Passage], encoder: Encoder
) -> Path:
    folder = tmp_path_factory.mktemp("words")
    write_corpus(folder / "corpus.jsonl", passages)
    build_index(folder / "corpus.jsonl", folder / "index", encoder, words=True)
    return folder / "index"


def test_names_find_their_passages(
    index_dir: Path, encoder: Encoder, passages: list[Passage]
) -> None:
    index = Index.open(index_dir, encoder=encoder.identity)
    results = Searcher(index, encoder)([passage.title for passage in passages], 2)
    assert [hits[0].id for hits in results] == ["0", "1", "2", "3", "4"]
    assert all(0.3 < hits[0].score <= 1.0 for hits in results if hits[0].score is not None)


def test_answers_are_identical_batched_and_alone(index_dir: Path, encoder: Encoder) -> None:
    index = Index.open(index_dir)
    queries = [
        f"the mayor of {first} {second}"
        for first in ("Amber", "Iron", "Silver", "Old")
        for second in ("Falls", "Bridge", "Hill")
    ]
    search = Searcher(index, encoder)
    together = search(queries * 2, 5)
    assert together[:12] == [search([query], 5)[0] for query in queries]
    assert [hits[:2] for hits in together] == search(queries * 2, 2)


def test_bm25_by_hand(index_with_words: Path, passages: list[Passage]) -> None:
    words = Index.open(index_with_words).bm25
    assert words is not None
    # The word is in one of five passages, so idf = ln(1 + 4.5 / 1.5) = ln 4; its score there is
    # idf / (1 + 1.5 (0.25 + 0.75 length / mean length)).
    lengths = []
    for passage in passages:
        all_words = re.findall(r"(?u)\b\w\w+\b", passage.contents.lower())
        lengths.append(sum(word not in STOPWORDS_EN for word in all_words))
    expected = np.log(4) / (1 + 1.5 * (0.25 + 0.75 * lengths[4] / np.mean(lengths)))
    rows, scores = words.search("a baker", 3)
    assert (rows.tolist(), scores.tolist()) == ([4, 0, 1], pytest.approx([expected, 0, 0]))
    assert words.search("zzz", 9)[0].tolist() == [0, 1, 2, 3, 4]
    assert words.search("the", 2)[0].tolist() == [0, 1]  # a stop word


def test_bm25_scores_are_those_of_bm25s(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c.jsonl", (Passage(str(n), text) for n, text in enumerate(SENTENCES)))
    BM25Index.build(Corpus(tmp_path / "c.jsonl"), tmp_path)
    words = BM25Index(tmp_path)
    reference = bm25s.BM25()
    reference.index(bm25s.tokenize(SENTENCES, show_progress=False), show_progress=False)
    for query in ("the mayor of Amber", "a long grey bridge", "Silver"):
        tokens = bm25s.tokenize([query], show_progress=False)
        expected_rows, expected_scores = reference.retrieve(tokens, k=10, show_progress=False)
        rows, scores = words.search(query, 10)
        assert scores.tolist() == expected_scores[0].tolist()
        # bm25s leaves the order of equal scores open.
        above_ties = scores > scores[-1]
        assert set(rows[above_ties]) == set(expected_rows[0][above_ties])


def test_rankings_are_fused_by_hand() -> None:
    rows, scores = fuse_rankings(np.array([3, 1]), np.array([1, 0]))
    assert rows.tolist() == [1, 3, 0]
    assert scores.tolist() == [1 / 62 + 1 / 61, 1 / 61, 1 / 62]


def test_hybrid_fuses_both_rankings(index_with_words: Path, encoder: Encoder) -> None:
    index = Index.open(index_with_words, encoder=encoder.identity)
    queries = ["the baker", "weaver"]
    (by_words, _) = Searcher(index, encoder, "bm25")(queries, 2)
    assert [hit.id for hit in by_words] == ["4", "0"]
    dense = Searcher(index, encoder, "dense")(queries, 5)
    hybrid = Searcher(index, encoder, "hybrid")(queries, 5)
    assert [hits[0].id for hits in hybrid] == ["4", "0"]
    dense_rank = [hit.id for hit in dense[0]].index("4") + 1
    assert hybrid[0][0].score == 1 / (60 + dense_rank) + 1 / (60 + 1)


def test_changed_words_are_refused(index_with_words: Path, tmp_path: Path) -> None:
    shutil.copytree(index_with_words.parent, tmp_path / "copy")
    (tmp_path / "copy/index/bm25/vocab.index.json").write_text("{}")
    with pytest.raises(RetrievalError, match=r"bm25: sha256 is"):
        Index.open(tmp_path / "copy/index")


def test_an_index_without_words_ranks_by_vectors_alone(index_dir: Path, encoder: Encoder) -> None:
    searcher = Searcher(Index.open(index_dir), encoder, "hybrid")
    message = r"no words to rank by; build it with retriever\.ranking=hybrid"
    with pytest.raises(RetrievalError, match=message):
        searcher(["baker"], 1)


def test_an_index_of_words_alone_ranks_by_words_alone(
    tmp_path: Path, passages: list[Passage]
) -> None:
    write_corpus(tmp_path / "corpus.jsonl", passages)
    manifest = build_index(tmp_path / "corpus.jsonl", tmp_path / "index", None)
    assert (manifest.encoder, manifest.dim, manifest.ntotal) == (None, 0, 5)
    names = sorted(path.name for path in (tmp_path / "index").glob("[!.]*"))
    assert names == ["bm25", "index.json"]
    index = Index.open(tmp_path / "index")
    assert Searcher(index, None, "bm25")(["baker"], 1)[0][0].id == "4"
    with pytest.raises(RetrievalError, match="has words and no vectors; set --ranking bm25, or"):
        index.search(np.empty((1, 0)), 1)
