"""Search on GPUs gives the answers of the CPU; shards in fp16 stand for the GPUs of FAISS."""

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from retrieval.corpus import RetrievalError
from retrieval.gpu import GpuFlatIndex
from retrieval.index import Index
from tests.support.retrieval import index_over, unit_vectors


def test_faiss_for_cpus_and_a_machine_without_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(faiss, "GpuMultipleClonerOptions", raising=False)
    with pytest.raises(RetrievalError, match="FAISS is installed for CPUs only; run `pip install"):
        GpuFlatIndex(faiss.IndexFlatIP(2))
    monkeypatch.setattr(faiss, "GpuMultipleClonerOptions", ClonerOptions, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    with pytest.raises(RetrievalError, match="FAISS finds no GPU on this machine; use device cpu"):
        GpuFlatIndex(faiss.IndexFlatIP(2))


class ClonerOptions:
    """Options of FAISS for GPUs that this FAISS, which is for CPUs, lacks."""

    shard = False
    useFloat16 = False  # noqa: N815 - FAISS's name


class Resources(list):
    """FAISS's vector of GPU resources."""

    push_back = list.append


@pytest.mark.parametrize("gpus", [1, 2])
def test_answers_are_those_of_the_cpu(
    gpus: int, tmp_path: Path, index_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(
        resources: list[Any], devices: Any, index: faiss.Index, options: ClonerOptions
    ) -> faiss.Index:
        """Return shards of fp16 vectors, as GpuCloner.cpp makes them."""
        assert (len(resources), devices.size()) == (gpus, gpus)
        assert index.ntotal == 0  # a filled index would be copied in float32
        assert (options.shard, options.useFloat16) == (True, True)
        shards = [
            faiss.IndexScalarQuantizer(index.d, faiss.ScalarQuantizer.QT_fp16, index.metric_type)
            for _ in range(gpus)
        ]
        if gpus == 1:
            return shards[0]
        together = faiss.IndexShards(index.d, True, True)
        for shard in shards:
            together.add_shard(shard)
        return together

    for module in (faiss, faiss.gpu_wrappers):
        monkeypatch.setattr(module, "get_num_gpus", lambda: gpus)
    monkeypatch.setattr(faiss, "GpuMultipleClonerOptions", ClonerOptions, raising=False)
    for name, value in (
        ("GpuResourcesVector", Resources),
        ("StandardGpuResources", object),
        ("index_cpu_to_gpu_multiple", clone),
    ):
        monkeypatch.setattr(faiss.gpu_wrappers, name, value, raising=False)

    vectors = unit_vectors(3000, 8)
    # 400 vectors that fp16 cannot tell apart
    vectors[500:900] = vectors[0] + 1e-4 * vectors[500:900]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    on_cpu = index_over(tmp_path, index_dir, vectors)
    assert isinstance(on_cpu.vectors, faiss.IndexFlat)
    gpu = GpuFlatIndex(on_cpu.vectors)
    assert 3.1 / 2048 <= gpu.error < 3.11 / 2048  # of unit vectors
    on_gpus = Index(on_cpu.manifest, on_cpu.vectors, on_cpu.corpus, gpu=gpu)

    queries = np.concatenate([vectors[:3], vectors[700:703], 5 * vectors[2000:2020]])
    for k in (1, 10, 100, 2900):  # FAISS finds 2048 neighbours on a GPU; more come from the CPU
        expected_rows, expected_scores = on_cpu.search(queries, k)
        rows, scores = on_gpus.search(queries, k)
        assert (rows == expected_rows).all()
        assert (scores == expected_scores).all()
