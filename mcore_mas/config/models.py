"""Checks that the models of a run can be trained and served as the config says."""

from dataclasses import fields
from pathlib import Path

from mcore_mas.config.cold_start import BaseModelConfig
from mcore_mas.config.policy import PolicyConfig
from mcore_mas.config.run import RunConfig
from mcore_mas.config.run_sections import for_policy
from rollout.base.errors import ModelError
from rollout.models.architecture import Architecture, parse_architecture, read_architecture
from rollout.models.layout import ParallelLayout, check_fit


def layout_of(policy: PolicyConfig) -> ParallelLayout:
    """Return the parallel layout of a policy's trainer."""
    values = {field.name: getattr(policy, field.name) for field in fields(ParallelLayout)}
    return ParallelLayout(**values)


def cold_start_architecture(base: BaseModelConfig, name: str) -> Architecture:
    """Return the architecture of the model that a cold start makes; errors call it by `name`."""
    return parse_architecture({"model_type": "qwen2", **base.transformers_settings}, name)


def check_model(config: RunConfig, name: str, model: Path | Architecture) -> None:
    """Refuse a policy whose model cannot be trained or served as its config says.

    Args:
        name: the policy.
        model: the folder of its model, or the architecture.

    Raises:
        ModelError: the folder has no model, or `layers`, the parallel layout, the LoRA targets, `fp8_recipe`,
            `engine.router_replay` or `engine.max_length` does not fit the model or the devices.
    """
    policy = config.policies[name]
    targets = policy.lora.targets if policy.lora else ()
    try:
        architecture = read_architecture(model) if isinstance(model, Path) else model
        if policy.layers == "te" and config.cluster.device == "cpu":
            raise ModelError(
                "layers: te runs on GPUs only, and cluster.device is cpu; use layers: local, or cluster.device: auto"
            )
        fp8_recipe = policy.fp8_recipe if policy.fp8 else None
        check_fit(architecture, layout_of(policy), policy.layers, targets, fp8_recipe)
    except ModelError as error:
        raise ModelError(f"policies.{name}: {error}") from None

    engine = for_policy(config, name).engine
    if engine.router_replay and architecture.experts is None:
        raise ModelError(
            f"policies.{name}: engine.router_replay is for mixtures of experts, and {policy.model} is dense; "
            f"set policies.{name}.overrides.engine.router_replay: false"
        )
    if engine.max_length > architecture.positions:
        raise ModelError(
            f"policies.{name}: engine.max_length {engine.max_length} is more than the "
            f"{architecture.positions} positions of {policy.model}; use at most {architecture.positions}"
        )
