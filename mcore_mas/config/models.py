"""Models of a run: where a name leads, and whether each can be trained and asked as the config says."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from mcore_mas.config.policy import BaseModelConfig, PolicyConfig
from mcore_mas.config.run import RunConfig, for_policy
from rollout.base.errors import ModelError
from rollout.models.architecture import Architecture, architecture_of, read_architecture
from rollout.models.layout import ParallelLayout, check_fit


def layout_of(policy: PolicyConfig) -> ParallelLayout:
    """The ranks of a policy's trainer."""
    return ParallelLayout(
        **{field.name: getattr(policy, field.name) for field in fields(ParallelLayout)}
    )


def made_sizes(base: BaseModelConfig) -> dict[str, Any]:
    """The sizes of the model that a cold start makes, as its config.json has them."""
    keys = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
    keys |= {"kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "vocab": "vocab_size"}
    keys |= {"positions": "max_position_embeddings"}
    return {key: getattr(base, name) for name, key in keys.items()} | {"tie_word_embeddings": True}


def cold_started(base: BaseModelConfig, where: str) -> Architecture:
    """The architecture of the model that a cold start makes."""
    return architecture_of({"model_type": "qwen2", **made_sizes(base)}, where)


def check_layout(config: RunConfig, name: str, model: Path | Architecture) -> None:
    """Refuse a policy whose model, in a folder or by its sizes, cannot be trained as its config says.

    Raises:
        ModelError: which policy, why not, and the nearest that can be; or the folder holds no model.
    """
    policy = config.policies[name]
    try:
        architecture = read_architecture(model) if isinstance(model, Path) else model
        check_fit(
            architecture,
            layout_of(policy),
            policy.layers,
            policy.lora.targets if policy.lora else (),
        )
    except ModelError as error:
        raise ModelError(f"policies.{name}: {error}") from None
    engine = for_policy(config, name).engine
    if engine.router_replay and architecture.experts is None:
        raise ModelError(
            f"policies.{name}: engine.router_replay is of mixtures of experts, and {policy.model} is dense; "
            f"set policies.{name}.own.engine.router_replay: false"
        )
    length = engine.max_length
    if length > architecture.positions:
        raise ModelError(
            f"policies.{name}: engine.max_length {length} is more than the "
            f"{architecture.positions} positions of {policy.model}; use at most {architecture.positions}"
        )
