"""Placement of a run on a cluster: the smallest tensor parallelism that fits.

Trainers and SGLang engines have the same tensor parallelism and share all GPUs of the cluster; data
parallelism and engine replicas take the rest. `place_run` applies this to a config.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mcore_mas.config.run import RunConfig
from mcore_mas.planning.estimate import (
    USABLE_SHARE,
    Models,
    engine_weights,
    estimate_peak_memory,
    filled_kv_cache,
    load_architectures,
)
from mcore_mas.planning.gpus import Cluster, PlanError
from mcore_mas.planning.shared_pool import MEMORY_SHARE
from mcore_mas.planning.worker_groups import count_devices, list_worker_groups
from rollout.base.errors import ModelError
from rollout.models.layout import ParallelLayout, Recompute, check_fit

_TENSOR_PARALLEL = (1, 2, 4, 8)
_CLUSTER_SIZES = (1, 2, 4, 8, 16, 32, 64)  # sizes that an error may propose


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saving:
    """A way to fit the trainers into less memory with the same tensor parallelism."""

    one_by_one: bool  # one trainer at a time is on the GPUs, and Adam's moments stay in host memory
    recompute: Recompute  # of the policies whose config leaves it open


# From the fastest to the slowest: moments are copied once in an update, while layers are computed
# again in every micro-batch, which takes a fifth to a third of its time.
_SAVINGS = (
    _Saving(one_by_one=False, recompute="none"),
    _Saving(one_by_one=False, recompute="selective"),
    _Saving(one_by_one=True, recompute="none"),
    _Saving(one_by_one=True, recompute="selective"),
    _Saving(one_by_one=False, recompute="full"),
    _Saving(one_by_one=True, recompute="full"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A run in one placement, and the bytes that its fullest GPU lacks."""

    config: RunConfig
    shortfall: float


def place_run(config: RunConfig, cluster: Cluster) -> RunConfig:
    """Place a run on all GPUs of a cluster.

    Trainers and engines share the GPUs and take turns: trainers are offloaded during the rollout,
    and engines sleep during the update. They do not take turns if `trainer.staleness` lets the team
    act during the update. The tensor parallelism is the smallest that fits with any of `_SAVINGS`,
    of which the fastest that fits is taken. `microbatch_tokens` and a stated `recompute` stay as
    they are. An embedded engine gets as many of its `slots` as there is memory for their keys and
    values.

    Raises:
        PlanError: no placement fits, or `check_plannable` refuses the run. The message names the
            shortfall and a cluster that would do.
        ModelError: the architecture of a model is not known.
    """
    check_plannable(config)
    models = load_architectures(config)
    candidate = _best_candidate(config, models, cluster)
    if candidate is None or candidate.shortfall > 0:
        raise PlanError(_describe_shortfall(config, models, cluster, candidate))

    values = candidate.config.model_dump(mode="json")
    if config.engine.name == "sglang":
        weights = engine_weights(candidate.config, models)
        kv_cache = estimate_peak_memory(candidate.config, models, cluster.gpu).kv_cache
        share = (max(weights.values()) + kv_cache) / cluster.gpu.memory_bytes
        values["engine"]["options"][MEMORY_SHARE] = round(share, 3)
    return RunConfig.from_values(values, f"run '{config.run}'")


def check_plannable(config: RunConfig) -> None:
    """Check that the engines of a run are on its GPUs, all with the same tensor parallelism.

    Raises:
        PlanError: the run or its engine is on CPUs, the engine is of another kind, runs elsewhere or
            has several embedded replicas, or a policy overrides the kind, size or place of its
            engine.
    """
    engine = config.engine
    on_gpus = engine.name == "sglang" or (
        engine.name == "embedded" and engine.device != "cpu" and engine.replicas == 1
    )
    if config.cluster.device == "cpu":
        raise PlanError(
            f"{config.run}: it computes on CPUs (cluster.device: cpu); to plan it for GPUs, add "
            "cluster.device=auto"
        )
    if engine.urls or not on_gpus:
        raise PlanError(
            f"{config.run}: a plan places engines on the run's GPUs; it needs engine.name: "
            "sglang without urls, or embedded with replicas: 1 and a device other than cpu"
        )
    for policy in config.models:
        engine_settings = config.policies[policy].overrides.engine.keys()
        refused = engine_settings & {"name", "tp", "replicas", "urls"}
        if refused:
            raise PlanError(
                f"{config.run}: policies.{policy}.overrides.engine.{min(refused)}: a plan gives all "
                "engines the same tensor parallelism; leave it out, or place the run by hand "
                "without cluster.gpus"
            )


