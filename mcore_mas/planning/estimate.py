"""Memory of a run by formula: the fullest GPU in each phase of a step, host memory, and disk.

Where its trainers and engines are, and how large, is read from the config of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mcore_mas.config.models import cold_start_architecture, layout_of
from mcore_mas.config.policy import policies_on_base
from mcore_mas.config.run import RunConfig
from mcore_mas.config.run_sections import engine_holder, for_policy
from mcore_mas.planning.gpus import GPU
from mcore_mas.planning.memory import (
    TrainerMemory,
    TrainerSettings,
    checkpoint_bytes,
    combine_on_rank,
    count_adapter_parameters,
    count_parameters,
    embedded_sequence_bytes,
    embedded_weight_bytes,
    engine_weight_bytes,
    estimate_trainer_memory,
    kv_bytes_per_token,
)
from mcore_mas.planning.worker_groups import GroupKey, Part
from rollout.engines.embedded.gpu_memory import logits_bytes, pass_bytes
from rollout.engines.sglang.gpu_memory import (
    adapter_bytes,
    prefill_bytes,
    prefill_tokens,
    scoring_bytes,
)
from rollout.engines.sglang.settings import PUSH_TRANSPORTS
from rollout.models.architecture import Architecture
from rollout.models.layout import ParallelLayout
from rollout.models.published_shapes import planned_architecture
from rollout.sync.transport import PUSHED_BUCKET_BYTES

Models = Mapping[str, Architecture]  # by policy

# Assumed, as no formula gives them; not measured.
USABLE_SHARE = 0.92  # share of a GPU's memory that a plan may fill
PROCESS_BYTES = 1.0e9  # GPU memory of the CUDA context of each process
# CUDA graphs of an SGLang server, which stay while it sleeps: 2 MB for each of 192 requests and
# 8 MB for each of 58 prompt lengths, as SGLang 0.5.23 reserves them (`reserve_for_graph_mb`).
GRAPH_BYTES = 0.9e9
# A server's KV cache also has room for the prefixes of sessions whose agents wait for each other,
# and for memory that loading leaves behind. It takes no more than this multiple of what its slots
# fill, or this number of bytes if that is more.
_KV_CACHE_FACTOR = 2
_MIN_KV_CACHE_LIMIT = 2e9


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Bytes on the fullest GPU of a run, in each phase of a step."""

    kv_cache: float  # of each engine, on each of its GPUs
    update: float  # trainers active, engines holding their weights
    rollout: float  # engines active, trainers offloaded where `offload` is set

    def shortfall(self, gpu: GPU) -> float:
        """Return the bytes that the fullest GPU lacks, or 0 if the run fits."""
        return max(0.0, max(self.update, self.rollout) - USABLE_SHARE * gpu.memory_bytes)


def load_architectures(config: RunConfig) -> dict[str, Architecture]:
    """Return the architecture of every policy's model.

    It is read from the model's config.json. A model that is not on this machine is looked up among
    the published ones, and one that a cold start will make is as `cold_start.base` says.

    Raises:
        ModelError: the architecture of a model is not known.
    """
    if config.cold_start is None:
        return {policy: planned_architecture(folder) for policy, folder in config.models.items()}
    return dict.fromkeys(
        config.models, cold_start_architecture(config.cold_start.base, "cold_start.base")
    )


def trainer_settings(
    config: RunConfig, name: str, *, fused: bool = True
) -> dict[Part, TrainerSettings]:
    """Return the memory settings of a policy's trainer and, if it has one, of its critic.

    Args:
        config: the run.
        name: name of the policy.
        fused: False if the trainer computes on CPUs.
    """
    policy = config.policies[name]
    agents = [
        agent for agent in config.agents.values() if agent.policy == name and agent.loss_weight > 0
    ]
    trainer = TrainerSettings(
        bf16=policy.bf16,
        distributed_optimizer=policy.distributed_optimizer,
        recompute=policy.recomputation,
        microbatch_tokens=for_policy(config, name).trainer.microbatch_tokens,
        fused=fused,
        host_moments=policy.host_moments,
        agents=len(agents),
        lora=policy.lora,
        borrows_base=config.holder(name) != name,
        layers=policy.layers,
        fp8=policy.fp8 is not None,
    )
    if policy.critic is None:
        return {"trainer": trainer}
    critic = replace(trainer, value_head=True, borrows_base=policy.share_base)
    return {"trainer": trainer, "critic": critic}


