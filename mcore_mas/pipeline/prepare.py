"""Data preparation of a run: tasks, passages, the search index, and a probe of its server."""

from __future__ import annotations

import asyncio
import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_mas.config.run import RunConfig
from retrieval.corpus import Corpus, copy_corpus, write_corpus
from retrieval.probe import GoldenQuery, probe, read_golden
from rollout.base.files import write_text
from rollout.base.json_files import write_json
from rollout.base.lookup import lookup
from rollout.config.retriever import RetrieverConfig
from rollout.config.tasks import make_tasks
from rollout.records.files import write_tasks
from rollout.tasks import GENERATORS
from rollout.tasks.encyclopedia import passages as encyclopedia_passages
from rollout.tasks.tiny_files import write_tiny_file

if TYPE_CHECKING:
    from retrieval.encoder import Encoder

TINY_PASSAGES = 80  # passages at the scale `tiny`
PROBES = 50  # titles that a probe searches for


def prepare_tasks(config_path: Path, out_dir: Path) -> None:
    """Write the tasks of each split to `out_dir`/{split}.parquet, and their passages.

    Passages go to `out_dir`/passages.jsonl, if the retriever or the generator has any.

    Raises:
        RecordError: a configured file of tasks cannot be read.
        ValueError: the generator cannot make so many different tasks.
    """
    config = RunConfig.load(config_path)
    for split, tasks in make_tasks(config.data, config.seed).items():
        write_tasks(out_dir / f"{split}.parquet", tasks)
    if config.retriever is not None and config.retriever.passages is not None:
        copy_corpus(config.retriever.passages, out_dir / "passages.jsonl")
        return
    if config.data.generator is None:
        return
    generator = lookup("task generator", config.data.generator, GENERATORS)
    if generator.passages is not None:
        write_corpus(out_dir / "passages.jsonl", generator.passages(config.seed))


def make_tiny_file(path: Path, format: str) -> None:
    """Write a small file in place of a published one, for the scale `tiny`.

    Args:
        path: of the file.
        format: of its rows, or "passages".
    """
    if format != "passages":
        write_tiny_file(path, format)
        return
    write_corpus(path, encyclopedia_passages(1)[:TINY_PASSAGES])


def encode_passages(config_path: Path, passages: Path, out_dir: Path, number: int) -> None:
    """Encode shard `number` of the run's `retriever.shards` into `out_dir`.

    Raises:
        RetrievalError: a line of the corpus is malformed, or the encoder's weights are not the pinned ones.
    """
    from retrieval.build import encode_shard

    retriever = _retriever(config_path)
    encode_shard(passages, out_dir, _encoder(retriever), number, retriever.shards)


def index_passages(config_path: Path, passages: Path, out_dir: Path) -> None:
    """Make an index of `passages` in the folder `out_dir`; shards that are not encoded yet are so first.

    Raises:
        RetrievalError: a line of the corpus is malformed, or the encoder's weights are not the pinned ones.
    """
    from retrieval.build import build_index

    retriever = _retriever(config_path)
    manifest = build_index(
        passages,
        out_dir,
        None if retriever.ranking == "bm25" else _encoder(retriever),
        retriever.index,
        shards=retriever.shards,
        words=retriever.ranking != "dense",
    )
    name = manifest.encoder.name if manifest.encoder else "none: words alone"
    print(f"{manifest.ntotal} passages, {manifest.dim} dimensions, encoder {name}")


def _encoder(retriever: RetrieverConfig) -> Encoder:
    import torch

    from retrieval.encoder import Encoder

    torch.set_num_threads(retriever.threads)
    return Encoder.of(retriever.encoder, retriever.encoder_folder).to(retriever.device)


def probe_index(config_path: Path, index_dir: Path, out: Path) -> None:
    """Start a server on the index, ask it the golden queries, and write what came of it to `out`.

    Without `retriever.golden` they are the titles of passages spread over the corpus.

    Raises:
        RetrievalError: the server cannot start, or gives no usable answer.
    """
    # This loads torch, which tasks are prepared without.
    from mcore_mas.runtime.run_environments import make_sidecar

    retriever = _retriever(config_path)
    if retriever.golden is not None:
        golden = read_golden(retriever.golden)
    else:
        corpus = Corpus(
            index_dir / json.loads((index_dir / "index.json").read_text(encoding="utf-8"))["corpus"]
        )
        stride = max(1, len(corpus) // PROBES)
        golden = [GoldenQuery(corpus[row].title) for row in range(0, len(corpus), stride)][:PROBES]
    with make_sidecar(retriever, index_dir) as url:
        measurements = asyncio.run(probe(url, golden))
    print(
        f"recall@1 {measurements['recall_at_1']:.2f}, median {measurements['latency_ms_median']:.1f} ms"
    )
    write_json(out, measurements)
    rows = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(f'{value}')}</td></tr>"
        for key, value in measurements.items()
    )
    write_text(
        out.with_suffix(".html"), f"<!doctype html><meta charset=utf-8><table>{rows}</table>\n"
    )


def _retriever(config_path: Path) -> RetrieverConfig:
    config = RunConfig.load(config_path)
    assert config.retriever is not None, "only runs with a retriever have an index"
    return config.retriever