def check_placement(config: RunConfig, cluster: Cluster) -> None:
    """Check that a run fits a cluster as its config places it.

    Raises:
        PlanError: there are too few GPUs, or the fullest of them has too little memory.
        ModelError: the architecture of a model is not known.
    """
    check_plannable(config)
    gpus = count_devices(list_worker_groups(config, "GPU"), config.cluster.pool)
    if gpus > cluster.gpus:
        raise PlanError(f"{config.run}: it takes {gpus} GPUs, and {cluster} has {cluster.gpus}")

    peak = estimate_peak_memory(config, load_architectures(config), cluster.gpu)
    shortfall = peak.shortfall(cluster.gpu)
    if shortfall > 0:
        raise PlanError(
            f"{config.run}: it does not fit {cluster}; the fullest GPU lacks "
            f"{shortfall / 1e9:.1f} GB; raise tp of policies and engines, or recompute more"
        )


def _best_candidate(config: RunConfig, models: Models, cluster: Cluster) -> _Candidate | None:
    """Return the first candidate that fits, else the one with the smallest shortfall.

    None if no tensor parallelism divides both the models and the cluster.
    """
    closest: _Candidate | None = None
    for placed in _candidates(config, models, cluster):
        peak = estimate_peak_memory(placed, models, cluster.gpu)
        candidate = _Candidate(config=placed, shortfall=peak.shortfall(cluster.gpu))
        if candidate.shortfall == 0 and not _shrinks_caches(config, placed, models, cluster):
            return candidate
        if closest is None or candidate.shortfall < closest.shortfall:
            closest = candidate
    return closest


def _candidates(config: RunConfig, models: Models, cluster: Cluster) -> Iterator[RunConfig]:
    """Yield the placements in the order in which they are tried."""
    sizes = [tp for tp in _TENSOR_PARALLEL if _divides_evenly(config, models, cluster, tp)]
    for tp in sizes:
        for saving in _savings(config):
            placed = _with_tensor_parallelism(config, cluster, tp, saving)
            yield _with_slots_that_fit(placed, models, cluster)


def _savings(config: RunConfig) -> list[_Saving]:
    """Return the savings that a run may use, without those that are alike for it."""
    is_open = any(config.policies[policy].recompute is None for policy in config.trained)
    return [
        saving
        for saving in _SAVINGS
        # One trainer at a time requires offloading, and a run that collects ahead does not offload.
        if not (saving.one_by_one and config.collects_ahead)
        and (is_open or saving.recompute == _SAVINGS[0].recompute)
    ]


def _shrinks_caches(config: RunConfig, placed: RunConfig, models: Models, cluster: Cluster) -> bool:
    """Return True if more recomputation would give memory to KV caches that do not hold all slots.

    Only in a run that collects ahead are caches and activations on the GPUs at the same time.

    Args:
        config: the run as its config says.
        placed: the run in a placement that fits, perhaps with fewer slots.
        models: architecture of every policy.
        cluster: the GPUs.
    """
    can_recompute_more = any(
        config.policies[policy].recompute is None and placed.policies[policy].recompute != "full"
        for policy in config.trained
    )
    if not config.collects_ahead or not can_recompute_more:
        return False
    if placed.engine.slots < config.engine.slots:
        return True
    peak = estimate_peak_memory(placed, models, cluster.gpu)
    return peak.kv_cache < filled_kv_cache(placed, models)


