"""Needs of the jobs of a run: nodes, GPUs, CPUs and memory that each stage requests."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from mcore_mas.config.run import RunConfig, for_policy
from mcore_mas.planning.choose import placement_of, shapes_of
from mcore_mas.planning.estimate import host_bytes, workloads
from mcore_mas.planning.memory import engine_weights
from mcore_mas.planning.page import PASSAGE_BYTES, index_needs
from mcore_mas.planning.worker_groups import (
    DeviceType,
    count_devices,
    gpus_per_engine,
    list_worker_groups,
)
from rollout.base.errors import ModelError
from rollout.base.files import read_json
from rollout.config.sections import RetrieverConfig

Stage = Literal["train", "evaluate", "start", "retriever"]

# MB. A process: torch and what it loads, on a GPU also what CUDA keeps in the host's memory; the driver: the collector,
# Ray's own processes, tokenizers. docs/cluster.md has what was measured.
_PROCESS_MB: Mapping[DeviceType, int] = MappingProxyType({"CPU": 600, "GPU": 6_000})
_DRIVER_MB: Mapping[DeviceType, int] = MappingProxyType({"CPU": 700, "GPU": 16_000})
_PROGRAMS_MB = 2_000  # what models wrote, in sandboxes, many at a time
_WITH_PROGRAMS = ("code", "data_science", "repository")
_SERVED_MB = 900  # a retriever with an index of its own: encoder and passages of a generator
_SMALL_BYTES = 50_000_000  # of a corpus whose index is within that
_DIMENSIONS = {"minilm": 384, "e5": 768, "bge": 768}  # where the encoder is not here yet
# Bytes of BM25's index per passage of 100 words, served, and with all that bm25s needs to build it.
_WORDS_BYTES = 600
_WORDS_BUILD_BYTES = 3_600
_PUBLISHED_MB = 80_000  # one whose index is not here yet: wiki-18, 21 M vectors of 768 float32, and its passages


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNeeds:
    """What one job asks for."""

    nodes: int
    gpus: int  # of each node
    cpus: int  # of each node
    memory_mb: int  # of each node


def job_needs(config: RunConfig, stage: Stage, node_gpus: int) -> JobNeeds:
    """What a stage of a run needs on machines of `node_gpus` GPUs.

    Trainers and engines take a device each, by the run's placement; what does not fit one machine gets whole ones. A
    run whose engines are embedded and on no GPU is a run on CPUs, unless `cluster.device` says what it is.
    """
    engines = [for_policy(config, policy).engine for policy in config.models]
    on_gpus = any(e.name == "sglang" or e.device == "cuda" for e in engines)
    kind: DeviceType = (
        "GPU"
        if config.cluster.device == "cuda" or (on_gpus and config.cluster.device == "auto")
        else "CPU"
    )
    beside = config.retriever if config.retriever and not config.retriever.elsewhere else None
    builds = stage == "retriever"
    searched, searching = (_retriever_mb(beside, builds), beside.threads) if beside else (0, 0)
    on_gpu = config.retriever.gpus if config.retriever else 0
    if stage == "retriever":
        return JobNeeds(nodes=1, gpus=on_gpu, cpus=searching or 1, memory_mb=1_000 + searched)
    worker_groups = list_worker_groups(config, kind)
    if (
        stage == "evaluate"
    ):  # no trainers, and as many engines of each policy as the GPUs of training allow
        one = sum(gpus_per_engine(config).values()) if kind == "GPU" else 0
        most = min(node_gpus, count_devices(worker_groups, config.cluster.pool))
        # with fewer GPUs than one of each needs they share them
        devices = min(node_gpus, max(one, most // one * one)) if one else int(kind == "GPU")
        processes = max(len(engines), devices)
    elif stage == "start":
        devices, processes = int(kind == "GPU"), 2 * len(config.policies)
    else:
        devices = count_devices(worker_groups, config.cluster.pool) if kind == "GPU" else 0
        processes = sum(workers.devices for workers in worker_groups)
    nodes = -(-devices // node_gpus) if stage == "train" and devices else 1
    memory = _DRIVER_MB[kind] + searched + processes * _PROCESS_MB[kind]
    memory += _PROGRAMS_MB * (config.env.name in _WITH_PROGRAMS)
    if stage == "train":
        memory += (
            object_store_mb(config)
            + _replayed_mb(config)
            + (_host_mb(config) if kind == "GPU" else 0)
        )
    return JobNeeds(
        nodes=nodes,
        gpus=min(devices + on_gpu, node_gpus) if nodes == 1 else node_gpus,
        cpus=-(-processes * (config.cluster.threads_per_process or 1) // nodes)
        + (1 if kind == "CPU" else 2 + devices)
        + max(0, searching - 1),
        memory_mb=-(-memory // nodes),
    )


_TASKS_MB, _OF_FILES = 1_000, 10  # of DeepCoder's tasks 4.3 times the file; others pack their tests


def tasks_mb(files: Iterable[Path]) -> int:
    """The memory in which tasks are made of data files, MB."""
    return (
        _TASKS_MB
        + _OF_FILES * sum(file.stat().st_size for file in files if file.is_file()) // 10**6
    )


_TOKEN_BYTES = 72  # of a micro-batch: ids, positions, labels, and what losses read of each token
_LEAST_STORE_MB = 256


def object_store_mb(config: RunConfig) -> int:
    """The shared memory through which a step's samples reach the trainers: what is set, or room for them twice.

    What does not fit goes over the disk. Replies have half of their longest length and prompts a quarter of theirs
    (`Assumptions`).
    """
    if config.cluster.object_store_mb is not None:
        return config.cluster.object_store_mb
    works = workloads(config)
    samples = sum(
        works[policy].tokens * (_TOKEN_BYTES + _routing_bytes(config, policy))
        for policy in config.trained
    )
    return max(_LEAST_STORE_MB, int(2 * samples / 2**20))


def _routing_bytes(config: RunConfig, policy: str) -> int:
    """Of a token's experts on record, where trainers replay them."""
    if not for_policy(config, policy).engine.router_replay:
        return 0
    try:
        experts = shapes_of(config)[policy].experts
    except ModelError:  # a model of the user's that is not here yet
        return 0
    return sum(experts.sparse) * experts.per_token * experts.number_bytes if experts else 0


