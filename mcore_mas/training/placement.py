"""Placement (colocation): which devices each policy's trainer, critic and engine take, together or apart."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcore_mas.config.run import RunConfig, for_policy
from mcore_mas.planning.tenants import GroupKey, Kind, Pool, Tenant, needed, tenants_of
from rollout.engines.sglang.server import visible_gpus

Options = dict[str, Any]  # of a Ray actor

_WAIT_S = 60.0
_FINEST = 10_000  # parts of a device that Ray tells apart


class PlacementError(ValueError):
    """A run's processes do not fit the devices there are: one line with what each policy needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The devices of this machine that a run takes."""

    kind: Kind
    pool: Pool
    tenants: Sequence[Tenant]
    devices: int

    @property
    def cpus(self) -> int:
        """How many CPUs Ray is told of; its GPUs it counts itself."""
        return self.devices if self.kind == "CPU" else 1

    @property
    def told(self) -> dict[str, Any]:
        """Its kind, how many devices, and what they are called, as a finished run records it."""
        name = torch.cuda.get_device_name() if self.kind == "GPU" else f"CPU, {platform.machine()}"
        return {"kind": self.kind, "count": self.devices, "name": name}

    def place(self) -> dict[GroupKey, list[Options]]:
        """`place` for these tenants."""
        return place(self.tenants, self.pool, self.kind)


def room_for(config: RunConfig) -> Room:
    """Room for everything of a run, on what this machine computes on.

    Raises:
        PlacementError: it has too few devices.
    """
    kind, pool = kind_here(), config.cluster.pool
    tenants = tenants_of(config, kind)
    devices = devices_here(kind, config.cluster.cpus or needed(tenants, pool))
    check_fits(tenants, pool, kind, devices)
    return Room(kind=kind, pool=pool, tenants=tenants, devices=devices)


def kind_here() -> Kind:
    """What this machine computes on."""
    return "GPU" if torch.cuda.is_available() else "CPU"


def devices_here(kind: Kind, cpus: int) -> int:
    """How many of its devices this machine has; of CPUs, which processes can share, the `cpus` that it gives."""
    return torch.cuda.device_count() if kind == "GPU" else cpus


def gpus_of_servers(config: RunConfig) -> dict[str, list[list[str]]]:
    """The GPUs of each policy's servers in an evaluation, which has no trainers: all there are. [] where it has none.

    Raises:
        PlacementError: there are fewer GPUs than one server of each policy needs.
    """
    engines = {policy: for_policy(config, policy).engine for policy in config.models}
    elsewhere: dict[str, list[list[str]]] = {policy: [[]] * engine.servers for policy, engine in engines.items()}
    sizes = {policy: engine.tp for policy, engine in engines.items() if not engine.urls}
    if config.engine.name != "sglang" or not sizes or kind_here() != "GPU":
        return elsewhere
    gpus, one = visible_gpus(), sum(sizes.values())
    replicas = len(gpus) // one
    if not replicas:
        each = ", ".join(f"{tp} for {policy}" for policy, tp in sizes.items())
        raise PlacementError(f"an evaluation needs {one} GPUs, engine.tp {each}, and there are {len(gpus)}")
    free = iter(gpus)
    own = {policy: [[next(free) for _ in range(tp)] for _ in range(replicas)] for policy, tp in sizes.items()}
    return elsewhere | own


def check_fits(tenants: Sequence[Tenant], pool: Pool, kind: Kind, available: int) -> None:
    """Refuse a run that needs more devices than there are.

    Raises:
        PlacementError: with what every policy needs.
    """
    wanted = needed(tenants, pool)
    if wanted <= available:
        return
    table = "; ".join(
        f"{policy}: " + ", ".join(f"{tenant.part} {tenant.devices}" for tenant in tenants if tenant.policy == policy)
        for policy in dict.fromkeys(tenant.policy for tenant in tenants)
    )
    shared = needed(tenants, "shared")
    advice = f"use cluster.pool: shared, which needs {shared}" if shared <= available else "use fewer ranks"
    raise PlacementError(
        f"cluster.pool: {pool} needs {wanted} {kind}s and there are {available} ({table}); {advice}, or more {kind}s"
    )


def strategies(groups: Sequence[int], nodes: Sequence[int]) -> list[str]:
    """How the bundles of each group are to lie: on one node where one has room for them, else on as few as may be.

    Args:
        groups: devices of each, in the order in which they are placed.
        nodes: devices of each.
    """
    free = list(nodes)
    found = []
    for size in groups:
        fitting = [node for node, room in enumerate(free) if room >= size]
        if fitting:
            free[min(fitting, key=lambda node: free[node])] -= size
        found.append("STRICT_PACK" if fitting else "PACK")
    return found


def place(tenants: Sequence[Tenant], pool: Pool, kind: Kind) -> dict[GroupKey, list[Options]]:
    """Set devices aside in the running Ray; gives actor options for every process, by policy and part.

    Raises:
        PlacementError: Ray does not find room for a group within a minute.
    """
    if not tenants:
        return {}
    nodes = [int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]]
    if pool == "shared":
        group = _group(needed(tenants, pool), strategies([needed(tenants, pool)], nodes)[0], kind)
        # rounded down, so that all of them fit
        part = _FINEST // len(tenants) / _FINEST
        return {(t.policy, t.part): [_options(group, i, kind, part) for i in range(t.devices)] for t in tenants}
    largest_first = sorted(tenants, key=lambda tenant: -tenant.devices)
    found: dict[GroupKey, list[Options]] = {}
    for t, strategy in zip(largest_first, strategies([t.devices for t in largest_first], nodes), strict=True):
        group = _group(t.devices, strategy, kind)
        found[t.policy, t.part] = [_options(group, i, kind, 1) for i in range(t.devices)]
    return found


def _group(devices: int, strategy: str, kind: Kind) -> Any:
    group = placement_group([{kind: 1}] * devices, strategy=strategy)
    deadline = time.monotonic() + _WAIT_S
    while placement_group_table(group)["state"] != "CREATED":
        if time.monotonic() > deadline:
            raise PlacementError(
                f"Ray has no room for {devices} {kind}s together ({strategy}); is something else there?"
            )
        time.sleep(0.02)
    return group


def _options(group: Any, bundle: int, kind: Kind, part: float) -> Options:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    devices = {"num_gpus": part, "num_cpus": 0} if kind == "GPU" else {"num_cpus": part}
    return {**devices, "scheduling_strategy": strategy}
