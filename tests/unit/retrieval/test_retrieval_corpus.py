"""Corpora: their format, passages by id, and errors that name file and line."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from retrieval import corpus as corpus_module
from retrieval.corpus import Corpus, Passage, RetrievalError, copy_corpus, write_corpus


def test_a_passage_is_a_quoted_title_then_its_text() -> None:
    passage = Passage.compose("7", "Amber Falls", "On the Tessel.\nOld.")
    assert passage.contents == '"Amber Falls"\nOn the Tessel.\nOld.'
    assert (passage.title, passage.text) == ("Amber Falls", "On the Tessel.\nOld.")
    assert Passage("8", "Bare title\ntext").title == "Bare title"


def test_rows_come_back_in_order_and_by_number(tmp_path: Path, passages: list[Passage]) -> None:
    path = tmp_path / "corpus.jsonl"
    assert write_corpus(path, passages) == 5
    corpus = Corpus(path)
    assert len(corpus) == 5
    assert list(corpus) == passages
    assert corpus[2].title == "Hugo Brandt"
    with pytest.raises(IndexError):
        corpus[-1]


def test_the_file_is_search_r1s_format(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c.jsonl", [Passage.compose("0", "Zoë", "text")])
    assert (tmp_path / "c.jsonl").read_text() == '{"id": "0", "contents": "\\"Zoë\\"\\ntext"}\n'


def test_a_last_line_without_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": "0", "contents": "a"}\n{"id": "1", "contents": "b"}')
    assert [passage.contents for passage in Corpus(path)] == ["a", "b"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"id": 1, "contents": "x"}',
        '{"id": "1"}',
        '{"id": "1", "contents": ""}',
        "",
        "[" * 100_000,
        '{"id": "1", "contents": "\\ud800"}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"id": "0", "contents": "x"}) + "\n" + line + "\n")
    with pytest.raises(RetrievalError, match=r"c\.jsonl:2: "):
        list(Corpus(path))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, passages: list[Passage]) -> None:
    path = tmp_path / "c.jsonl"
    write_corpus(path, passages)
    before = path.read_bytes()
    with pytest.raises(RetrievalError, match=r"c\.jsonl:2: 'contents'"):
        write_corpus(path, [passages[0], Passage("1", "")])
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["c.jsonl"]


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="no passages"):
        write_corpus(tmp_path / "c.jsonl", [])
    with pytest.raises(RetrievalError, match="missing or empty"):
        Corpus(tmp_path / "c.jsonl")


def test_parquet_becomes_lines(tmp_path: Path, passages: list[Passage]) -> None:
    rows = [
        {"id": int(passage.id), "contents": passage.contents, "more": 1.5} for passage in passages
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert copy_corpus(tmp_path / "a.parquet", tmp_path / "a.jsonl") == 5
    assert list(Corpus(tmp_path / "a.jsonl")) == passages
    assert copy_corpus(tmp_path / "a.jsonl", tmp_path / "b.jsonl") == 5
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "x"}]), tmp_path / "c.parquet")
    with pytest.raises(RetrievalError, match=r"c\.parquet: no column id or contents; found text"):
        copy_corpus(tmp_path / "c.parquet", tmp_path / "c.jsonl")


@pytest.mark.parametrize("prefix", ["", "x"])  # ids that are row numbers, and others
def test_neighbours_are_of_the_same_document(tmp_path: Path, prefix: str) -> None:
    titles = ["A", "A", "A", "B", "A"]
    path = tmp_path / "c.jsonl"
    write_corpus(
        path,
        (Passage.compose(f"{prefix}{n}", title, f"t{n}") for n, title in enumerate(titles)),
    )
    corpus = Corpus(path)

    def texts(id: int, count: int) -> list[str]:
        return [passage.text for passage in corpus.around(f"{prefix}{id}", count)]

    assert texts(1, 0) == ["t1"]
    assert texts(1, 5) == ["t0", "t1", "t2"]
    assert texts(2, 1) == ["t1", "t2"]
    assert texts(3, 2) == ["t3"]
    assert texts(5, 1) == []
    assert corpus.row_of("y1") is None


def test_numbers_that_are_ids_of_other_rows_are_found(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    write_corpus(path, (Passage(id, f"passage {id}") for id in ("0", "2", "1", "3")))
    assert [Corpus(path).row_of(id) for id in ("0", "1", "2", "3", "4")] == [0, 2, 1, 3, None]


def test_the_table_of_ids_is_made_once_for_all_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "c.jsonl", (Passage(f"x{n % 40}", f"row {n}") for n in range(50)))
    corpus = Corpus(tmp_path / "c.jsonl")
    read_rows: list[int] = []
    get = Corpus.__getitem__

    def record_and_get(corpus: Corpus, row: int) -> Passage:
        read_rows.append(row)
        return get(corpus, row)

    monkeypatch.setattr(Corpus, "__getitem__", record_and_get)
    with ThreadPoolExecutor(8) as threads:
        rows = list(threads.map(corpus.row_of, [f"x{n}" for n in range(41)]))
    assert rows == [*range(40), None]
    # Each row once for the table, the first row before, and each row that is found.
    assert len(read_rows) == 50 + 1 + 40


def test_a_passage_in_parquet_that_is_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "MAX_LINE_BYTES", 100)
    rows = [{"id": "0", "contents": "short"}, {"id": "1", "contents": "x" * 101}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(RetrievalError, match=r"a\.parquet: row 2 has 101 bytes; expected at most"):
        copy_corpus(tmp_path / "a.parquet", tmp_path / "a.jsonl")


def test_rows_of_a_large_corpus_are_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "CACHED_FROM_BYTES", 100)
    path = tmp_path / "c.jsonl"
    cache = tmp_path / ".c.jsonl.rows"
    write_corpus(path, (Passage(id=str(n), contents=f"row {n} {'x' * n}") for n in range(50)))
    expected = list(Corpus(path))
    assert np.fromfile(cache, np.int64)[4] == 0
    assert np.fromfile(cache, np.int64)[-1] == path.stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "array", None)  # which collects offsets that are not cached
        assert list(Corpus(path)) == expected
    for damage in (b"", b"\0" * 8, cache.read_bytes()[:-8], cache.read_bytes()[:-3]):
        cache.write_bytes(damage)
        assert list(Corpus(path)) == expected
    path.write_bytes(path.read_bytes()[:-30])  # truncates the last line
    assert len(Corpus(path)) == 50
    with pytest.raises(RetrievalError, match=r"c\.jsonl:50: not a JSON line"):
        Corpus(path)[49]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:40]))
    assert len(Corpus(path)) == 40
