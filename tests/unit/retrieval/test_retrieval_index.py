"""Indexes: exact ranking by hand, ties by id, and refusal of anything the manifest does not vouch for."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from retrieval.build import CHUNK, INDEX_TYPES, build_index, encode_shard, shard_rows
from retrieval.corpus import Passage, RetrievalError, write_corpus
from retrieval.encoder import ENCODERS, Encoder
from retrieval.index import Index, Searcher, read_manifest
from rollout.base import files
from rollout.base.files import sealed
from rollout.config.sections import RetrieverConfig
from tests.support.retrieval import CLOUD, by_hand, flip_a_byte
from tests.support.tiny_bert import write_bert


def test_ranking_by_hand(tmp_path: Path, index_dir: Path) -> None:
    index = by_hand(tmp_path, index_dir, [[0.6, 0.8], [1, 0], [0, 1], [1, 0]])
    ids, scores = index.search(np.array([[1, 0], [0, -1]]), 3)
    assert ids.tolist() == [[1, 3, 0], [1, 3, 0]]
    assert scores.tolist() == [[1.0, 1.0, 0.6], [0.0, 0.0, -0.8]]


def test_k_over_ntotal_gives_every_row_once_and_never_minus_one(
    tmp_path: Path, index_dir: Path
) -> None:
    index = by_hand(tmp_path, index_dir, [[0.6, 0.8], [1, 0]])
    ids, scores = index.search(np.array([[0, 1]]), 100)
    assert ids.tolist() == [[0, 1]]
    assert scores.tolist() == [[0.8, 0.0]]


def test_ties_wider_than_any_margin_go_by_id(tmp_path: Path, index_dir: Path) -> None:
    # 300 copies whose float32 noise would otherwise order them, and one better row at the end.
    noise = 1 + 1e-7 * np.random.default_rng(0).standard_normal(300)
    index = by_hand(tmp_path, index_dir, [[0.5 * n, 0.5] for n in noise] + [[0.9, 0.1]])
    for batch in (1, 40):  # FAISS takes another path from 20 queries on
        ids, scores = index.search(np.tile(np.array([[1.0, 0.0]]), (batch, 1)), 5)
        assert (ids == [300, 0, 1, 2, 3]).all()
        assert (scores == [0.9, 0.5, 0.5, 0.5, 0.5]).all()


def test_a_bad_query_vector_is_an_error(tmp_path: Path, index_dir: Path) -> None:
    index = by_hand(tmp_path, index_dir, [[0.6, 0.8]])
    with pytest.raises(RetrievalError, match="not finite"):
        index.search(np.array([[np.nan, 0]]), 1)
    with pytest.raises(RetrievalError, match=r"shape \(1, 3\), expected \[Q, 2\]"):
        index.search(np.zeros((1, 3)), 1)
    with pytest.raises(RetrievalError, match="k is 0"):
        index.search(np.zeros((1, 2)), 0)
    assert index.search(np.zeros((0, 2)), 4)[0].shape == (0, 1)


def test_names_find_their_passages(
    index_dir: Path, encoder: Encoder, passages: list[Passage]
) -> None:
    index = Index.open(index_dir, encoder=encoder.identity)
    found = Searcher(index, encoder)([passage.title for passage in passages], 2)
    assert [hits[0].id for hits in found] == ["0", "1", "2", "3", "4"]
    assert all(0.3 < hits[0].score <= 1.0 for hits in found if hits[0].score is not None)


def test_answers_are_identical_batched_and_alone(index_dir: Path, encoder: Encoder) -> None:
    index = Index.open(index_dir)
    queries = [
        f"the mayor of {a} {b}"
        for a in ("Amber", "Iron", "Silver", "Old")
        for b in ("Falls", "Bridge", "Hill")
    ]
    search = Searcher(index, encoder)
    together = search(queries * 2, 5)
    assert together[:12] == [search([query], 5)[0] for query in queries]
    assert [hits[:2] for hits in together] == search(queries * 2, 2)


def test_the_manifest_says_what_was_built(index_dir: Path, encoder: Encoder) -> None:
    manifest = read_manifest(index_dir)
    assert (manifest.ntotal, manifest.dim, manifest.corpus) == (5, 384, "../corpus.jsonl")
    assert manifest.encoder == encoder.identity


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(sealed({**json.loads(path.read_text()), **changes})))


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda d: flip_a_byte(d / "index/vectors.faiss"),
        r"vectors\.faiss: sha256 is .*, expected .*build the",
    ),
    (lambda d: (d / "index/vectors.faiss").unlink(), r"vectors\.faiss does not exist"),
    (
        lambda d: (d / "index/index.json").unlink(),
        r"index\.json does not exist: no index was finished",
    ),
    (lambda d: (d / "index/index.json").write_text("{"), r"index\.json is damaged"),
    (lambda d: (d / "index/index.json").write_text("[]"), r"index\.json is damaged"),
    (lambda d: flip_a_byte(d / "index/index.json"), r"index\.json is damaged"),
    (
        lambda d: edit(d / "index/index.json", ntotal="5"),
        r"damaged \(ntotal: Input should be a valid integer",
    ),
    (
        lambda d: edit(d / "index/index.json", extra=1),
        r"damaged \(extra: Unexpected keyword argument",
    ),
    (lambda d: edit(d / "index/index.json", format="flat/9"), r"format is 'flat/9', expected"),
    (
        lambda d: edit(d / "index/index.json", ntotal=6),
        r"corpus\.jsonl: number of lines is 5, expected 6",
    ),
    (lambda d: edit(d / "index/index.json", dim=383), r"dim is 383, expected 384"),
    (
        lambda d: append(d / "corpus.jsonl", '{"id": "5", "contents": "x"}'),
        "number of lines is 6, expected 5",
    ),
    (lambda d: flip_a_byte(d / "corpus.jsonl"), r"corpus\.jsonl: sha256 is"),
    (lambda d: (d / "corpus.jsonl").unlink(), r"corpus\.jsonl is missing or empty"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_damage_is_found(
    index_dir: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    shutil.copytree(index_dir.parent, tmp_path / "copy")
    assert Index.open(tmp_path / "copy/index").manifest.ntotal == 5
    damage(tmp_path / "copy")
    with pytest.raises(RetrievalError, match=message):
        Index.open(tmp_path / "copy/index")


def test_another_encoder_is_refused(index_dir: Path, encoder: Encoder) -> None:
    with pytest.raises(RetrievalError, match="query_prefix is 'query: ', expected ''"):
        Index.open(index_dir, encoder=replace(encoder.identity, query_prefix="query: "))


def test_an_unfinished_build_does_not_open(
    index_dir: Path, tmp_path: Path, encoder: Encoder
) -> None:
    shutil.copytree(index_dir.parent, tmp_path / "copy")
    corpus = tmp_path / "copy/corpus.jsonl"
    append(corpus, "not json")
    with pytest.raises(RetrievalError, match=r"corpus\.jsonl:6: not a JSON line"):
        build_index(corpus, tmp_path / "copy/index", encoder)
    with pytest.raises(RetrievalError, match="no index was finished"):
        Index.open(tmp_path / "copy/index")


def test_families_are_asked_as_their_authors_say(tmp_path: Path) -> None:
    write_bert(tmp_path / "bert", CLOUD, seed=3)
    bge = Encoder.of("bge", tmp_path / "bert").identity
    assert (bge.pooling, bge.passage_prefix) == ("cls", "")
    assert bge.query_prefix == "Represent this sentence for searching relevant passages: "
    assert get_args(RetrieverConfig.model_fields["encoder"].annotation) == tuple(ENCODERS)
    assert get_args(RetrieverConfig.model_fields["index"].annotation) == tuple(INDEX_TYPES)
    with pytest.raises(
        RetrievalError, match=r"encoder 'e5' has no folder; name one in retriever\.encoder"
    ):
        Encoder.of("e5")


def test_shards_are_cut_at_chunks() -> None:
    assert [shard_rows(5 * CHUNK + 1, number, 4) for number in range(4)] == [
        range(CHUNK),
        range(CHUNK, 3 * CHUNK),
        range(3 * CHUNK, 4 * CHUNK),
        range(4 * CHUNK, 5 * CHUNK + 1),
    ]
    assert [len(shard_rows(3, number, 3)) for number in range(3)] == [0, 0, 3]


def test_shards_go_on_where_they_stopped_and_make_the_same_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("retrieval.build.CHUNK", 8)
    write_bert(tmp_path / "bert", [*CLOUD, "query: passage:"], seed=3)
    encoder, corpus = Encoder.of("e5", tmp_path / "bert"), tmp_path / "corpus.jsonl"
    write_corpus(corpus, (Passage(id=str(row), contents=text) for row, text in enumerate(CLOUD)))
    whole = build_index(corpus, tmp_path / "whole", encoder)
    encoded, encode = list[int](), Encoder.encode_passages

    def killed(self: Encoder, texts: list[str]) -> np.ndarray:
        if len(encoded) == 2:
            raise KeyboardInterrupt
        encoded.append(len(texts))
        return encode(self, texts)

    shards = tmp_path / "parts/shards"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Encoder, "encode_passages", killed)
        encode_shard(corpus, shards, encoder, 1, 3)
    partial = shards / "0001-of-0003.partial"
    partial.write_bytes(partial.read_bytes() + b"half a vec")
    assert (
        encode_shard(corpus, shards, encoder, 1, 3).stat().st_size == 32 * 16 * 4
    )  # rows 32 to 63 of 100
    assert "shard 1 of 3: 32 of 32 passages (16 were there)" in capfd.readouterr().err
    assert build_index(corpus, tmp_path / "parts", encoder, shards=3) == whole
    assert sorted(path.suffix for path in shards.iterdir()) == [".f32"] * 3 + [".json"] * 3
    other = replace(encoder.identity, passage_prefix="")
    monkeypatch.setattr(encoder, "identity", other)
    assert encode_shard(corpus, shards, encoder, 0, 3).read_bytes() != b""
    assert json.loads((shards / "0000-of-0003.json").read_text())["encoder"]["passage_prefix"] == ""
    assert (
        "shard 0 of 3: 32 of 32 passages, " in capfd.readouterr().err
    )  # those of another prefix are not taken


def test_a_file_is_hashed_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, hashed = tmp_path / "x", list[Path]()
    file.write_bytes(b"abc")
    digest = (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180's example
    )
    real = files.sha256
    monkeypatch.setattr(files, "sha256", lambda *paths: hashed.extend(paths) or real(*paths))
    assert [files.known_sha256(file) for _ in range(3)] == [digest] * 3
    assert len(hashed) == 1
    assert files.known_sha256(file, again=True) == digest
    assert len(hashed) == 2
    status = file.stat()
    file.write_bytes(b"abd")
    os.utime(
        file, ns=(status.st_atime_ns, status.st_mtime_ns)
    )  # the old time and size, and yet another file
    assert files.known_sha256(file) != digest
    (tmp_path / ".x.sha256").write_text("[]")
    assert files.known_sha256(file) == hashlib.sha256(b"abd").hexdigest()
    other = tmp_path / "y"  # of an encoder in several files, say
    other.write_bytes(b"e")
    hashed.clear()
    assert [files.known_sha256(file, other) for _ in range(3)] == [
        hashlib.sha256(b"abde").hexdigest()
    ] * 3
    assert hashed == [file, other]
    other.write_bytes(b"f")
    assert files.known_sha256(file, other) == hashlib.sha256(b"abdf").hexdigest()
    hashed.clear()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    shared, write = tmp_path / "shared" / "model", files.write_json

    def written(path: Path, value: object) -> None:
        if path.parent == shared.parent:
            raise PermissionError(f"{path}: a folder of somebody else")
        write(path, value)

    monkeypatch.setattr(files, "write_json", written)
    shared.parent.mkdir()
    shared.write_bytes(b"abc")
    assert [files.known_sha256(shared) for _ in range(3)] == [digest] * 3
    assert (hashed, list(shared.parent.iterdir())) == ([shared], [shared])
