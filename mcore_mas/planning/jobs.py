"""Needs of the jobs of a run: the nodes, GPUs, CPUs and memory that each stage requests.

`job_needs` derives them from the config; Snakemake passes them to Slurm. docs/cluster.md lists what a
job requests. The memory of jobs on CPUs was measured, and that of jobs on GPUs is an estimate.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mcore_mas.config.run import RunConfig
from mcore_mas.config.run_sections import engine_holder, for_policy
from mcore_mas.planning.estimate import (
    Models,
    estimate_host_memory,
    estimate_trainers,
    load_architectures,
    trainers_by_ranks,
)
from mcore_mas.planning.indexes import PASSAGE_BYTES, index_needs
from mcore_mas.planning.memory import (
    combine_on_rank,
    count_parameters,
    embedded_host_bytes,
    embedded_sequence_bytes,
    embedded_weight_bytes,
    engine_weight_bytes,
)
from mcore_mas.planning.shared_pool import fit_pool
from mcore_mas.planning.worker_groups import (
    DeviceType,
    count_devices,
    evaluated_policies,
    evaluates_on_all_nodes,
    gpus_per_engine,
    list_worker_groups,
)
from mcore_mas.planning.workload import estimate_workloads
from rollout.base.errors import ModelError
from rollout.config.retriever import RetrieverConfig
from rollout.models.architecture import Architecture, read_config
from rollout.models.model_config import EncoderConfig, read_values

# Stages of a run whose jobs request more than a fixed amount of memory; "index" has the jobs that
# encode passages, build the index and probe its server.
Stage = Literal["index", "cold_start", "train", "evaluate"]

# With `cluster.device: auto` a job gets GPUs if it trains a larger model than this.
_MAX_CPU_PARAMETERS = 100e6

# Memory in MB. A process of a run on GPUs also has host memory that CUDA pins. The driver has the
# rollout workers, Ray's own processes and tokenizers. Processes on CPUs were measured with models
# of up to `_MEASURED_PARAMETERS`; `_models_on_cpus_mb` adds the memory of larger ones.
_PROCESS_MB: dict[DeviceType, int] = {"CPU": 600, "GPU": 6_000}
_DRIVER_MB: dict[DeviceType, int] = {"CPU": 700, "GPU": 16_000}
_MEASURED_PARAMETERS = 1.5e6
# A process's memory at the peak of an update, relative to the formula of `planning/memory.py`.
_CPU_TRAINER_GROWTH = 1.35
_SANDBOX_MB = 2_000  # many programs of models at a time
# A worker of an environment: 106 MB with Gymnasium, without what the environment itself loads.
_ENV_WORKER_MB = 200
_SANDBOX_ENVIRONMENTS = ("code", "data_science", "repository")

_RETRIEVER_JOB_MB = 1_000
_RETRIEVER_MB = 900  # a server with the encoder and a small index
_SMALL_CORPUS_BYTES = 50_000_000  # the index of a smaller corpus is within _RETRIEVER_MB
_PUBLISHED_INDEX_MB = 80_000  # wiki-18, 21 M vectors of 768 float32 and their passages
# Memory of BM25's index for a passage of 100 words: to serve it, and what bm25s needs to build it.
_BM25_SERVING_BYTES = 600
_BM25_BUILDING_BYTES = 3_600
_ENCODER_DIMENSIONS = {"minilm": 384, "e5": 768, "bge": 768}

_TASKS_MB = 1_000
# Bytes of memory for a byte of the data files. DeepCoder's tasks take 4.3 times as much as its file;
# in the files of other benchmarks, tests are compressed.
_TASKS_PER_FILE_SIZE = 10

TOKEN_BYTES = 72  # in a micro-batch: ids, positions, labels and the inputs of the loss
_MIN_OBJECT_STORE_MB = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNeeds:
    """Resources of one job."""

    nodes: int
    gpus: int  # of each node
    cpus: int  # of each node
    memory_mb: int  # of each node


def job_needs(config: RunConfig, stage: Stage, node_gpus: int) -> JobNeeds:
    """Return the resources of a stage of a run.

    Args:
        config: config of the run.
        stage: "index", "cold_start", "train" or "evaluate".
        node_gpus: number of GPUs of one machine. A training that needs more gets whole machines, and
            so does its evaluation if all engines are SGLang servers.
    """
    if stage == "index":
        return _index_job_needs(config)

    device_type = _device_type(config)
    if stage == "train":
        return _train_needs(config, device_type, node_gpus)

    if stage == "evaluate":
        nodes = _evaluation_nodes(config, device_type, node_gpus)
        if nodes > 1:
            return _evaluation_on_nodes(config, nodes, node_gpus)
        gpus = _evaluation_gpus(config, node_gpus) if device_type == "GPU" else 0
        processes = max(len(evaluated_policies(config)), gpus)
    else:  # a cold start: one process, which gets the memory and CPUs of two, as it trains and samples
        gpus = 1 if device_type == "GPU" else 0
        processes = 2
    return _needs_of_one_node(
        config,
        device_type,
        gpus=gpus,
        processes=processes,
        node_gpus=node_gpus,
        extra_mb=_models_on_cpus_mb(config, stage) if device_type == "CPU" else 0,
    )


def _device_type(config: RunConfig) -> DeviceType:
    """Return the type of the devices that a run will compute on.

    With `cluster.device: auto` these are GPUs if an engine is a server or is set to CUDA, or if a
    model is too large for CPUs.
    """
    if config.cluster.device == "cuda":
        return "GPU"
    if config.cluster.device == "cpu":
        return "CPU"
    engines = {policy: for_policy(config, policy).engine for policy in config.models}
    if any(engine.name == "sglang" or engine.device == "cuda" for engine in engines.values()):
        return "GPU"

    try:
        models = load_architectures(config)
    except ModelError:  # a model of the user's that is not on this machine
        return "CPU"
    is_large = any(
        engine.device == "auto" and count_parameters(models[policy]) > _MAX_CPU_PARAMETERS
        for policy, engine in engines.items()
    )
    return "GPU" if is_large else "CPU"


def _train_needs(config: RunConfig, device_type: DeviceType, node_gpus: int) -> JobNeeds:
    if device_type == "GPU" and node_gpus == 1:
        config, _ = fit_pool(config, node_gpus)  # as the training will do
    worker_groups = list_worker_groups(config, device_type)
    processes = sum(workers.devices for workers in worker_groups)
    memory_mb = object_store_mb(config) + _routing_mb(config)
    gpus = 0
    if device_type == "GPU":
        gpus = count_devices(worker_groups, config.cluster.pool)
        memory_mb += _trainers_mb(config)
    else:
        memory_mb += _models_on_cpus_mb(config, "train")

    needs = _needs_of_one_node(
        config,
        device_type,
        gpus=gpus,
        processes=processes,
        node_gpus=node_gpus,
        extra_mb=memory_mb,
    )
    nodes = -(-gpus // node_gpus)
    if nodes <= 1:
        return needs
    return JobNeeds(
        nodes=nodes,
        gpus=node_gpus,
        cpus=_cpus(config, device_type, gpus=gpus, processes=processes, nodes=nodes),
        memory_mb=-(-needs.memory_mb // nodes),
    )


def _needs_of_one_node(
    config: RunConfig,
    device_type: DeviceType,
    *,
    gpus: int,
    processes: int,
    node_gpus: int,
    extra_mb: int = 0,
) -> JobNeeds:
    """Return the needs of a job if one node has all of its processes, its environments and its retriever."""
    memory_mb = _DRIVER_MB[device_type] + processes * _PROCESS_MB[device_type] + extra_mb
    if config.env.name in _SANDBOX_ENVIRONMENTS:
        memory_mb += _SANDBOX_MB
    memory_mb += config.env.workers * _ENV_WORKER_MB
    retriever = config.retriever
    retriever_gpus = retriever.gpus if retriever else 0
    if retriever is not None and not retriever.elsewhere:
        memory_mb += _retriever_mb(retriever, builds_index=False)
    return JobNeeds(
        nodes=1,
        gpus=min(gpus + retriever_gpus, node_gpus),
        cpus=_cpus(config, device_type, gpus=gpus, processes=processes, nodes=1),
        memory_mb=memory_mb,
    )


def _cpus(
    config: RunConfig, device_type: DeviceType, *, gpus: int, processes: int, nodes: int
) -> int:
    """Return the CPUs of each node: of the processes, the driver, workers of environments and the retriever."""
    threads = processes * (config.cluster.threads_per_process or 1)
    driver = 1 if device_type == "CPU" else 2 + gpus
    driver += config.env.workers
    retriever = config.retriever
    retriever_cpus = 0
    if retriever is not None and not retriever.elsewhere:
        retriever_cpus = retriever.threads - 1  # one of its threads uses the driver's CPU
    return -(-threads // nodes) + driver + retriever_cpus


def _evaluation_nodes(config: RunConfig, device_type: DeviceType, node_gpus: int) -> int:
    """Return the nodes of an evaluation: those of the training, if all engines are SGLang servers.

    Other engines run on one node, and so does a retriever on GPUs.
    """
    has_retriever = config.retriever is not None and config.retriever.gpus > 0
    if device_type == "CPU" or not evaluates_on_all_nodes(config) or has_retriever:
        return 1
    training_gpus = count_devices(list_worker_groups(config, "GPU"), config.cluster.pool)
    return max(1, -(-training_gpus // node_gpus))


def _evaluation_on_nodes(config: RunConfig, nodes: int, node_gpus: int) -> JobNeeds:
    """Return the resources of an evaluation whose servers take whole nodes."""
    gpus = nodes * node_gpus
    needs = _needs_of_one_node(
        config, "GPU", gpus=node_gpus, processes=node_gpus, node_gpus=node_gpus
    )
    return JobNeeds(
        nodes=nodes,
        gpus=node_gpus,
        cpus=_cpus(config, "GPU", gpus=gpus, processes=gpus, nodes=nodes),
        memory_mb=needs.memory_mb,
    )


def _evaluation_gpus(config: RunConfig, node_gpus: int) -> int:
    """Return the GPUs of an evaluation on one machine, which has engines only.

    It gets as many engines of each policy as fit the GPUs of the training. If the machine has fewer
    GPUs than one engine of each policy needs, the engines share them.
    """
    gpus_of_one_each = sum(gpus_per_engine(config).values())
    if gpus_of_one_each == 0:
        return 1
    training_gpus = count_devices(list_worker_groups(config, "GPU"), config.cluster.pool)
    engines_of_each = min(node_gpus, training_gpus) // gpus_of_one_each
    return min(node_gpus, max(1, engines_of_each) * gpus_of_one_each)


def _index_job_needs(config: RunConfig) -> JobNeeds:
    retriever = config.retriever
    memory_mb = _RETRIEVER_JOB_MB
    threads = 1
    if retriever is not None and not retriever.elsewhere:
        memory_mb += _retriever_mb(retriever, builds_index=True)
        threads = retriever.threads
    return JobNeeds(
        nodes=1,
        gpus=retriever.gpus if retriever else 0,
        cpus=threads,
        memory_mb=memory_mb,
    )


def tasks_mb(files: Iterable[Path]) -> int:
    """Return the memory in MB of a job that makes tasks from these data files."""
    bytes_read = sum(file.stat().st_size for file in files if file.is_file())
    return _TASKS_MB + _TASKS_PER_FILE_SIZE * bytes_read // 10**6


def retry_memory_mb(memory_mb: int, attempt: int, node_mb: int) -> int:
    """Return the memory in MB that an attempt of a job requests.

    Attempt n requests n times the planned memory, but at most `node_mb`, because no machine could run
    a job that requests more.

    Args:
        memory_mb: planned memory, which the first attempt requests in any case.
        attempt: number of the attempt, from 1.
        node_mb: memory of the largest machine.
    """
    return max(memory_mb, min(memory_mb * attempt, node_mb))


def object_store_mb(config: RunConfig) -> int:
    """Return the size in MB of Ray's object store, through which samples reach the trainers.

    This is `cluster.object_store_mb`, or else room for the samples of a step twice, and at least
    256 MB. Ray spills samples that do not fit to disk.
    """
    if config.cluster.object_store_mb is not None:
        return config.cluster.object_store_mb

    workloads = estimate_workloads(config)
    samples = 0.0
    for policy in config.trained:
        token_bytes = TOKEN_BYTES + _routing_bytes_per_token(config, policy)
        samples += workloads[policy].tokens * token_bytes
    return max(_MIN_OBJECT_STORE_MB, int(2 * samples / 2**20))


def _routing_bytes_per_token(config: RunConfig, policy: str) -> int:
    """Return the size of a token's recorded experts, which trainers replay."""
    if not for_policy(config, policy).engine.router_replay:
        return 0
    try:
        experts = load_architectures(config)[policy].experts
    except ModelError:  # a model of the user's that is not on this machine
        return 0
    if experts is None:
        return 0
    return sum(experts.sparse) * experts.per_token * experts.index_bytes