def estimate_trainers(
    config: RunConfig, models: Models, *, fused: bool = True
) -> dict[GroupKey, TrainerMemory]:
    """Estimate the memory of one rank of each trainer and critic, by policy and part.

    Args:
        config: the run.
        models: architecture of every policy.
        fused: False if the trainers compute on CPUs.
    """
    trainers: dict[GroupKey, TrainerMemory] = {}
    for policy in config.trained:
        layout = layout_of(config.policies[policy])
        for part, settings in trainer_settings(config, policy, fused=fused).items():
            trainers[policy, part] = estimate_trainer_memory(models[policy], layout, settings)
    return trainers


def trainers_by_ranks(config: RunConfig) -> list[list[GroupKey]]:
    """Return the trainers and critics, those that share their ranks in one list."""
    sharing: dict[GroupKey, list[GroupKey]] = {}
    for name in config.trained:
        policy = config.policies[name]
        parts: list[Part] = ["trainer"] if policy.critic is None else ["trainer", "critic"]
        for part in parts:
            rank_owner: GroupKey = (config.holder(name), "trainer" if policy.share_base else part)
            sharing.setdefault(rank_owner, []).append((name, part))
    return list(sharing.values())


def engine_weights(config: RunConfig, models: Models) -> dict[str, float]:
    """Return the bytes of weights on one GPU of each engine, by the policy that it belongs to.

    The weights of an engine that holds adapters are those of its frozen model and of the adapters.
    """
    weights = {}
    for policy, architecture in models.items():
        if engine_holder(config, policy) != policy:
            continue
        engine = for_policy(config, policy).engine
        adapters = _held_adapters(config, models, policy)
        if engine.name == "embedded":
            bf16 = config.policies[policy].bf16
            weights[policy] = embedded_weight_bytes(architecture, bf16=bf16)
            weights[policy] += 4 * sum(adapters)  # in float32
        else:
            weights[policy] = engine_weight_bytes(architecture, engine.tp)
            if adapters:
                weights[policy] += adapter_bytes(max(adapters), len(adapters))
    return weights


def _held_adapters(config: RunConfig, models: Models, policy: str) -> list[int]:
    """Return the parameters, on one GPU, of each adapter that the engine of this policy holds."""
    engine = for_policy(config, policy).engine
    takes_adapters = engine.adapters == "slots" or (
        engine.name == "embedded" and config.policies[policy].share_base
    )
    if not takes_adapters or policy not in config.trained:
        return []
    layout = ParallelLayout(tp=engine.tp)
    sizes = []
    for name in policies_on_base(config.policies, policy):
        lora = config.policies[name].lora
        if lora is not None:
            sizes.append(count_adapter_parameters(models[policy], layout, lora))
    return sizes


def estimate_peak_memory(config: RunConfig, models: Models, gpu: GPU) -> PeakMemory:
    """Estimate the peak GPU memory of a run in the update and the rollout phase.

    The KV cache of a server takes the remaining memory, but at most twice as much as all of its
    slots can fill or 2 GB, whichever is more, and at least one sequence of the maximum length. That
    of an embedded engine has a sequence of the maximum length in every slot.
    """
    if config.cluster.pool == "split":
        return _peak_of_split_pool(config, models, gpu)
    return _peak_of_shared_pool(config, models, gpu)


