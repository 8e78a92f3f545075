"""Specifications of a policy's trainer and of its critic, made from the configuration of a run."""

from dataclasses import fields
from typing import Any

from mcore_mas.config.policy import PolicyConfig, RateConfig
from mcore_mas.config.run import RunConfig, for_policy, updates_in_schedule
from mcore_mas.equations.losses import Objective, ValueObjective
from mcore_mas.megatron.spec import TrainerSpec
from rollout.engines.sglang.arguments import cumem
from rollout.records.seeds import derive_seed


def policy_spec(name: str, config: RunConfig) -> TrainerSpec:
    """What the trainer of policy `name` needs to know."""
    loss, policy = for_policy(config, name).loss, config.policies[name]
    objective = Objective(
        loss=loss.name,
        options=loss.arguments,
        kl=loss.kl.estimate,
        correction=loss.correction.name,
        correction_options=loss.correction.arguments,
    )
    return _spec(name, config, policy, objective=objective)


def critic_spec(name: str, config: RunConfig) -> TrainerSpec:
    """What the trainer of the critic of policy `name` needs to know: with adapters where the policy has them."""
    critic, lora = config.policies[name].critic, config.policies[name].lora
    assert critic is not None
    fresh = lora and lora.model_copy(update={"adapter": None})
    return _spec(
        name, config, critic, lora=fresh, objective=ValueObjective(clip=critic.clip), head="value"
    )


# settings that a trainer has by the names that they have in a config
_OF_RATE = frozenset(RateConfig.model_fields)
_OF_POLICY = {
    field.name for field in fields(TrainerSpec)
} & PolicyConfig.model_fields.keys() - _OF_RATE


def _spec(name: str, config: RunConfig, rate: RateConfig, **own: Any) -> TrainerSpec:
    """What a policy's trainer and its critic's have in common, and their `own` settings."""
    policy = config.policies[name]
    settings = {key: getattr(policy, key) for key in _OF_POLICY} | {
        key: getattr(rate, key) for key in _OF_RATE
    }
    settings["deterministic"] = config.engine.deterministic
    engine = for_policy(config, name).engine
    if engine.transport == "distributed":  # all of an NCCL group say the same
        settings["cumem"] = cumem(engine.options, engine.environment)
    settings["lora_seed"] = derive_seed(config.seed, "lora", name)
    settings["decay_steps"] = rate.decay_steps or updates_in_schedule(config, name)
    return TrainerSpec(**{**settings, **own})
