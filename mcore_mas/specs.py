"""What the trainers of a run are told: each policy's section of the config, with what the run adds to it."""

from __future__ import annotations

from typing import Any

from mcore_mas.config import RunConfig
from mcore_mas.core.losses import Objective, ValueObjective
from mcore_mas.megatron.spec import LoraSpec, TrainerSpec
from mcore_mas.policy_config import RateConfig
from rollout.seeds import derive_seed


def policy_spec(name: str, config: RunConfig) -> TrainerSpec:
    """What the trainer of policy `name` needs to know."""
    loss, policy = config.loss, config.policies[name]
    objective = Objective(
        loss=loss.name,
        options=loss.options,
        kl=loss.kl.estimate,
        correction=loss.correction.name,
        correction_options=loss.correction.options,
    )
    adapter = policy.lora.adapter if policy.lora is not None else None
    return _spec(name, config, policy, lora=_lora(name, config, adapter), objective=objective)


def critic_spec(name: str, config: RunConfig) -> TrainerSpec:
    """What the trainer of the critic of policy `name` needs to know: with adapters where the policy has them."""
    critic = config.policies[name].critic
    assert critic is not None
    objective = ValueObjective(clip=critic.clip)
    return _spec(name, config, critic, lora=_lora(name, config, None), objective=objective, head="value")


def _lora(name: str, config: RunConfig, adapter: str | None) -> LoraSpec | None:
    lora = config.policies[name].lora
    if lora is None:
        return None
    seed = derive_seed(config.seed, "lora", name)
    return LoraSpec(rank=lora.rank, alpha=lora.alpha, targets=lora.targets, adapter=adapter, seed=seed)


def _spec(name: str, config: RunConfig, rate: RateConfig, **own: Any) -> TrainerSpec:
    """What a policy's trainer and its critic's have in common, and their `own` settings."""
    policy = config.policies[name]
    return TrainerSpec(
        model=policy.model,
        lr=rate.lr,
        warmup_steps=rate.warmup_steps,
        schedule=rate.schedule,
        min_lr=rate.min_lr,
        decay_steps=rate.decay_steps or config.updates_of(name),
        tp=policy.tp,
        pp=policy.pp,
        vpp=policy.vpp,
        cp=policy.cp,
        dp=policy.dp,
        ep=policy.ep,
        sp=policy.sp,
        distributed_optimizer=policy.distributed_optimizer,
        overlap=policy.overlap,
        recompute=policy.recompute,
        layers=policy.layers,
        bf16=policy.bf16,
        betas=policy.betas,
        eps=policy.eps,
        weight_decay=policy.weight_decay,
        clip_grad=policy.clip_grad,
        spike_factor=policy.spike_factor,
        skip_spikes=policy.skip_spikes,
        **own,
    )
