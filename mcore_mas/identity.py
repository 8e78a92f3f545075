"""What the checkpoints of a run must be of."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcore_mas.checkpoint import Identity
from mcore_mas.config import RunConfig
from mcore_mas.megatron.models import read_architecture


def identity_of(config: RunConfig) -> Identity:
    """The run's name, and of every trained policy and critic the model and what of it is trained."""
    models: dict[str, dict[str, Any]] = {}
    for name in config.trained:
        policy = config.policies[name]
        lora = policy.lora
        adapted = lora and {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
        models[name] = {**asdict(read_architecture(Path(policy.model))), "lora": adapted}
        if policy.critic is not None:
            models[f"{name}.critic"] = models[name]
    return Identity(run=config.run, models=models)
