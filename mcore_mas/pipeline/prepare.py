"""Data preparation: tasks, passages and the search index of a run on disk, and a check that its server answers."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path

from mcore_mas.config.run import RunConfig
from retrieval.corpus import Corpus, Passage, write_corpus
from retrieval.sidecar import RetrieverSidecar, probe
from rollout.base.files import write_json
from rollout.base.options import lookup
from rollout.config.data import make_tasks
from rollout.config.sections import RetrieverConfig
from rollout.records.files import write_tasks
from rollout.tasks import GENERATORS
from rollout.tasks.encyclopedia import passages as encyclopedia_passages
from rollout.tasks.tiny_files import write_tiny_file

TINY_PASSAGES = 80  # of the scale `tiny`
PROBES = 50  # passages that are asked for by their titles


def prepare_tasks(config_path: Path, out_dir: Path) -> None:
    """Write `out_dir`/{train,validation,test}.parquet, and passages.jsonl where the tasks have passages.

    Raises:
        RecordError: a configured file of tasks cannot be read.
        ValueError: the generator cannot make so many different tasks.
    """
    config = RunConfig.load(config_path)
    for split, tasks in make_tasks(config.data, config.seed).items():
        write_tasks(out_dir / f"{split}.parquet", tasks)
    if config.retriever is not None and config.retriever.passages is not None:
        shutil.copyfile(config.retriever.passages, out_dir / "passages.jsonl")
        return
    if config.data.generator is None:
        return
    generator = lookup("task generator", config.data.generator, GENERATORS)
    if generator.passages is not None:
        entries = enumerate(generator.passages(config.seed))
        write_corpus(out_dir / "passages.jsonl", (Passage.compose(str(i), e.title, e.text) for i, e in entries))


def make_tiny_file(path: Path, format: str) -> None:
    """Write what the scale `tiny` reads in place of a published file: rows of `format`, or "passages"."""
    if format != "passages":
        write_tiny_file(path, format)
        return
    entries = enumerate(islice(encyclopedia_passages(1), TINY_PASSAGES))
    write_corpus(path, (Passage.compose(str(i), e.title, e.text) for i, e in entries))


def index_passages(config_path: Path, passages: Path, out_dir: Path) -> None:
    """Encode `passages` with the run's encoder into the index folder `out_dir`.

    Raises:
        RetrievalError: a line of the corpus is malformed, or the encoder's weights are not the pinned ones.
    """
    import torch

    from retrieval.encoder import Encoder
    from retrieval.index import build_index

    retriever = _retriever(config_path)
    torch.set_num_threads(retriever.threads)
    encoder = Encoder.of(retriever.encoder, retriever.encoder_folder)
    manifest = build_index(passages, out_dir, encoder, retriever.index)
    print(f"{manifest.ntotal} passages, {manifest.dim} dimensions, encoder {manifest.encoder.name}")


def probe_index(config_path: Path, index_dir: Path, out: Path) -> None:
    """Start a server on the index, ask it for passages spread over the corpus, and write what came of it to `out`.

    Raises:
        RetrievalError: the server cannot start, or gives no usable answer.
    """
    retriever = _retriever(config_path)
    corpus = Corpus(index_dir / json.loads((index_dir / "index.json").read_text(encoding="utf-8"))["corpus"])
    stride = max(1, len(corpus) // PROBES)
    sample = [corpus[row] for row in range(0, len(corpus), stride)][:PROBES]
    with RetrieverSidecar(index_dir, threads=retriever.threads, encoder_folder=retriever.encoder_folder) as url:
        found = probe(url, sample)
    print(f"recall@1 {found['recall_at_1']:.2f}, median {found['latency_ms_median']:.1f} ms")
    write_json(out, found)


def _retriever(config_path: Path) -> RetrieverConfig:
    config = RunConfig.load(config_path)
    assert config.retriever is not None, "only runs with a retriever have an index"
    return config.retriever
