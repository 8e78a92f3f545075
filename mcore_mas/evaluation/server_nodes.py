"""SGLang servers of an evaluation on all nodes of a Ray cluster."""

from collections.abc import Sequence

from mcore_mas.config.run import RunConfig
from mcore_mas.planning.worker_groups import PlacementError, WorkerGroup, gpus_per_engine
from mcore_mas.runtime.cluster import Node
from mcore_mas.runtime.devices import RunDevices
from mcore_mas.runtime.placement import DevicePlacement


def place_servers(config: RunConfig, nodes: Sequence[Node]) -> DevicePlacement:
    """Set aside the GPUs of the nodes for as many servers of each policy as fit.

    Every server has its own GPUs, all on one node.

    Raises:
        PlacementError: not even one server of each policy fits, or Ray has no room for them.
    """
    sizes = gpus_per_engine(config)
    replicas = servers_of_each(list(sizes.values()), [node.gpus for node in nodes])
    if replicas == 0:
        table = ", ".join(f"{policy} {size}" for policy, size in sizes.items())
        gpus = ", ".join(str(node.gpus) for node in nodes)
        raise PlacementError(
            f"an evaluation needs GPUs for a server of each policy, each server on one node ({table}), and the nodes "
            f"have {gpus}; lower engine.tp, or add nodes"
        )
    placement = DevicePlacement(
        RunDevices(
            device_type="GPU",
            pool="split",
            worker_groups=[
                WorkerGroup(policy=policy, part="engine", devices=replicas * size, tp=size)
                for policy, size in sizes.items()
            ],
            nodes={node.id: node.gpus for node in nodes},
            driver_node=next((node.id for node in nodes if node.is_driver), None),
        )
    )
    placement.fill()
    return placement


def servers_of_each(sizes: Sequence[int], nodes: Sequence[int]) -> int:
    """Return the largest number of servers of each size that fit the nodes together.

    Args:
        sizes: GPUs of a server of each policy.
        nodes: GPUs of each node.
    """
    replicas = sum(nodes) // sum(sizes)
    while replicas and not _fit(sorted(list(sizes) * replicas, reverse=True), nodes):
        replicas -= 1
    return replicas


def _fit(servers: Sequence[int], nodes: Sequence[int]) -> bool:
    """Return True if servers of these sizes, in this order, fit the nodes, each on the fullest node with space."""
    free = list(nodes)
    for gpus in servers:
        fitting = [node for node in range(len(free)) if free[node] >= gpus]
        if not fitting:
            return False
        free[min(fitting, key=lambda node: free[node])] -= gpus
    return True
