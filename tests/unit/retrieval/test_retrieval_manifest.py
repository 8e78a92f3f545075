"""Manifests: whatever differs from them is refused in one line."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from retrieval.build import build_index
from retrieval.corpus import RetrievalError
from retrieval.encoder import Encoder
from retrieval.index import Index
from retrieval.manifest import read_manifest
from tests.support.retrieval import flip_a_byte


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def edit(path: Path, **changes: object) -> None:
    """Change values of a manifest, and the digest of its values with them."""
    values = {**json.loads(path.read_text()), **changes}
    del values["sha256"]
    sha256 = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**values, "sha256": sha256}))


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


def test_the_manifest_describes_the_index(index_dir: Path, encoder: Encoder) -> None:
    manifest = read_manifest(index_dir)
    assert (manifest.ntotal, manifest.dim, manifest.corpus) == (5, 384, "../corpus.jsonl")
    assert manifest.encoder == encoder.identity


def test_an_index_of_version_0_1_0_with_filters_opens(index_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(index_dir.parent, tmp_path / "copy")
    edit(tmp_path / "copy/index/index.json", facets_sha256="ab")
    assert Index.open(tmp_path / "copy/index").manifest == read_manifest(index_dir)


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