def _peak_of_split_pool(config: RunConfig, models: Models, gpu: GPU) -> PeakMemory:
    largest_trainer = max(_trainer_peaks(config, models), default=0.0)
    engines = _engine_memory(config, models, gpu)

    without_cache = max(engine.resting + engine.working for engine in engines)
    free = USABLE_SHARE * gpu.memory_bytes - without_cache
    kv_cache = _kv_cache_within(config, models, free)
    return PeakMemory(
        kv_cache=kv_cache,
        update=largest_trainer + PROCESS_BYTES,
        rollout=without_cache + kv_cache,
    )


def _peak_of_shared_pool(config: RunConfig, models: Models, gpu: GPU) -> PeakMemory:
    trainers = _trainer_memory(config, models)
    engines = _engine_memory(config, models, gpu)
    kept_while_idle = len(trainers) * PROCESS_BYTES + sum(engine.resting for engine in engines)
    working = sum(engine.working for engine in engines)

    # With `one_by_one` one trainer at a time is on the GPU. Otherwise all policies of a step are
    # trained at once, and engines receive new weights while other policies are still trained.
    peaks = _trainer_peaks(config, models)
    active_trainers = max(peaks, default=0.0) if config.cluster.one_by_one else sum(peaks)
    resting_trainers = 0.0
    for keys, trainer in zip(trainers_by_ranks(config), trainers, strict=True):
        policy, _ = keys[0]  # trainers that share their ranks are offloaded together
        if not config.policies[policy].offload:
            resting_trainers += trainer.persistent

    # Engines that sleep during the update have no KV cache then, and compute nothing.
    update = kept_while_idle + active_trainers
    rollout = kept_while_idle + resting_trainers + working
    fullest = rollout if config.engine.sleep else max(update + working, rollout)
    free = USABLE_SHARE * gpu.memory_bytes - fullest
    kv_cache = _kv_cache_within(config, models, free / len(engines))
    all_caches = kv_cache * len(engines)
    return PeakMemory(
        kv_cache=kv_cache,
        update=update if config.engine.sleep else update + working + all_caches,
        rollout=rollout + all_caches,
    )


def _trainer_memory(config: RunConfig, models: Models) -> list[TrainerMemory]:
    """Return the memory of one rank of each set of trainers that share their ranks."""
    trainers = estimate_trainers(config, models)
    return [combine_on_rank([trainers[key] for key in keys]) for keys in trainers_by_ranks(config)]


def _trainer_peaks(config: RunConfig, models: Models) -> list[float]:
    """Return the peak of one rank of each set of trainers that share their ranks.

    It is reached in the backward pass, or while full tensors are pushed to servers.
    """
    peaks = []
    for keys, memory in zip(
        trainers_by_ranks(config), _trainer_memory(config, models), strict=True
    ):
        pushed = [
            _pushed_bytes(config, models, policy) for policy, part in keys if part == "trainer"
        ]
        peaks.append(max(memory.peak, memory.persistent + max(pushed, default=0.0)))
    return peaks


