"""Tenants of a cluster: which processes of a run take a device each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mcore_mas.config.run import RunConfig, for_policy

Pool = Literal["shared", "split"]
Kind = Literal["GPU", "CPU"]
Part = Literal["trainer", "critic", "engine"]
GroupKey = tuple[str, Part]  # policy, part


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Processes that meet in one group and need a device each."""

    policy: str
    part: Part
    devices: int
    unit: int = 1  # so many of them, one after the other, must lie on one node


def tenants_of(config: RunConfig, kind: Kind) -> list[Tenant]:
    """Everything of a run that needs devices, policy by policy."""
    tenants = []
    for name, policy in config.policies.items():
        if name in config.trained:
            tenants.append(Tenant(policy=name, part="trainer", devices=policy.ranks, unit=policy.tp))
            if policy.critic is not None:
                tenants.append(Tenant(policy=name, part="critic", devices=policy.ranks, unit=policy.tp))
        if policy.remote is not None:
            continue
        engine = for_policy(config, name).engine
        if engine.name == "sglang" and not engine.urls and kind == "GPU":
            devices = engine.replicas * engine.tp
            tenants.append(Tenant(policy=name, part="engine", devices=devices, unit=engine.tp))
        if kind == "CPU" or engine.device == "cuda":  # else the embedded engine takes none of the GPUs
            tenants.append(Tenant(policy=name, part="engine", devices=1))
    return tenants


def needed(tenants: Sequence[Tenant], pool: Pool) -> int:
    """How many devices they take."""
    return (sum if pool == "split" else max)(tenant.devices for tenant in tenants) if tenants else 0