def _routing_mb(config: RunConfig) -> int:
    """Return the memory of recorded experts in the driver: in trajectories and in micro-batches."""
    workloads = estimate_workloads(config)
    routing = sum(
        workloads[policy].tokens * _routing_bytes_per_token(config, policy)
        for policy in config.trained
    )
    return int(2 * routing / 1e6)


def _trainers_mb(config: RunConfig) -> int:
    """Return the host memory of the trainers, and of weights on their way to engines."""
    try:
        models = load_architectures(config)
    except ModelError:  # a model of the user's that is not on this machine
        return 0
    weights = 0.0
    for policy in config.trained:
        engine = for_policy(config, policy).engine
        if engine.name == "embedded":
            weights += embedded_host_bytes(models[policy], trained=True)
        elif engine.transport in (None, "disk"):
            # The old and the new weights are files in shared memory.
            weights += 2 * engine_weight_bytes(models[policy], tp=1)
    return int((estimate_host_memory(config, models) + weights) / 1e6)


def _models_on_cpus_mb(config: RunConfig, stage: Stage) -> int:
    """Return the memory of a job's models, if all of them are computed on CPUs.

    Small models are within the measured memory of their processes. A cold start trains one model
    and samples from it.
    """
    try:
        models = load_architectures(config)
    except ModelError:  # a model of the user's that is not on this machine
        return 0
    if stage == "evaluate":
        models = {policy: models[policy] for policy in evaluated_policies(config)}
    if max(map(count_parameters, models.values()), default=0) <= _MEASURED_PARAMETERS:
        return 0

    size = 0.0
    if stage == "train":
        size += _cpu_trainer_bytes(config, models) + estimate_host_memory(config, models)
    elif stage == "cold_start":
        trainers = estimate_trainers(config, models, fused=False).values()
        size += max((_CPU_TRAINER_GROWTH * trainer.peak for trainer in trainers), default=0.0)
    for policy in models:
        if stage == "evaluate" or engine_holder(config, policy) == policy:
            trained = stage == "train" and policy in config.trained
            size += _cpu_engine_bytes(config, models[policy], policy, trained=trained)
    return int(size / 1e6)


