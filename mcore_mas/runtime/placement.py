"""Placement of a run's processes on devices: together on the same devices (colocation) or apart."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from mcore_mas.planning.worker_groups import (
    GroupKey,
    PlacementError,
    WorkerGroup,
    count_devices,
)
from mcore_mas.runtime.devices import RunDevices
from mcore_mas.runtime.local_ray import KEEP_PAGES

ActorOptions = Mapping[str, Any]  # options of `ray.remote`

_RESERVE_S = 60.0  # time in which Ray must reserve devices
_UNITS_PER_DEVICE = 10_000  # Ray counts devices in units of 1/10,000
_NODE_ID = "ray.io/node-id"  # a label that Ray gives to every node


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place for one process: a bundle of a placement group."""

    node: str
    group: PlacementGroup
    bundle: int


def packing_strategies(
    sizes: Sequence[int],
    nodes: Sequence[int],
    allowed: Sequence[Collection[int]] | None = None,
) -> list[str]:
    """Return Ray's strategy for each group: on one node if a node has room for it, else on as few as possible.

    Args:
        sizes: number of devices of each group, in the order of placement.
        nodes: number of free devices of each node.
        allowed: indices of the nodes that each group may be on; None: all nodes for all groups.
    """
    free = list(nodes)
    strategies = []
    for number, size in enumerate(sizes):
        candidates = range(len(free)) if allowed is None else allowed[number]
        fitting = [node for node in candidates if free[node] >= size]
        if fitting:
            best = min(fitting, key=lambda node: free[node])
            free[best] -= size
        strategies.append("STRICT_PACK" if fitting else "PACK")
    return strategies


