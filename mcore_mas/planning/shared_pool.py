"""GPUs that trainers and engines of one run share, and the share of memory that each server gets."""

from typing import Any

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.config.run_sections import engine_holder, for_policy
from mcore_mas.planning.worker_groups import count_devices, list_worker_groups
from rollout.engines import EngineConfig

MEMORY_SHARE = "mem-fraction-static"  # argument of `sglang.launch_server`
# Share of a GPU's memory that all servers on the GPU may hold together; they compute in the rest.
STATIC_SHARE = 0.8


def memory_share(engine: EngineConfig) -> float:
    """Return the share of a GPU's memory that an engine's options give its server; 0 without this option."""
    share = engine.options.get(MEMORY_SHARE, engine.options.get(MEMORY_SHARE.replace("-", "_")))
    return float(share) if isinstance(share, int | float) else 0.0


def started_servers(config: RunConfig) -> dict[str, EngineConfig]:
    """Return the engines whose SGLang servers a run starts, by policy."""
    servers = {}
    for policy in config.models:
        engine = for_policy(config, policy).engine
        is_started = engine.name == "sglang" and not engine.urls
        if is_started and engine_holder(config, policy) == policy:
            servers[policy] = engine
    return servers


def fit_pool(config: RunConfig, gpus: int) -> tuple[RunConfig, str]:
    """Let the trainers and engines of a run share GPUs if there are too few for each to have its own.

    They take turns on the GPUs, unless trajectories are collected while policies are trained. A run
    is returned as it is if its GPUs suffice, or if sharing them would not help.

    Args:
        config: the run.
        gpus: number of GPUs for trainers and engines, without those of the retriever.

    Returns:
        The run, and a line about what was changed, or "".
    """
    groups = list_worker_groups(config, "GPU")
    needed = count_devices(groups, "split")
    if config.cluster.pool == "shared" or needed <= gpus or count_devices(groups, "shared") > gpus:
        return config, ""
    try:
        shared = RunConfig.from_values(_values_of_shared_pool(config), f"run '{config.run}'")
    except ConfigError:  # such as several actors of an embedded engine, which cannot share a GPU
        return config, ""

    turns = "" if config.collects_ahead else " and take turns"
    number = "there is 1" if gpus == 1 else f"there are {gpus}"
    line = (
        f"cluster.pool: split needs {needed} GPUs and {number}: trainers and engines share "
        f"{'it' if gpus == 1 else 'them'}{turns} (cluster.pool: shared)"
    )
    return shared, line


def _values_of_shared_pool(config: RunConfig) -> dict[str, Any]:
    values = config.model_dump(mode="json")
    values["cluster"]["pool"] = "shared"
    if not config.collects_ahead:
        # `adapters: slots` does not allow `sleep`; then only the trainers free their memory.
        values["engine"]["sleep"] = config.engine.adapters != "slots"
        for policy in config.trained:
            values["policies"][policy]["offload"] = True
    if config.engine.transport == "distributed":  # NCCL takes no GPU twice
        values["engine"]["transport"] = "tensor"

    servers = started_servers(config)
    if not all(map(memory_share, servers.values())):
        values["engine"]["options"][MEMORY_SHARE] = round(STATIC_SHARE / len(servers), 3)
    return values