def _pushed_bytes(config: RunConfig, models: Models, policy: str) -> float:
    """Return the full tensors that a rank holds at a time while it pushes weights to servers."""
    engine = for_policy(config, policy).engine
    if engine.transport not in PUSH_TRANSPORTS or engine.adapters == "slots":
        return 0.0
    weight_bytes = 2 if config.policies[policy].bf16 else 4
    all_tensors = weight_bytes * count_parameters(models[policy])
    return min(2 * PUSHED_BUCKET_BYTES, all_tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineMemory:
    """Bytes of an engine on each of its GPUs, without its KV cache."""

    resting: float  # weights, and what its process keeps while it sleeps
    working: float  # what it takes only while it computes


def _engine_memory(config: RunConfig, models: Models, gpu: GPU) -> list[_EngineMemory]:
    """Return the memory of each engine.

    A server that sleeps keeps its CUDA graphs, and with them the memory of a pass over prompts.
    """
    teachers = {teacher.policy for teacher in config.teachers.values()}
    engines = []
    for policy, weights in engine_weights(config, models).items():
        architecture = models[policy]
        engine = for_policy(config, policy).engine
        resting = weights + PROCESS_BYTES
        if engine.name == "embedded":
            working: float = logits_bytes(architecture, engine.slots) + pass_bytes(
                architecture,
                engine.max_length,
                bf16=config.policies[policy].bf16,
                adapters=bool(_held_adapters(config, models, policy)),
            )
        else:
            tokens = prefill_tokens(engine.options, gpu.memory)
            resting += GRAPH_BYTES + prefill_bytes(architecture, engine.tp, tokens)
            working = scoring_bytes(architecture, engine.tp) if policy in teachers else 0.0
        engines.append(_EngineMemory(resting=resting, working=working))
    return engines


def filled_kv_cache(config: RunConfig, models: Models) -> float:
    """Return the bytes of the largest KV cache of an engine if every slot has a sequence of the maximum length."""
    sizes = [
        for_policy(config, policy).engine.slots * sequence
        for policy, sequence in _sequence_bytes(config, models).items()
    ]
    return max(sizes)


def _sequence_bytes(config: RunConfig, models: Models) -> dict[str, float]:
    """Return the keys and values of a sequence of the maximum length on one GPU, by policy."""
    sizes: dict[str, float] = {}
    for policy, architecture in models.items():
        engine = for_policy(config, policy).engine
        if engine.name == "embedded":
            bf16 = config.policies[policy].bf16
            sizes[policy] = embedded_sequence_bytes(architecture, engine.max_length, bf16=bf16)
        else:
            sizes[policy] = kv_bytes_per_token(architecture, engine.tp) * engine.max_length
    return sizes


def _kv_cache_within(config: RunConfig, models: Models, free: float) -> float:
    """Return the bytes of an engine's KV cache, given the free bytes and the bounds of the cache."""
    filled = filled_kv_cache(config, models)
    if config.engine.name == "embedded":
        return filled
    lower = max(_sequence_bytes(config, models).values())
    upper = max(_KV_CACHE_FACTOR * filled, _MIN_KV_CACHE_LIMIT)
    return min(upper, max(lower, free))


def estimate_host_memory(config: RunConfig, models: Models) -> float:
    """Estimate the bytes of host memory that the trainers of a run take on all machines together.

    A rank has in host memory the weights of the reference and of earlier versions, and the moments
    that are kept there. It also has, at different times, its offloaded state and the sum of the
    agents' gradients. Saving a checkpoint takes a copy of the checkpoint.
    """
    checkpoints = [
        checkpoint_bytes(models[policy], trainer_settings(config, policy).values())
        for policy in config.trained
    ]
    ranks = 0.0
    for (name, part), memory in estimate_trainers(config, models).items():
        policy = config.policies[name]
        offloaded = memory.weights + memory.optimizer if policy.offload else 0.0
        uses_reference = for_policy(config, name).loss.kl.coef > 0 and part == "trainer"
        # With adapters, the reference is the model without them, which is in memory already.
        reference = memory.weights if uses_reference and policy.lora is None else 0.0
        # Copies of the weights that sampled the replies; with adapters only those are copied.
        keeps_versions = for_policy(config, name).loss.scores_with_sampling_weights
        versions = 0.0
        if keeps_versions and part == "trainer" and policy.lora is None:
            versions = memory.weights * config.staleness_of(name)

        per_rank = max(offloaded, memory.host_gradient_sum) + memory.host_moments
        per_rank += reference + versions
        ranks += per_rank * policy.ranks
    return sum(checkpoints) + ranks


def estimate_disk(config: RunConfig, models: Models) -> float:
    """Estimate the bytes on disk of the checkpoints and the finished models of a run."""
    # One more checkpoint than is kept, as the oldest is removed after the newest is written.
    checkpoints = config.trainer.keep_checkpoints + config.keep_best + 1
    total = 0.0
    for policy in config.trained:
        trainers = trainer_settings(config, policy).values()
        total += checkpoints * checkpoint_bytes(models[policy], trainers)
        weight_bytes = 2 if config.policies[policy].bf16 else 4
        total += weight_bytes * count_parameters(models[policy])
    return total
