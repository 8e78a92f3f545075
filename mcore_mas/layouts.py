"""Whether every policy's model can be cut, and can see as far, as a config says."""

from __future__ import annotations

from pathlib import Path

from mcore_mas.config import RunConfig
from mcore_mas.megatron.models import ModelError, check_layers, read_architecture


def check_layouts(config: RunConfig) -> None:
    """Refuse a config whose models cannot be trained as it says.

    Raises:
        ModelError: which policy, why not, and the nearest that can be.
    """
    for name, model in config.models.items():
        policy = config.policies[name]
        try:
            architecture = read_architecture(Path(model))
            architecture.check_layout(
                policy.tp, policy.pp, policy.vpp, dp=policy.dp, ep=policy.ep, sp=policy.sp, cp=policy.cp
            )
            if policy.lora is not None:
                architecture.check_adapters(policy.lora.targets)
            check_layers(policy.layers)
        except ModelError as error:
            raise ModelError(f"policies.{name}: {error}") from None
        if config.engine.max_length > architecture.positions:
            raise ModelError(
                f"policies.{name}: engine.max_length {config.engine.max_length} is more than the "
                f"{architecture.positions} positions of {policy.model}; use at most {architecture.positions}"
            )
