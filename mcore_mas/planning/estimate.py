"""Estimate of a run in one placement: the fullest GPU in each phase, seconds of a step, hours, disk; pure functions."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

from mcore_mas.config.run import RunConfig, for_policy
from mcore_mas.planning.memory import (
    GPU,
    TrainerKind,
    TrainerMemory,
    checkpoint_bytes,
    count_parameters,
    engine_weights,
    kv_bytes,
    rank_parameters,
    trainer_memory,
)
from rollout.models.architecture import Architecture
from rollout.models.layout import ParallelLayout, Recompute

_GB = 1e9
Models = Mapping[str, Architecture]  # of policies


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What no formula gives; none is measured on these GPUs."""

    usable: float = 0.92  # share of a GPU's memory that is planned with
    process: float = 1.0  # GB of a GPU that every process on it takes for itself
    graphs: float = 0.9  # GB of a server's GPU, asleep too, that SGLang sets aside for CUDA graphs of 192 requests
    train_mfu: float = 0.25  # share of the peak that an update reaches, recomputation not counted
    score_mfu: float = 0.35  # share that passes without gradients reach: reference, critic, prompts
    decode: float = 0.5  # share of the memory bandwidth that decoding reaches
    link: float = 200.0  # GB/s at which a GPU exchanges sums with others, of one machine or several
    latency: float = 1e-5  # s of a small exchange between a server's GPUs
    copies: float = 20.0  # GB/s of each GPU, between its memory and the host's, or to an engine
    reply: float = 0.5  # share of max_tokens that a mean reply takes
    prompt: float = 0.25  # share of the room for a prompt that a mean prompt takes


