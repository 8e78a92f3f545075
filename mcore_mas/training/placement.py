"""Placement (colocation): which devices each policy's trainer, critic and engine take, together or apart."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcore_mas.config.run import RunConfig, for_policy
from mcore_mas.planning.jobs import GroupKey, Kind, Pool, Tenant, needed, tenants_of
from mcore_mas.training.cluster import KEEP_PAGES, Node
from rollout.engines.sglang.server import visible_gpus

Options = dict[str, Any]  # of a Ray actor

_WAIT_S = 60.0
_FINEST = 10_000  # parts of a device that Ray tells apart


class PlacementError(ValueError):
    """A run's processes do not fit the devices there are: one line with what each policy needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The devices that a run may take, of this machine or of the nodes of a Ray that runs already."""

    kind: Kind
    pool: Pool
    tenants: Sequence[Tenant]
    nodes: Mapping[str, int]  # devices by Ray's id of the node

    @property
    def cpus(self) -> int:
        """How many CPUs a Ray of the run's own is told of; its GPUs it counts itself."""
        return sum(self.nodes.values()) if self.kind == "CPU" else 1

    @property
    def told(self) -> dict[str, Any]:
        """Its kind, how many devices, and what they are called, as a finished run records it."""
        seen = self.kind == "GPU" and torch.cuda.is_available()
        name = torch.cuda.get_device_name() if seen else f"{self.kind}, {platform.machine()}"
        return {"kind": self.kind, "count": sum(self.nodes.values()), "nodes": len(self.nodes), "name": name}


def room_for(config: RunConfig, nodes: Sequence[Node] = ()) -> Room:
    """Room for everything of a run, on what this machine computes on, or on `nodes`.

    Raises:
        PlacementError: there are too few devices, or too few on one node.
    """
    pool = config.cluster.pool
    kind: Kind = ("GPU" if any(node.gpus for node in nodes) else "CPU") if nodes else kind_here()
    tenants = tenants_of(config, kind)
    own = {"": devices_here(kind, config.cluster.cpus or needed(tenants, pool))}
    devices = {node.id: node.gpus if kind == "GPU" else node.cpus for node in nodes} or own
    check_fits(tenants, pool, kind, list(devices.values()))
    return Room(kind=kind, pool=pool, tenants=tenants, nodes=devices)


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


def check_fits(tenants: Sequence[Tenant], pool: Pool, kind: Kind, nodes: Sequence[int]) -> None:
    """Refuse a run that needs more devices than there are on `nodes`, or more on one of them than it has.

    Raises:
        PlacementError: with what every policy needs.
    """
    wanted, available = needed(tenants, pool), sum(nodes)
    for tenant in tenants:
        if wanted <= available and tenant.unit > max(nodes):
            raise PlacementError(
                f"{tenant.policy}: {tenant.part} needs {tenant.unit} {kind}s of one node (tp), and the largest of "
                f"{len(nodes)} nodes has {max(nodes)}; use a smaller tp"
            )
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


class DevicePlacement:
    """Devices that are set aside in the running Ray: actor options for every process, and the node that it is on."""

    def __init__(self, room: Room, *, joined: bool = False) -> None:
        """Nothing is set aside before `fill`. In a Ray that was `joined`, actors are given what a run's own Ray has."""
        self.room = room
        self._actor = {"runtime_env": {"env_vars": KEEP_PAGES}} if joined and room.kind == "CPU" else {}
        self._groups: dict[GroupKey, Any] = {}
        self.options: dict[GroupKey, list[Options]] = {}
        self.nodes: dict[GroupKey, list[str]] = {}  # Ray's id of each process's node

    def fill(self) -> None:
        """Set devices aside for every tenant that has none.

        Raises:
            PlacementError: Ray does not find room for a group within a minute, or not in one piece.
        """
        room = self.room
        missing = [t for t in room.tenants if (t.policy, t.part) not in self._groups]
        held = Counter(node for nodes in self.nodes.values() for node in nodes)
        free = [devices - held[node] for node, devices in room.nodes.items()]
        if room.pool == "shared" and missing:
            most = needed(missing, "shared")
            group = _group([1] * most, strategies([most], free)[0], room.kind)
            part = _FINEST // len(missing) / _FINEST  # rounded down, so that all of them fit
            for tenant in missing:
                self._settle(tenant, group, 1, part)
            return
        largest_first = sorted(missing, key=lambda tenant: -tenant.devices)
        for t, strategy in zip(largest_first, strategies([t.devices for t in largest_first], free), strict=True):
            self._settle(t, _group([t.unit] * (t.devices // t.unit), strategy, room.kind), t.unit, 1)

    def drop(self, keys: Collection[GroupKey]) -> None:
        """Give the devices of these back; what still runs on them ends."""
        dropped = {id(group): group for key in keys if (group := self._groups.pop(key, None)) is not None}
        for key in keys:
            self.options.pop(key, None)
            self.nodes.pop(key, None)
        for group in dropped.values():
            remove_placement_group(group)

    def _settle(self, tenant: Tenant, group: Any, size: int, part: float) -> None:
        """Give a tenant its places in a group whose bundles have `size` devices; neighbours are on one node."""
        key, node_of = (tenant.policy, tenant.part), placement_group_table(group)["bundles_to_node_id"]
        by_node = sorted(node_of, key=lambda bundle: (node_of[bundle], bundle))
        bundles = [bundle for bundle in by_node for _ in range(size)]
        own = bundles[: tenant.devices]
        if any(count % tenant.unit for count in Counter(node_of[bundle] for bundle in own).values()):
            raise PlacementError(
                f"{tenant.policy}: {tenant.part} needs every {tenant.unit} {self.room.kind}s on one node (tp), and the "
                "nodes' free ones do not divide so; use a smaller tp, or cluster.pool: split"
            )
        self._groups[key], self.nodes[key] = group, [node_of[bundle] for bundle in own]
        self.options[key] = [self._actor | _options(group, bundle, self.room.kind, part) for bundle in own]


def _group(bundles: Sequence[int], strategy: str, kind: Kind) -> Any:
    group = placement_group([{kind: size} for size in bundles], strategy=strategy)
    deadline = time.monotonic() + _WAIT_S
    while placement_group_table(group)["state"] != "CREATED":
        if time.monotonic() > deadline:
            remove_placement_group(group)
            raise PlacementError(
                f"Ray has no room for {sum(bundles)} {kind}s together ({strategy}); is something else there?"
            )
        time.sleep(0.02)
    return group


def _options(group: Any, bundle: int, kind: Kind, part: float) -> Options:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    devices = {"num_gpus": part, "num_cpus": 0} if kind == "GPU" else {"num_cpus": part}
    return {**devices, "scheduling_strategy": strategy}
