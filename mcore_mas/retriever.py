"""A run's own search engine: its index, and a proof that a server answers from it."""

from __future__ import annotations

from pathlib import Path

from mcore_mas.config import RetrieverConfig, RunConfig
from mcore_mas.files import write_json
from retrieval.client import RetrieverSidecar, probe
from retrieval.corpus import Corpus

PROBES = 50  # passages that are asked for by their titles


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
    manifest = build_index(passages, out_dir, Encoder.minilm())
    print(f"{manifest.ntotal} passages, {manifest.dim} dimensions, encoder {manifest.encoder.name}")


def probe_index(config_path: Path, passages: Path, index_dir: Path, out: Path) -> None:
    """Start a server on the index, ask it for passages spread over the corpus, and write what came of it to `out`.

    Raises:
        RetrievalError: the server cannot start, or gives no usable answer.
    """
    corpus = Corpus(passages)
    stride = max(1, len(corpus) // PROBES)
    sample = [corpus[row] for row in range(0, len(corpus), stride)][:PROBES]
    with RetrieverSidecar(index_dir, threads=_retriever(config_path).threads) as url:
        found = probe(url, sample)
    print(f"recall@1 {found['recall_at_1']:.2f}, median {found['latency_ms_median']:.1f} ms")
    write_json(out, found)


def _retriever(config_path: Path) -> RetrieverConfig:
    config = RunConfig.load(config_path)
    assert config.retriever is not None, "only runs with a retriever have an index"
    return config.retriever
