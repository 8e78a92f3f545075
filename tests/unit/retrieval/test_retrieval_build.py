"""Index building: shards, kinds of index, families of encoders."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import faiss
import numpy as np
import pytest

from retrieval.build import CHUNK_ROWS, INDEX_TYPES, build_index, encode_shard, shard_rows
from retrieval.corpus import Passage, write_corpus
from retrieval.encoder import ENCODERS, Encoder
from rollout.config.retriever import RetrieverConfig
from tests.support.retrieval import SENTENCES, unit_vectors
from tests.support.tiny_bert import write_bert


def test_the_config_offers_all_kinds_and_families() -> None:
    assert get_args(RetrieverConfig.model_fields["index"].annotation) == tuple(INDEX_TYPES)
    assert get_args(RetrieverConfig.model_fields["encoder"].annotation) == tuple(ENCODERS)


def test_shards_are_cut_at_chunks() -> None:
    assert [shard_rows(5 * CHUNK_ROWS + 1, number, 4) for number in range(4)] == [
        range(CHUNK_ROWS),
        range(CHUNK_ROWS, 3 * CHUNK_ROWS),
        range(3 * CHUNK_ROWS, 4 * CHUNK_ROWS),
        range(4 * CHUNK_ROWS, 5 * CHUNK_ROWS + 1),
    ]
    assert [len(shard_rows(3, number, 3)) for number in range(3)] == [0, 0, 3]


def test_shards_continue_an_attempt_and_give_the_same_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("retrieval.build.CHUNK_ROWS", 8)
    write_bert(tmp_path / "bert", [*SENTENCES, "query: passage:"], seed=3)
    encoder = Encoder.of("e5", tmp_path / "bert")
    corpus = tmp_path / "corpus.jsonl"
    write_corpus(corpus, (Passage(str(row), text) for row, text in enumerate(SENTENCES)))
    whole = build_index(corpus, tmp_path / "whole", encoder)

    calls: list[int] = []
    encode_passages = Encoder.encode_passages

    def interrupt_third_call(self: Encoder, texts: list[str]) -> np.ndarray:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(len(texts))
        return encode_passages(self, texts)

    shards = tmp_path / "parts/shards"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Encoder, "encode_passages", interrupt_third_call)
        encode_shard(corpus, shards, encoder, 1, 3)
    partial = shards / "0001-of-0003.partial"
    partial.write_bytes(partial.read_bytes() + b"half a vector")
    path = encode_shard(corpus, shards, encoder, 1, 3)
    assert path.stat().st_size == 32 * 16 * 4  # rows 32 to 63 of 100
    assert "shard 1 of 3: 32 of 32 passages (16 of an earlier attempt)" in capfd.readouterr().out
    assert build_index(corpus, tmp_path / "parts", encoder, shards=3) == whole
    assert sorted(file.suffix for file in shards.iterdir()) == [".f32"] * 3 + [".json"] * 3


def test_shards_of_another_encoder_are_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_bert(tmp_path / "bert", [*SENTENCES, "query: passage:"], seed=3)
    encoder = Encoder.of("e5", tmp_path / "bert")
    corpus = tmp_path / "corpus.jsonl"
    write_corpus(corpus, (Passage(str(row), text) for row, text in enumerate(SENTENCES)))
    encode_shard(corpus, tmp_path / "shards", encoder)
    capfd.readouterr()

    monkeypatch.setattr(encoder, "identity", replace(encoder.identity, passage_prefix=""))
    encode_shard(corpus, tmp_path / "shards", encoder)
    inputs = json.loads((tmp_path / "shards/0000-of-0001.json").read_text())
    assert inputs["encoder"]["passage_prefix"] == ""
    assert "shard 0 of 1: 100 of 100 passages, " in capfd.readouterr().out


def test_codes_of_a_byte_for_eight_dimensions_find_what_is_near() -> None:
    ivfpq = INDEX_TYPES["ivfpq"]
    assert ivfpq.factory(21_015_324, 768) == "IVF2564,PQ96x8np"  # cells of 39 in 100,000 passages
    assert ivfpq.factory(100, 16) == "IVF2,PQ2x1np"  # and as many codes as 100 passages teach
    vectors = unit_vectors(3000, 64)
    index = faiss.index_factory(64, ivfpq.factory(3000, 64), faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    index.nprobe = 32
    noise = np.random.default_rng(1).standard_normal((200, 64)).astype(np.float32)
    _, rows = index.search(vectors[:200] + 0.3 / 8 * noise, 10)
    assert np.mean([row in neighbours for row, neighbours in enumerate(rows)]) > 0.9