def _cpu_trainer_bytes(config: RunConfig, models: Models) -> float:
    """Return the memory of all ranks of all trainers on CPUs at the peak of an update."""
    trainers = estimate_trainers(config, models, fused=False)
    total = 0.0
    for keys in trainers_by_ranks(config):
        rank = combine_on_rank([trainers[key] for key in keys])
        holder = config.holder(keys[0][0])
        total += config.policies[holder].ranks * _CPU_TRAINER_GROWTH * rank.peak
    return total


def _cpu_engine_bytes(
    config: RunConfig, architecture: Architecture, policy: str, *, trained: bool
) -> float:
    """Return the memory of an embedded engine on a CPU, all replicas together.

    The replicas share the float32 weights. Each also has a KV cache in float32 and a copy of the
    weights in oneDNN's blocks, in bfloat16 if the policy has `bf16`, and else in float32.
    """
    engine = for_policy(config, policy).engine
    if engine.name != "embedded":
        return 0.0
    bf16 = config.policies[policy].bf16
    cache = engine.slots * embedded_sequence_bytes(architecture, engine.max_length, bf16=False)
    replica = cache + embedded_weight_bytes(architecture, bf16=bf16)
    return embedded_host_bytes(architecture, trained=trained) + engine.replicas * replica


def _retriever_mb(retriever: RetrieverConfig, *, builds_index: bool) -> int:
    """Return the memory in MB of a job that serves the retriever's index, or builds and serves it.

    A `retriever.folder` without files is the folder of a published index that is yet to be downloaded.
    """
    if retriever.folder is not None:
        files = list(retriever.folder.glob("*"))
        if not files:
            return _PUBLISHED_INDEX_MB
        index_mb = sum(file.stat().st_size for file in files) // 10**6
        return index_mb * 5 // 4 + _RETRIEVER_MB

    corpus = retriever.passages
    corpus_bytes = corpus.stat().st_size if corpus is not None and corpus.is_file() else 0
    if corpus_bytes <= _SMALL_CORPUS_BYTES:
        return _RETRIEVER_MB
    passages = corpus_bytes // PASSAGE_BYTES
    return _RETRIEVER_MB + _own_index_mb(retriever, passages, builds_index=builds_index)


def _own_index_mb(retriever: RetrieverConfig, passages: int, *, builds_index: bool) -> int:
    """Return the memory in MB of an index that the run builds: its vectors, its words, or both."""
    index_gb = 0.0
    if retriever.ranking != "bm25":
        dim = _encoder_dimensions(retriever)
        index_gb += index_needs(retriever.index, passages, dim, rate=1.0).memory_gb
    if retriever.ranking != "dense":
        passage_bytes = _BM25_BUILDING_BYTES if builds_index else _BM25_SERVING_BYTES
        index_gb += passages * passage_bytes / 1e9
    return int(index_gb * 1000 * 5 / 4)


def _encoder_dimensions(retriever: RetrieverConfig) -> int:
    """Return the number of dimensions of the encoder's vectors.

    It is read from the encoder's folder. Without a folder, or before its download, it is the number
    of the encoder's family.
    """
    if retriever.encoder_folder is not None:
        config_file = retriever.encoder_folder / "config.json"
        if config_file.is_file():
            config = read_config(retriever.encoder_folder)
            return read_values(EncoderConfig, config, str(config_file)).hidden_size
    return _ENCODER_DIMENSIONS[retriever.encoder]