def _divides_evenly(config: RunConfig, models: Models, cluster: Cluster, tp: int) -> bool:
    """Return True if groups of `tp` ranks divide the cluster, its machines and all models evenly."""
    if cluster.gpus % tp or cluster.gpus_per_node % tp:
        return False
    layout = ParallelLayout(tp=tp, dp=cluster.gpus // tp, sp=tp > 1)
    for policy, architecture in models.items():
        if policy not in config.trained:
            if architecture.heads % tp:
                return False
            continue
        try:
            check_fit(architecture, layout)
        except ModelError:
            return False
    return True


def _with_tensor_parallelism(
    config: RunConfig, cluster: Cluster, tp: int, saving: _Saving
) -> RunConfig:
    """Return the config placed on all GPUs of the cluster, with this saving; it is not validated."""
    # Unless the run collects ahead, trainers are offloaded during the rollout, and engines sleep during
    # the update.
    offloads = not config.collects_ahead
    trainer: dict[str, Any] = {
        "tp": tp,
        "sp": tp > 1,
        "pp": 1,
        "vpp": 1,
        "cp": 1,
        "dp": cluster.gpus // tp,
        "ep": 1,
        "offload": offloads,
        "host_moments": saving.one_by_one,
        "overlap": None,
    }
    engine: dict[str, Any] = {"sleep": offloads}
    if config.engine.name == "sglang":
        engine |= {"tp": tp, "replicas": cluster.gpus // tp, "transport": "tensor"}
    else:
        engine["device"] = "cuda"
    policies = dict(config.policies)
    for policy in config.trained:
        stated = policies[policy].recompute
        changes = trainer | {"recompute": stated or saving.recompute}
        policies[policy] = policies[policy].model_copy(update=changes)
    return config.model_copy(
        update={
            "policies": policies,
            "engine": config.engine.model_copy(update=engine),
            "cluster": config.cluster.model_copy(
                update={"pool": "shared", "one_by_one": saving.one_by_one}
            ),
        }
    )


def _tensor_parallelism(config: RunConfig) -> int:
    """Return the tensor parallelism that a placement was made with.

    It is the largest `tp` of the engine and the trainers, because an embedded engine has 1 in any case.
    """
    return max(config.engine.tp, *(config.policies[policy].tp for policy in config.trained), 1)


def _with_slots_that_fit(config: RunConfig, models: Models, cluster: Cluster) -> RunConfig:
    """Lower the slots of an embedded engine to those for which there is memory, at least one."""
    if config.engine.name != "embedded":
        return config

    def with_slots(slots: int) -> RunConfig:
        return config.model_copy(
            update={"engine": config.engine.model_copy(update={"slots": slots})}
        )

    def peak_with_caches(slots: int) -> float:
        """Return the peak memory of the phases in which engines have their KV caches."""
        peak = estimate_peak_memory(with_slots(slots), models, cluster.gpu)
        if config.engine.sleep:  # engines that sleep have none during the update
            return peak.rollout
        return max(peak.update, peak.rollout)

    one_slot = peak_with_caches(1)
    slot_bytes = peak_with_caches(2) - one_slot  # keys, values and logits in each engine
    free = USABLE_SHARE * cluster.gpu.memory_bytes - one_slot
    slots_that_fit = max(1, 1 + int(free // slot_bytes))
    return with_slots(min(config.engine.slots, slots_that_fit))


def _describe_shortfall(
    config: RunConfig, models: Models, cluster: Cluster, closest: _Candidate | None
) -> str:
    """Return the error of a run that does not fit, with the smallest cluster that would do."""
    if closest is None:
        reason = f"no tensor parallelism divides both its models and {cluster.gpus} GPUs"
    else:
        reason = (
            f"the fullest GPU lacks {closest.shortfall / 1e9:.1f} GB with tp "
            f"{_tensor_parallelism(closest.config)}"
        )
    for policy in config.trained:
        stated = config.policies[policy].recompute
        if stated in ("none", "selective"):
            reason += f"; policies.{policy}.recompute: {stated} is kept, and recomputing more saves memory"
            break

    larger = [replace(cluster, gpus=gpus) for gpus in _CLUSTER_SIZES if gpus > cluster.gpus]
    for size in larger:
        candidate = _best_candidate(config, models, size)
        if candidate is not None and candidate.shortfall == 0:
            return f"{config.run}: nothing fits {cluster}; {reason}; the least that fits: {size}"
    largest = replace(cluster, gpus=_CLUSTER_SIZES[-1])
    return f"{config.run}: nothing fits {cluster}; {reason}; neither does anything up to {largest}"