ASSUMED = Assumptions()
# forward passes that an update takes as long as; what selective recomputation adds is by the meter (docs/gpu.md)
PASSES: dict[Recompute, float] = {"none": 3.0, "selective": 3.1, "full": 4.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the parts of a run lie, and how they make room for each other."""

    pool: Literal["shared", "split"]
    layouts: Mapping[str, ParallelLayout]  # of every trained policy, and of its critic
    replicas: int  # servers of each policy
    engine_tp: int
    colocated: bool = False  # trainers are offloaded and engines sleep in turn
    one_by_one: bool = (
        False  # ... and of the trainers one has its memory, and Adam's moments are in the host's
    )
    recompute: Recompute = "full"
    tokens: int  # of a micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One policy's turns in a step, at most as many as its orchestra plays, of mean length."""

    turns: float
    depth: float  # of those, how many of one trajectory follow each other
    prompt: float  # tokens of a turn
    reply: float
    updates: float  # optimizer steps
    passes: int  # over the turns

    @property
    def tokens(self) -> float:
        """Tokens that train in a step, shared prefixes counted each time."""
        return self.turns * (self.prompt + self.reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """A run in a placement. Memory is of the fullest GPU, in bytes."""

    trainers: Mapping[tuple[str, str], TrainerMemory]  # of one rank, by policy and part
    weights: Mapping[str, float]  # of an engine's GPU, by policy
    kv: float  # each engine's room for keys and values, on each of its GPUs
    update: float  # the fullest GPU while policies are trained and their weights handed over
    rollout: float  # ... and while the team acts
    tokens: float  # trained in a step
    seconds: Mapping[str, float]  # of a step, by part
    hours: float
    host: float  # bytes of all machines' memory that trainers take
    disk: float  # bytes of checkpoints and finished models
    lack: float  # bytes that the fullest GPU is short of; 0: it fits

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())


def workloads(config: RunConfig) -> dict[str, Workload]:
    """Every policy's turns in a step, if each agent speaks in all rounds that its orchestra allows."""
    options, trainer = config.orchestra.options, config.trainer
    rounds = max((options.get(key) or 1 for key in ("max_turns", "max_loops", "rounds")), default=1)
    width = trainer.branching.width if trainer.branching is not None else 1
    trajectories = trainer.tasks_per_step * trainer.group_size * trainer.oversample
    found = {}
    for policy in config.policies:
        own_trainer = for_policy(config, policy).trainer
        own = [agent for agent in config.agents.values() if agent.policy == policy]
        each = options["max_nodes"] / len(config.agents) if options.get("max_nodes") else rounds
        room = sum(max(0, config.engine.max_length - agent.max_tokens) for agent in own) / len(own)
        turns = trajectories * width * each * len(own)
        parts = (
            max(1.0, turns / own_trainer.minibatch)
            if own_trainer.minibatch
            else own_trainer.updates_per_step
        )
        found[policy] = Workload(
            turns=turns,
            depth=each * len(own),
            prompt=ASSUMED.prompt * room,
            reply=ASSUMED.reply * sum(agent.max_tokens for agent in own) / len(own),
            updates=own_trainer.passes * parts,
            passes=own_trainer.passes,
        )
    return found


def trainer_kinds(config: RunConfig, policy: str, placement: Placement) -> dict[str, TrainerKind]:
    """A policy's trainer and, where it has one, its critic, by part."""
    own = config.policies[policy]
    kind = TrainerKind(
        bf16=own.bf16,
        distributed_optimizer=own.distributed_optimizer,
        recompute=placement.recompute,
        tokens=_own(own.own.trainer.get("microbatch_tokens"), placement.tokens),
        host_moments=placement.one_by_one,
        agents=sum(
            agent.policy == policy and agent.loss_weight > 0 for agent in config.agents.values()
        ),
        lora=own.lora,
        on_base=config.holder(policy) != policy,
    )
    critics = (
        {"critic": replace(kind, value_head=True, on_base=own.share_base)}
        if own.critic is not None
        else {}
    )
    return {"trainer": kind, **critics}


def _own(own: object, runs: int) -> int:
    """A setting of a policy, or the run's."""
    return own if isinstance(own, int) else runs


def memory_of_trainers(
    config: RunConfig, models: Models, placement: Placement
) -> dict[tuple[str, str], TrainerMemory]:
    """What one rank of each trainer and critic holds, by policy and part."""
    return {
        (policy, part): trainer_memory(models[policy], placement.layouts[policy], kind)
        for policy in config.trained
        for part, kind in trainer_kinds(config, policy, placement).items()
    }


def rank_sets(config: RunConfig, policies: Collection[str]) -> list[list[tuple[str, str]]]:
    """(policy, part) of the trainers and critics of `policies`, those together that are on the same ranks."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for policy in policies:
        own = config.policies[policy]
        for part in ("trainer", "critic") if own.critic is not None else ("trainer",):
            key = (config.holder(policy), "trainer" if own.share_base else part)
            found.setdefault(key, []).append((policy, part))
    return list(found.values())


def estimate_run(config: RunConfig, models: Models, placement: Placement, gpu: GPU) -> RunEstimate:
    """What a run takes in a placement on GPUs of one kind, with `models` of these shapes by policy."""
    works = workloads(config)
    trainers, weights, (kv, update, rollout) = _held(config, models, placement, gpu)
    seconds = step_seconds(config, models, placement, gpu, kv=max(kv, 1.0), works=works)
    kinds = {policy: trainer_kinds(config, policy, placement) for policy in config.trained}
    kept = (
        config.trainer.keep_checkpoints + config.trainer.keep_best + 1
    )  # and the one that is being written
    disk = sum(
        kept * checkpoint_bytes(models[policy], own) + 2 * count_parameters(models[policy])
        for policy, own in kinds.items()
    )
    return RunEstimate(
        trainers=trainers,
        weights=weights,
        kv=kv,
        update=update,
        rollout=rollout,
        tokens=sum(work.tokens for name, work in works.items() if name in config.trained),
        seconds=seconds,
        hours=config.trainer.steps * sum(seconds.values()) / 3600,
        host=host_bytes(config, models, placement),
        disk=disk,
        lack=_lack(update, rollout, gpu),
    )


def rank_of(
    config: RunConfig, models: Models, placement: Placement, gpu: GPU, works: Mapping[str, Workload]
) -> tuple[float, float]:
    """(bytes that the fullest GPU lacks, seconds of a step; 0 where it lacks any): what `choose` has the least of.

    It is of `estimate_run` what has to be known of every placement; `works` are the `workloads` of the run.
    """
    _, _, (kv, update, rollout) = _held(config, models, placement, gpu)
    lack = _lack(update, rollout, gpu)
    return lack, 0.0 if lack else sum(
        step_seconds(config, models, placement, gpu, max(kv, 1.0), works).values()
    )


def _lack(update: float, rollout: float, gpu: GPU) -> float:
    return max(0.0, max(update, rollout) - ASSUMED.usable * gpu.memory * _GB)


def _held(
    config: RunConfig, models: Models, placement: Placement, gpu: GPU
) -> tuple[dict[tuple[str, str], TrainerMemory], dict[str, float], tuple[float, float, float]]:
    """(memory of each trainer's rank, weights of each engine's GPU, sizes of the phases).

    These are keys and values of an engine's GPU, the fullest GPU of an update and the fullest of a rollout. Keys and
    values take what is left, at most what all slots can fill and at least one longest sequence.
    """
    trainers = memory_of_trainers(config, models, placement)
    weights = {policy: engine_weights(a, placement.engine_tp) for policy, a in models.items()}
    usable, context = ASSUMED.usable * gpu.memory * _GB, ASSUMED.process * _GB
    serving = context + ASSUMED.graphs * _GB  # of a server, beside weights, keys and values
    ranks = [
        reduce(TrainerMemory.beside, (trainers[key] for key in own))
        for own in rank_sets(config, config.trained)
    ]
    own = {policy: config.policies[policy].own.engine for policy in models}
    longest = {  # sequence of each policy
        policy: kv_bytes(a, placement.engine_tp)
        * _own(own[policy].get("max_length"), config.engine.max_length)
        for policy, a in models.items()
    }
    least = max(longest.values())
    most = max(
        size * _own(own[policy].get("slots"), config.engine.slots)
        for policy, size in longest.items()
    )
    if placement.pool == "split":
        kv = min(most, max(least, usable - max(weights.values()) - serving))
        phases = (
            kv,
            max(memory.total for memory in ranks) + context,
            max(weights.values()) + kv + serving,
        )
        return trainers, weights, phases
    contexts = context * len(ranks) + serving * len(weights)
    together = max if placement.one_by_one else sum
    trained, kept = together(m.total for m in ranks), sum(m.kept for m in ranks)
    engines = sum(weights.values())
    # engines take new weights while other policies are still trained
    beside = {
        "update": trained + engines,
        "rollout": engines + (0 if placement.colocated else kept),
    }
    fullest = beside["rollout"] if placement.colocated else max(beside.values())
    kv = min(most, max(least, (usable - contexts - fullest) / len(weights)))
    room = kv * len(weights)
    update = beside["update"] + contexts + (0 if placement.colocated else room)
    return trainers, weights, (kv, update, beside["rollout"] + contexts + room)


def host_bytes(config: RunConfig, models: Models, placement: Placement) -> float:
    """Host memory of all machines that trainers take.

    In one place are in turn what is offloaded and the sum of other agents' gradients. Beside it are moments, the
    reference's weights, and the newest checkpoint.
    """
    total = sum(
        checkpoint_bytes(models[p], trainer_kinds(config, p, placement)) for p in config.trained
    )
    for (policy, part), memory in memory_of_trainers(config, models, placement).items():
        in_turn = max((memory.weights + memory.optimizer) * placement.colocated, memory.summed)
        own = in_turn + memory.weights * _referred(config, policy, part) + memory.on_host
        total += own * placement.layouts[policy].ranks
    return total


def _referred(config: RunConfig, policy: str, part: str) -> bool:
    """Whether weights of the reference stand in for those of this trainer."""
    return bool(config.loss.kl.coef) and part == "trainer" and config.policies[policy].lora is None


def step_seconds(
    config: RunConfig,
    models: Models,
    placement: Placement,
    gpu: GPU,
    kv: float,
    works: Mapping[str, Workload],
) -> dict[str, float]:
    """Seconds of a step by part; tools, validations and waiting for a slow environment are not in it.

    Policies on GPUs of their own work side by side, those that share them one after the other. What staleness hides
    is not taken off.
    """
    joined = max if placement.pool == "split" else sum
    acting = joined(_rollout_s(config, models[p], works[p], placement, gpu, kv) for p in models)
    depth = sum(works[p].depth * _turn_s(models[p], works[p], placement, gpu) for p in models)
    alone = {p: _update_s(config, p, models[p], works[p], placement, gpu) for p in config.trained}
    updating = joined(
        sum(alone[p] for p, part in keys if part == "trainer") for keys in rank_sets(config, alone)
    )
    moved = joined(
        engine_weights(models[p], 1) / placement.layouts[p].tp
        + 2 * _parked(config, p, models[p], works[p].updates, placement)
        for p in config.trained
    )
    return {
        "rollout": max(acting, depth),
        "update": updating,
        "copies": moved / (ASSUMED.copies * _GB),
    }


def _parked(
    config: RunConfig, policy: str, a: Architecture, updates: float, placement: Placement
) -> float:
    """Bytes of a step that go from a GPU of a policy's trainers to its host and come back."""
    kinds, total = trainer_kinds(config, policy, placement), 0.0
    # of those one by one policy and critic take turns at every update, and once before to score
    times = (
        1 + (updates if len(kinds) > 1 else 1) * placement.one_by_one if placement.colocated else 0
    )
    for part, kind in kinds.items():
        memory = trainer_memory(a, placement.layouts[policy], kind)
        total += times * (memory.weights + memory.optimizer) + 2 * memory.weights * _referred(
            config, policy, part
        )
        total += updates * (memory.on_host + (kind.agents - 1) * memory.summed)
    return total


def _rollout_s(
    config: RunConfig, a: Architecture, work: Workload, placement: Placement, gpu: GPU, kv: float
) -> float:
    """Seconds in which a policy's servers read its prompts and write its replies, all of them busy.

    A step of decoding reads the weights once and every row's keys and values (Pope et al. 2022, arXiv 2211.05102).
    """
    held = work.prompt + work.reply / 2
    fitting = max(1.0, kv / (kv_bytes(a, placement.engine_tp) * held))
    rows = min(config.engine.slots, fitting, max(1.0, work.turns / work.depth / placement.replicas))
    read = engine_weights(a, placement.engine_tp) + rows * held * kv_bytes(a, placement.engine_tp)
    step = read / (ASSUMED.decode * gpu.bandwidth * 1e12) + _exchanges_s(a, placement)
    decoding = work.turns * work.reply / (rows * placement.replicas) * step
    prompts = work.turns * _forward_flops(a, work.prompt)
    peak = ASSUMED.score_mfu * gpu.flops * 1e12 * placement.replicas * placement.engine_tp
    return decoding + prompts / peak


def _turn_s(a: Architecture, work: Workload, placement: Placement, gpu: GPU) -> float:
    """Seconds of a longest reply by itself: a trajectory's turns wait for each other, whatever is free."""
    read = engine_weights(a, placement.engine_tp) / (ASSUMED.decode * gpu.bandwidth * 1e12)
    return work.reply / ASSUMED.reply * (read + _exchanges_s(a, placement))


def _exchanges_s(a: Architecture, placement: Placement) -> float:
    """Seconds in which a server's GPUs add up what each has of two products a layer, in a step of decoding."""
    return 2 * a.layers * ASSUMED.latency * (placement.engine_tp > 1)


def _update_s(
    config: RunConfig, policy: str, a: Architecture, work: Workload, placement: Placement, gpu: GPU
) -> float:
    """Seconds of a policy's update, its critic's, and of the passes before them.

    A forward pass and a backward pass of twice as much (Kaplan et al. 2020, arXiv 2001.08361, §2.1), full recomputation
    makes it four; the reference and a critic score once more.
    """
    forward, updates = work.turns * _forward_flops(a, work.prompt + work.reply), work.updates
    models = 2 if config.policies[policy].critic is not None else 1
    scores = (1 if config.loss.kl.coef else 0) + (models - 1)
    scores += 1 if updates > 1 and config.loss.correction.name != "none" else 0
    # on GPUs of their own a critic works beside its policy
    beside = 1 if placement.pool == "split" and not config.policies[policy].share_base else models
    layout, tokens = placement.layouts[policy], work.tokens
    passes = (
        beside * work.passes * PASSES[placement.recompute] / ASSUMED.train_mfu
        + scores / ASSUMED.score_mfu
    )
    computing = forward * passes / (layout.ranks * gpu.flops * 1e12)
    microbatches = max(
        1.0, tokens / (placement.tokens * layout.dp * layout.cp * updates / work.passes)
    )
    bubble = 1 + (layout.pp - 1) / microbatches  # Narayanan et al. 2021 (arXiv 2104.04473, §2.2)
    # two sums a layer and pass over the hidden states of a token (Shoeybi et al. 2019, arXiv 1909.08053, §3), of which
    # a ring sends each rank's part twice; gradients likewise, once an update
    sums = 2 * (3 if placement.recompute == "full" else 2) * beside + 2 * scores
    per_token = sums * a.layers / layout.pp * 2 * a.hidden * 2 * (layout.tp - 1) / layout.tp
    exchanged = tokens / (layout.dp * layout.cp) * per_token
    exchanged += updates * beside * 4 * rank_parameters(a, layout) * 2 * (layout.dp > 1)
    return computing * bubble + exchanged / (ASSUMED.link * _GB)


def _forward_flops(a: Architecture, tokens: float) -> float:
    """Of a forward pass over one sequence: 2 per parameter and token, and 2 h per pair of tokens and layer, halved."""
    experts = a.experts
    active = float(count_parameters(a))
    if experts is not None:
        idle = 3 * a.hidden * experts.ffn * (experts.count - experts.per_token)
        active -= sum(experts.sparse) * idle
    embedding = 0 if a.tied else a.vocab * a.hidden
    return tokens * (2 * (active - embedding) + 2 * a.layers * a.heads * a.head_dim * tokens)
