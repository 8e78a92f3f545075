"""Plan of a run in lines for the terminal, as `mcore-mas plan` prints it."""

from collections.abc import Iterator
from dataclasses import asdict

from mcore_mas.config.credit import truncated_sampling_warning
from mcore_mas.config.models import layout_of
from mcore_mas.config.run import RunConfig
from mcore_mas.planning.estimate import (
    engine_weights,
    estimate_disk,
    estimate_host_memory,
    estimate_peak_memory,
    estimate_trainers,
    load_architectures,
)
from mcore_mas.planning.gpus import Cluster
from mcore_mas.planning.workload import estimate_workloads


def plan_lines(config: RunConfig, cluster: Cluster) -> Iterator[str]:
    """Yield the placement of a run and the memory of its parts.

    Raises:
        ModelError: the architecture of a model is not known.
    """
    models = load_architectures(config)
    peak = estimate_peak_memory(config, models, cluster.gpu)
    workloads = estimate_workloads(config)
    tokens = sum(workloads[policy].tokens for policy in config.trained)
    weights = engine_weights(config, models)

    yield f"{config.run} on {cluster}: {describe_placement(config)}"
    yield (
        f"  fullest GPU: {_gb(peak.update)} in the update, {_gb(peak.rollout)} in the rollout, of "
        f"{cluster.gpu.memory:g} GB"
    )
    for (policy, part), memory in estimate_trainers(config, models).items():
        sizes = [
            f"{name.replace('_', ' ')} {_gb(size)}" for name, size in asdict(memory).items() if size
        ]
        yield f"  {part} of {policy}: {', '.join(sizes)}"
    sizes = [f"{policy} {_gb(size)}" for policy, size in weights.items()]
    yield f"  engines: weights of {', '.join(sizes)}; KV cache {_gb(peak.kv_cache)} each"
    yield (
        f"  a step trains {tokens / 1e6:.2f} M tokens if all agents speak in all rounds; checkpoints and models take "
        f"{_gb(estimate_disk(config, models))} of disk, trainers "
        f"{_gb(estimate_host_memory(config, models))} of host memory"
    )
    if config.retriever and config.retriever.gpus:
        yield "  retriever: one GPU more, the machine's last"
    warning = truncated_sampling_warning(config.agents)
    if warning:
        yield f"  {warning}"


def describe_placement(config: RunConfig) -> str:
    """Return the placement of a run in one line, with equal policies named together."""
    policies_by_layout: dict[str, list[str]] = {}
    for policy in config.trained:
        layout = asdict(layout_of(config.policies[policy]))
        sizes = [f"{name} {layout[name]}" for name in ("tp", "pp", "cp", "dp") if layout[name] > 1]
        description = " ".join(sizes) or "one rank"
        recomputation = config.policies[policy].recomputation
        if recomputation != "none":
            description += f" with {recomputation} recomputation"
        policies_by_layout.setdefault(description, []).append(policy)
    trainers = "; ".join(
        f"{', '.join(policies)} {layout}" for layout, policies in policies_by_layout.items()
    )

    parts = [
        f"{config.cluster.pool} GPUs",
        f"trainers {trainers}",
        _describe_engines(config),
    ]
    if config.engine.sleep:
        parts.append("trainers and engines in turn")
    if config.cluster.one_by_one:
        parts.append("trainers one by one")
    return ", ".join(parts)


def _describe_engines(config: RunConfig) -> str:
    engine = config.engine
    if engine.name == "embedded":
        return f"embedded engines of {engine.slots} slots"
    return f"engines {engine.replicas} x tp {engine.tp}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
