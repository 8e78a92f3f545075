"""Index of a run's passages: encoding in shards, building, and a probe of its server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_mas.config.run import RunConfig
from retrieval.corpus import Corpus
from retrieval.probe import GoldenQuery, probe, read_golden
from rollout.base.files import write_text
from rollout.base.json_files import read_json, write_json
from rollout.config.retriever import RetrieverConfig

if TYPE_CHECKING:
    from retrieval.encoder import Encoder

_MAX_PROBES = 50  # number of titles that a probe searches for without golden queries


def encode_passages(config_path: Path, passages: Path, out_dir: Path, number: int) -> None:
    """Encode one shard of a run's passages.

    Args:
        config_path: resolved config of the run.
        passages: file of all passages.
        out_dir: folder of the encoded shards.
        number: number of the shard, from 0 to `retriever.shards` - 1.

    Raises:
        RetrievalError: a line of the corpus is malformed, or the encoder's weights are not the
            pinned ones.
    """
    from retrieval.build import encode_shard

    retriever = _retriever_of(config_path)
    encode_shard(passages, out_dir, _load_encoder(retriever), number, retriever.shards)


def index_passages(config_path: Path, passages: Path, out_dir: Path) -> None:
    """Build the index of a run's passages; encode the shards that are not encoded yet.

    Args:
        config_path: resolved config of the run.
        passages: file of all passages.
        out_dir: folder of the index.

    Raises:
        RetrievalError: a line of the corpus is malformed, or the encoder's weights are not the
            pinned ones.
    """
    from retrieval.build import build_index

    retriever = _retriever_of(config_path)
    encoder = None if retriever.ranking == "bm25" else _load_encoder(retriever)
    manifest = build_index(
        passages,
        out_dir,
        encoder,
        retriever.index,
        shards=retriever.shards,
        words=retriever.ranking != "dense",
    )
    name = manifest.encoder.name if manifest.encoder else "none (words only)"
    print(f"{manifest.ntotal} passages, {manifest.dim} dimensions, encoder {name}")


def probe_index(config_path: Path, index_dir: Path, out: Path) -> None:
    """Measure recall and latency of a server on the index.

    The queries are those of `retriever.golden`, or else titles of passages from all parts of the
    corpus.

    Args:
        config_path: resolved config of the run.
        index_dir: folder of the index.
        out: JSON file of the measurements; an HTML page is written beside it.

    Raises:
        RetrievalError: the server cannot start, or its answers are invalid.
    """
    # This import loads torch, which the other functions do without until they encode.
    from mcore_mas.runtime.run_environments import make_sidecar

    retriever = _retriever_of(config_path)
    queries = read_golden(retriever.golden) if retriever.golden else _title_queries(index_dir)
    with make_sidecar(retriever, index_dir) as url:
        measurements = asyncio.run(probe(url, queries))
    recall = measurements["recall_at_1"]
    latency_ms = measurements["latency_ms_median"]
    print(f"recall@1 {recall:.2f}, median {latency_ms:.1f} ms")
    write_json(out, measurements)
    write_text(out.with_suffix(".html"), _page(measurements))


def _title_queries(index_dir: Path) -> list[GoldenQuery]:
    """Return queries for the titles of passages at equal distances in the corpus."""
    manifest = read_json(index_dir / "index.json")
    corpus = Corpus(index_dir / manifest["corpus"])
    stride = max(1, len(corpus) // _MAX_PROBES)
    rows = range(0, len(corpus), stride)[:_MAX_PROBES]
    return [GoldenQuery(corpus[row].title) for row in rows]


def _page(measurements: Mapping[str, Any]) -> str:
    """Return an HTML page with a table of the measurements."""
    rows = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(f'{value}')}</td></tr>"
        for key, value in measurements.items()
    )
    return f"<!doctype html><meta charset=utf-8><table>{rows}</table>\n"


def _load_encoder(retriever: RetrieverConfig) -> Encoder:
    import torch

    from retrieval.encoder import Encoder

    torch.set_num_threads(retriever.threads)
    return Encoder.of(retriever.encoder, retriever.encoder_folder).to(retriever.device)


def _retriever_of(config_path: Path) -> RetrieverConfig:
    config = RunConfig.load(config_path)
    assert config.retriever is not None, "only runs with a retriever have an index"
    return config.retriever
