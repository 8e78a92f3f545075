"""Specifications of the trainer and the critic of a policy, made from the config of a run."""

from dataclasses import fields
from typing import Any

from mcore_mas.config.policy import PolicyConfig, RateConfig
from mcore_mas.config.run import RunConfig
from mcore_mas.config.run_sections import for_policy, schedule_length
from mcore_mas.equations.losses import Objective, ValueObjective
from mcore_mas.megatron.spec import TrainerSpec
from rollout.engines.sglang.arguments import nccl_cumem
from rollout.records.seeds import derive_seed

# Fields of a TrainerSpec that have the same name in the config.
_RATE_FIELDS = frozenset(RateConfig.model_fields)
_POLICY_FIELDS = (
    {field.name for field in fields(TrainerSpec)} & PolicyConfig.model_fields.keys()
) - _RATE_FIELDS


def policy_spec(name: str, config: RunConfig) -> TrainerSpec:
    """Return the specification of the trainer of a policy."""
    loss = for_policy(config, name).loss
    objective = Objective(
        loss=loss.name,
        options=loss.arguments,
        kl=loss.kl.estimate,
        correction=loss.correction.name,
        correction_options=loss.correction.arguments,
    )
    balance = config.trained_agents(name) if loss.balance == "agents" else None
    scales_lr = loss.lr_scale == "effective_samples"
    return _make_spec(
        name,
        config,
        config.policies[name],
        objective=objective,
        balance=balance,
        effective_samples=config.collects_ahead or scales_lr,
        scales_lr=scales_lr,
    )


def critic_spec(name: str, config: RunConfig) -> TrainerSpec:
    """Return the specification of the critic of a policy, which trains adapters if the policy does."""
    critic = config.policies[name].critic
    assert critic is not None
    lora = config.policies[name].lora
    if lora is not None:
        lora = lora.model_copy(update={"adapter": None})  # the policy's adapter is not the critic's
    objective = ValueObjective(clip=critic.clip)
    return _make_spec(name, config, critic, lora=lora, objective=objective, head="value")


def _make_spec(name: str, config: RunConfig, rate: RateConfig, **overrides: Any) -> TrainerSpec:
    """Return a specification with the settings that a policy and its critic have in common.

    Args:
        name: the policy.
        config: the run.
        rate: learning rate and its schedule, of the policy or the critic.
        overrides: other fields of the specification.
    """
    policy = config.policies[name]
    engine = for_policy(config, name).engine
    settings = {field: getattr(policy, field) for field in _POLICY_FIELDS}
    settings |= {field: getattr(rate, field) for field in _RATE_FIELDS}
    settings["overlap"] = policy.overlaps
    settings["recompute"] = policy.recomputation
    settings["deterministic"] = config.engine.deterministic
    settings["lora_seed"] = derive_seed(config.seed, "lora", name)
    of_critic = rate is not policy
    settings["decay_steps"] = rate.decay_steps or schedule_length(config, name, of_critic=of_critic)
    if engine.transport == "distributed":  # NCCL needs the same setting in all ranks of a group
        settings["cumem"] = nccl_cumem(engine.options, engine.environment)
    settings |= overrides
    return TrainerSpec(**settings)