class DevicePlacement:
    """Devices that are set aside in the running Ray for the worker groups of a run.

    Attributes:
        options: actor options of each process, by worker group.
        nodes: Ray's id of the node of each process, by worker group.
    """

    def __init__(self, devices: RunDevices) -> None:
        """Set nothing aside before `fill`."""
        self.devices = devices
        self.options: dict[GroupKey, list[ActorOptions]] = {}
        self.nodes: dict[GroupKey, list[str]] = {}
        self._placement_groups: dict[GroupKey, list[PlacementGroup]] = {}
        self._environment: ActorOptions = {}
        if devices.joined and devices.device_type == "CPU":
            # Processes of the run's private Ray inherit these variables.
            variables = KEEP_PAGES | {"CUDA_VISIBLE_DEVICES": ""}
            self._environment = {"runtime_env": {"env_vars": variables}}

    def fill(self) -> None:
        """Set devices aside for every worker group that has none.

        Raises:
            PlacementError: Ray has no room for a group, or would put tensor-parallel ranks on
                several nodes.
        """
        missing = [
            group
            for group in self.devices.worker_groups
            if (group.policy, group.part) not in self._placement_groups
        ]
        if not missing:
            return
        used = Counter(node for nodes in self.nodes.values() for node in nodes)
        free = {node: count - used[node] for node, count in self.devices.nodes.items()}
        if self.devices.pool == "shared":
            self._fill_shared(missing, free)
        else:
            self._fill_split(missing, free)

    def drop(self, keys: Collection[GroupKey]) -> None:
        """Release the devices of worker groups; processes that still run on them end."""
        dropped = {}
        for key in keys:
            for group in self._placement_groups.pop(key, ()):
                dropped[id(group)] = group  # in a shared pool several worker groups have the same
            self.options.pop(key, None)
            self.nodes.pop(key, None)
        for group in dropped.values():
            remove_placement_group(group)

    def driver_node_options(self) -> ActorOptions:
        """Return the options of an actor that needs no device and must be on the node of this process."""
        if self.devices.driver_node is None:
            return self._environment
        on_node = NodeAffinitySchedulingStrategy(self.devices.driver_node, soft=False)
        return {**self._environment, "scheduling_strategy": on_node}

    def _fill_shared(self, missing: Sequence[WorkerGroup], free: Mapping[str, int]) -> None:
        """Give all worker groups the same devices, and each a fraction of every device."""
        size = count_devices(missing, "shared")
        local_groups = [group for group in missing if group.on_driver_node]
        on_driver_node = count_devices(local_groups, "shared")
        selectors = [self._node_selector() for _ in range(on_driver_node)]
        selectors += [{} for _ in range(size - on_driver_node)]

        nodes = list(free)
        allowed = list(range(len(nodes)))
        if on_driver_node and self.devices.driver_node is not None:
            allowed = [nodes.index(self.devices.driver_node)]
        [strategy] = packing_strategies([size], list(free.values()), [allowed])
        placement = self._reserve([1] * size, strategy, selectors)
        # The fraction is rounded down to Ray's units, so that all groups fit on a device.
        fraction = _UNITS_PER_DEVICE // len(missing) / _UNITS_PER_DEVICE
        for group in missing:
            self._assign(group, [placement], bundle_size=1, fraction=fraction)

    def _fill_split(self, missing: Sequence[WorkerGroup], free: Mapping[str, int]) -> None:
        """Give every worker group devices of its own."""
        hardest_first = sorted(
            missing,
            key=lambda group: (
                not group.on_driver_node,
                group.node_label is None,
                -max(group.placement_group_sizes),
            ),
        )
        pieces = [(group, size) for group in hardest_first for size in group.placement_group_sizes]
        strategies = packing_strategies(
            sizes=[size for _, size in pieces],
            nodes=list(free.values()),
            allowed=[self._allowed_nodes(group) for group, _ in pieces],
        )
        for (group, size), strategy in zip(pieces, strategies, strict=True):
            bundles = [group.tp] * (size // group.tp)
            selector = {"pool": group.node_label} if group.node_label else {}
            if group.on_driver_node:
                selector |= self._node_selector()
            placement = self._reserve(bundles, strategy, [selector] * len(bundles))
            self._placement_groups.setdefault((group.policy, group.part), []).append(placement)
        for group in hardest_first:
            placements = self._placement_groups[group.policy, group.part]
            self._assign(group, placements, bundle_size=group.tp, fraction=1)

    def _allowed_nodes(self, group: WorkerGroup) -> list[int]:
        """Return the indices of the nodes that a worker group may be on."""
        return [
            index
            for index, node in enumerate(self.devices.nodes)
            if (group.node_label is None or self.devices.labels.get(node) == group.node_label)
            and (not group.on_driver_node or self.devices.driver_node in (None, node))
        ]

    def _node_selector(self) -> dict[str, str]:
        """Return the label selector of the node of this process; {} in the run's private Ray."""
        driver_node = self.devices.driver_node
        return {} if driver_node is None else {_NODE_ID: driver_node}

    def _reserve(
        self, bundles: Sequence[int], strategy: str, selectors: Sequence[Mapping[str, str]]
    ) -> PlacementGroup:
        """Set bundles of devices aside.

        Args:
            bundles: number of devices of each bundle; those of a bundle are on one node.
            strategy: Ray's strategy for the bundles, as from `packing_strategies`.
            selectors: for each bundle, the labels that its node must have.

        Raises:
            PlacementError: Ray does not find room for them within a minute.
        """
        label_selectors = None
        if any(selectors):
            label_selectors = [dict(selector) for selector in selectors]
        placement: PlacementGroup = placement_group(
            [{self.devices.device_type: size} for size in bundles],
            strategy=strategy,
            bundle_label_selector=label_selectors,
        )
        if not placement.wait(_RESERVE_S):
            remove_placement_group(placement)
            raise PlacementError(
                f"Ray has no room for {sum(bundles)} {self.devices.device_type}s together ({strategy}); check whether "
                "another job uses them"
            )
        return placement

    def _assign(
        self,
        group: WorkerGroup,
        placements: Sequence[PlacementGroup],
        *,
        bundle_size: int,
        fraction: float,
    ) -> None:
        """Give the processes of a worker group their slots, so that neighbouring ranks are on one node.

        Args:
            group: the worker group.
            placements: placement groups with the group's devices.
            bundle_size: number of processes in each bundle.
            fraction: fraction of a device that each process gets.
        """
        slots = self._slots_by_node(placements, bundle_size)
        if group.on_driver_node and self.devices.driver_node is not None:
            slots = [slot for slot in slots if slot.node == self.devices.driver_node]
        slots = slots[: group.devices]

        per_node = Counter(slot.node for slot in slots)
        if any(count % group.tp for count in per_node.values()):
            raise PlacementError(
                f"{group.policy}: {group.part} needs every {group.tp} {self.devices.device_type}s on one node (tp), "
                "and the nodes' free ones do not divide so; use a smaller tp, or cluster.pool: split"
            )
        key = (group.policy, group.part)
        self._placement_groups[key] = list(placements)
        self.nodes[key] = [slot.node for slot in slots]
        self.options[key] = [self._actor_options(slot, fraction) for slot in slots]

    def _slots_by_node(self, placements: Sequence[PlacementGroup], bundle_size: int) -> list[_Slot]:
        """Return the slots of placement groups; within a placement group they are sorted by node.

        The order of nodes is that of `devices.nodes`, which are sorted by address, as are the ranks
        of trainers (`RankPool`).
        """
        node_numbers = {node: number for number, node in enumerate(self.devices.nodes)}
        slots = []
        for placement in placements:
            node_by_bundle = placement_group_table(placement)["bundles_to_node_id"]
            # `devices.nodes` has no id of the only node of the run's private Ray, hence the 0.
            numbered_bundles = [
                (node_numbers.get(node, 0), bundle) for bundle, node in node_by_bundle.items()
            ]
            for _, bundle in sorted(numbered_bundles):
                slots += [_Slot(node_by_bundle[bundle], placement, bundle)] * bundle_size
        return slots

    def _actor_options(self, slot: _Slot, fraction: float) -> ActorOptions:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=slot.group, placement_group_bundle_index=slot.bundle
        )
        if self.devices.device_type == "GPU":
            resources = {"num_gpus": fraction, "num_cpus": 0}
        else:
            resources = {"num_cpus": fraction}
        return {**self._environment, **resources, "scheduling_strategy": strategy}