def _replayed_mb(config: RunConfig) -> int:
    """Experts on record in trajectories and in micro-batches; ranks read them in Ray's store."""
    works = workloads(config)
    return int(2 * sum(works[p].tokens * _routing_bytes(config, p) for p in config.trained) / 1e6)


def _retriever_mb(retriever: RetrieverConfig, builds: bool) -> int:
    """Return the memory of a job that serves this index, or also builds it."""
    if retriever.folder is None:
        passages = retriever.passages
        size = passages.stat().st_size if passages and passages.is_file() else 0
        return _SERVED_MB + (
            _own_mb(retriever, size // PASSAGE_BYTES, builds) if size > _SMALL_BYTES else 0
        )
    files = list(retriever.folder.glob("*"))
    return (
        sum(file.stat().st_size for file in files) // 10**6 * 5 // 4 + _SERVED_MB
        if files
        else _PUBLISHED_MB
    )


def _own_mb(retriever: RetrieverConfig, passages: int, builds: bool) -> int:
    """Return the memory of an index over so many passages: its vectors, its words, or both."""
    config = retriever.encoder_folder / "config.json" if retriever.encoder_folder else None
    dim = (
        int(read_json(config)["hidden_size"])
        if config and config.is_file()
        else _DIMENSIONS[retriever.encoder]
    )
    vectors = (
        index_needs(retriever.index, passages, dim, rate=1.0)["memory_gb"]
        if retriever.ranking != "bm25"
        else 0
    )
    words_bytes = _WORDS_BUILD_BYTES if builds else _WORDS_BYTES
    words = passages * words_bytes / 1e9 if retriever.ranking != "dense" else 0
    return int((vectors + words) * 1000 * 5 / 4)


def _host_mb(config: RunConfig) -> int:
    """What trainers keep in the memory of machines, and weights that are on their way to engines through it."""
    try:
        models = shapes_of(config)
    except ModelError:  # a model of the user's that is not here yet
        return 0
    placement = placement_of(config)
    kept = host_bytes(config, models, placement)
    through = [
        p for p in config.trained if for_policy(config, p).engine.transport in (None, "disk")
    ]
    return int(
        (kept + sum(2 * engine_weights(models[p], 1) for p in through)) / 1e6
    )  # old and new, in shared memory
