"""GPUs of the engines in an evaluation.

An evaluation has no trainers, so its engines get all GPUs of the machine.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch

from mcore_mas.config.run import RunConfig
from mcore_mas.config.run_sections import for_policy
from mcore_mas.planning.machine import visible_gpu_ids
from mcore_mas.planning.memory import engine_weight_bytes, kv_bytes_per_token
from mcore_mas.planning.shared_pool import MEMORY_SHARE, STATIC_SHARE, memory_share
from mcore_mas.planning.worker_groups import PlacementError, gpus_per_engine
from mcore_mas.runtime.devices import device_type_here
from rollout.base.nested import merged
from rollout.engines import EngineConfig
from rollout.models.architecture import read_architecture
from rollout.records.grouping import group_pairs

EngineGpus = Mapping[str, Sequence[Sequence[str]]]  # GPU ids of each server, by policy


def assign_engine_gpus(config: RunConfig) -> dict[str, list[list[str]]]:
    """Assign the machine's GPUs, without those of the retriever, to the servers of the policies' engines.

    Every policy gets the same number of servers, and GPUs that remain stay idle. If there are fewer
    GPUs than one server of each policy needs, the servers take them in turn, so that a GPU may have
    more servers than another.

    Returns:
        GPU ids of each server by policy; [] for a server that needs no GPU of this machine.

    Raises:
        PlacementError: there are fewer GPUs than one server needs.
    """
    servers: dict[str, list[list[str]]] = {
        policy: [[]] * for_policy(config, policy).engine.servers for policy in config.models
    }
    sizes = gpus_per_engine(config)
    if not sizes or device_type_here(config) != "GPU":
        return servers

    gpus = visible_gpu_ids()
    if config.retriever and config.retriever.gpus:
        gpus = gpus[: -config.retriever.gpus]
    largest = max(sizes, key=lambda policy: sizes[policy])
    if sizes[largest] > len(gpus):
        raise PlacementError(
            f"an evaluation needs {sizes[largest]} GPUs for a server of {largest} (engine.tp), and "
            f"there are {len(gpus)} without the retriever's; lower engine.tp"
        )

    replicas = max(1, len(gpus) // sum(sizes.values()))
    next_gpus = itertools.cycle(gpus)
    for policy, size in sizes.items():
        servers[policy] = [[next(next_gpus) for _ in range(size)] for _ in range(replicas)]
    return servers


def share_gpu_memory(config: RunConfig, gpus: EngineGpus) -> RunConfig:
    """Give each server that shares a GPU with others a share of its memory.

    Shares in the config are used if those of each GPU add up to at most 1. Otherwise each server
    gets memory for its weights, and an equal part of the remaining memory.

    Args:
        config: config of the run.
        gpus: GPU ids of each server, by policy, as `assign_engine_gpus` returns them.

    Raises:
        PlacementError: the engines of a GPU do not fit it.
        ModelError: the architecture of a model is not known.
    """
    gpu_policies: list[tuple[str, str]] = []
    for policy, servers in gpus.items():
        gpu_policies += [(gpu, policy) for gpu in itertools.chain.from_iterable(servers)]
    shared_by = [policies for policies in group_pairs(gpu_policies).values() if len(policies) > 1]

    sharing_policies = dict.fromkeys(itertools.chain.from_iterable(shared_by))
    engines = {policy: for_policy(config, policy).engine for policy in sharing_policies}
    if all(_shares_are_valid([engines[policy] for policy in policies]) for policies in shared_by):
        return config

    shares = _equal_shares(config, engines, shared_by)
    changed = dict(config.policies)
    for policy, engine in engines.items():
        if engine.name != "sglang":
            continue
        overrides = config.policies[policy].overrides
        options = merged(overrides.engine, {"options": {MEMORY_SHARE: round(shares[policy], 3)}})
        overrides = overrides.model_copy(update={"engine": options})
        changed[policy] = config.policies[policy].model_copy(update={"overrides": overrides})
    return config.model_copy(update={"policies": changed})


def _shares_are_valid(engines: Sequence[EngineConfig]) -> bool:
    """Return True if every engine on a GPU has a share of its memory, and the shares fit together."""
    shares = [memory_share(engine) for engine in engines]
    return all(shares) and sum(shares) <= 1


def _equal_shares(
    config: RunConfig, engines: Mapping[str, EngineConfig], shared_by: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return the share of a GPU's memory that each policy's server gets, by policy.

    Args:
        config: config of the run.
        engines: engines that share a GPU, by policy.
        shared_by: policies on each GPU that several policies are on.

    Raises:
        PlacementError: the engines of a GPU do not fit it.
    """
    gpu_bytes = min(
        torch.cuda.get_device_properties(index).total_memory
        for index in range(torch.cuda.device_count())
    )
    engine_bytes = {
        policy: _engine_bytes(config.models[policy], engine) for policy, engine in engines.items()
    }
    shares = dict.fromkeys(engines, 1.0)
    for policies in shared_by:
        free = STATIC_SHARE * gpu_bytes - sum(engine_bytes[policy] for policy in policies)
        if free <= 0:
            table = ", ".join(f"{policy} {engine_bytes[policy] / 1e9:.1f}" for policy in policies)
            raise PlacementError(
                f"an evaluation has {len(policies)} engines on one GPU of {gpu_bytes / 1e9:.1f} GB, "
                f"and they hold {table} GB; give it more GPUs, or raise engine.tp"
            )
        servers = max(1, sum(engines[policy].name == "sglang" for policy in policies))
        for policy in policies:
            share = (engine_bytes[policy] + free / servers) / gpu_bytes
            shares[policy] = min(shares[policy], share)
    return shares


def _engine_bytes(model: str, engine: EngineConfig) -> float:
    """Return the bytes that an engine has on each GPU before it serves.

    They are its weights and, for an embedded engine, its KV cache.
    """
    architecture = read_architecture(model)
    if engine.name == "sglang":
        return engine_weight_bytes(architecture, engine.tp)
    kv_cache = engine.slots * engine.max_length * kv_bytes_per_token(architecture, 1)
    # Both functions count bfloat16, and an embedded engine uses float32.
    return 2 * (engine_weight_bytes(architecture, 1) + kv_cache)
