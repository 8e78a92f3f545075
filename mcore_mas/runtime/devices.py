"""The devices that a run may use, on this machine or on the nodes of a Ray that runs already."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mcore_mas.config.run import RunConfig
from mcore_mas.planning.machine import available_cores
from mcore_mas.planning.shared_pool import (
    MEMORY_SHARE,
    STATIC_SHARE,
    fit_pool,
    memory_share,
    started_servers,
)
from mcore_mas.planning.worker_groups import (
    DeviceType,
    PlacementError,
    Pool,
    WorkerGroup,
    check_fits,
    count_devices,
    list_worker_groups,
)
from mcore_mas.runtime.cluster import Node
from rollout.engines.sglang.nccl import nccl_mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDevices:
    """The devices that a run may use, and the worker groups that it needs them for."""

    device_type: DeviceType
    pool: Pool
    worker_groups: Sequence[WorkerGroup]
    nodes: Mapping[str, int]  # number of devices, by Ray's id of the node
    labels: Mapping[str, str | None] = field(default_factory=dict)  # label `pool`, by node id
    driver_node: str | None = None  # the node of this process; None in the run's private Ray

    @property
    def count(self) -> int:
        """Number of devices on all nodes."""
        return sum(self.nodes.values())

    @property
    def ray_cpus(self) -> int:
        """Number of CPUs that the run's private Ray is started with."""
        return self.count if self.device_type == "CPU" else 1

    @property
    def ray_gpus(self) -> int:
        """Number of GPUs that the run's private Ray is started with; they are the first of the machine."""
        return self.count if self.device_type == "GPU" else 0

    @property
    def joined(self) -> bool:
        """True if these are nodes of a Ray that was joined, which other runs may use too."""
        return self.driver_node is not None

    def threads_per_process(self, config: RunConfig) -> int:
        """Return the number of threads of each process.

        The number in the config takes precedence. Without it, the result is 1 in a Ray that was
        joined, because other runs may use its nodes, and with `engine.deterministic`, because with
        several threads the bits of a row in a matrix product depend on the other rows. Otherwise it
        is the number of cores divided by the number of processes that compute at the same time:
        engines and trainers take turns, unless trajectories are collected ahead of training.
        """
        if config.cluster.threads_per_process:
            return config.cluster.threads_per_process
        if self.joined or config.engine.deterministic:
            return 1

        engines = sum(group.devices for group in self.worker_groups if group.part == "engine")
        trainers = sum(group.devices for group in self.worker_groups if group.part != "engine")
        concurrent = engines + trainers if config.collects_ahead else max(engines, trainers)
        return max(1, available_cores() // max(1, concurrent))

    def describe(self) -> dict[str, Any]:
        """Return kind (GPU or CPU), count, nodes and name of the devices, as done.json records them."""
        name = f"{self.device_type}, {platform.machine()}"
        if self.device_type == "GPU" and torch.cuda.is_available():
            name = torch.cuda.get_device_name()
        return {
            "kind": self.device_type,
            "count": self.count,
            "nodes": len(self.nodes),
            "name": name,
        }


def find_devices(config: RunConfig, nodes: Sequence[Node] = ()) -> RunDevices:
    """Find the devices for all worker groups of a run.

    Args:
        config: the run.
        nodes: nodes of a Ray that was joined; (): this machine.

    Raises:
        PlacementError: the config wants GPUs, and there is none; there are too few devices, or too
            few on one node or with a label; or the GPUs do not suit the retriever or SGLang's
            servers.
    """
    if nodes:
        has_gpus = any(node.gpus for node in nodes)
        if config.cluster.device == "cuda" and not has_gpus:
            raise PlacementError(
                "cluster.device: cuda, and no node has a GPU; set it to auto or cpu"
            )
        use_gpus = config.cluster.device != "cpu" and has_gpus
        device_type: DeviceType = "GPU" if use_gpus else "CPU"
    else:
        device_type = device_type_here(config)

    worker_groups = list_worker_groups(config, device_type)
    if nodes:
        devices = {node.id: node.gpus if device_type == "GPU" else node.cpus for node in nodes}
    else:
        devices = {"": _devices_here(config, device_type, worker_groups)}
    driver_node = next((node.id for node in nodes if node.is_driver), None)

    if nodes and device_type == "GPU" and config.retriever and config.retriever.gpus:
        raise PlacementError(
            "retriever.device: cuda: all GPUs belong to the joined Ray, and the retriever runs outside it; "
            "use a server that is started elsewhere (retriever.urls)"
        )
    _check_labels(worker_groups, device_type, devices, nodes)
    _check_driver_node(worker_groups, config.cluster.pool, device_type, devices, driver_node)
    check_fits(worker_groups, config.cluster.pool, device_type, list(devices.values()))
    if device_type == "GPU":
        _check_servers(config)
    return RunDevices(
        device_type=device_type,
        pool=config.cluster.pool,
        worker_groups=worker_groups,
        nodes=devices,
        labels={node.id: node.pool for node in nodes},
        driver_node=driver_node,
    )


def device_type_here(config: RunConfig) -> DeviceType:
    """Return the device type of a run on this machine: "GPU" or "CPU".

    Raises:
        PlacementError: the config wants GPUs, and there is none.
    """
    has_gpus = torch.cuda.is_available()
    if config.cluster.device == "cuda" and not has_gpus:
        raise PlacementError(
            "cluster.device: cuda, and torch sees no GPU here; set it to auto or cpu"
        )
    return "GPU" if has_gpus and config.cluster.device != "cpu" else "CPU"


def fit_to_machine(config: RunConfig) -> tuple[RunConfig, str]:
    """Return a run that fits the GPUs of this machine, and a line about what was changed, or "".

    Raises:
        PlacementError: the config wants GPUs, and there is none.
    """
    if device_type_here(config) == "CPU":
        return config, ""
    return fit_pool(config, _gpus_here(config))


def _gpus_here(config: RunConfig) -> int:
    """Return the number of GPUs of this machine for trainers and engines."""
    return torch.cuda.device_count() - (config.retriever.gpus if config.retriever else 0)


def _devices_here(
    config: RunConfig, device_type: DeviceType, worker_groups: Sequence[WorkerGroup]
) -> int:
    """Return the number of devices of this machine for a run.

    On GPUs these are all but the retriever's. On CPUs they are `cluster.cpus`, or else as many as the
    worker groups need.
    """
    if device_type == "GPU":
        return _gpus_here(config)
    return config.cluster.cpus or count_devices(worker_groups, config.cluster.pool)


def _check_labels(
    worker_groups: Sequence[WorkerGroup],
    device_type: DeviceType,
    devices: Mapping[str, int],
    nodes: Sequence[Node],
) -> None:
    """Raise PlacementError unless the groups that want a label fit the nodes that have it."""
    labels = dict.fromkeys(group.node_label for group in worker_groups if group.node_label)
    for label in labels:
        labelled_groups = [group for group in worker_groups if group.node_label == label]
        node_devices = [devices[node.id] for node in nodes if node.pool == label]
        if not node_devices:
            group = labelled_groups[0]
            existing = ", ".join(sorted({node.pool for node in nodes if node.pool})) or "none"
            raise PlacementError(
                f"cluster.nodes.{group.policy}: no node has the label pool={label} for its {group.part} (there are "
                f"{existing}); start one with `ray start --labels pool={label}`"
            )
        try:
            check_fits(labelled_groups, "split", device_type, node_devices)
        except PlacementError as error:
            raise PlacementError(f"nodes with the label pool={label}: {error}") from None


def _check_driver_node(
    worker_groups: Sequence[WorkerGroup],
    pool: Pool,
    device_type: DeviceType,
    devices: Mapping[str, int],
    driver_node: str | None,
) -> None:
    """Raise PlacementError unless the groups that must be on the node of this process fit it."""
    local_groups = [group for group in worker_groups if group.on_driver_node]
    if driver_node is None or not local_groups:
        return
    required = count_devices(local_groups, pool)
    if required > devices[driver_node]:
        raise PlacementError(
            f"embedded engines run on the node of the command and need {required} {device_type}s there, and it has "
            f"{devices[driver_node]}; start its Ray with more, or use engine: sglang"
        )


def _check_servers(config: RunConfig) -> None:
    """Check SGLang's servers of a run on GPUs.

    Raises:
        PlacementError: servers on the same GPUs lack shares of the memory, or the shares add up to more than 1; or a
            server has another version of NCCL than the trainers that are in a group with it.
    """
    servers = started_servers(config)
    shares = {policy: memory_share(engine) for policy, engine in servers.items()}
    shares_fit = all(shares.values()) and sum(shares.values()) <= 1
    if config.cluster.pool == "shared" and len(servers) > 1 and not shares_fit:
        table = ", ".join(f"{policy} {share or 'none'}" for policy, share in shares.items())
        raise PlacementError(
            f"engine.options: {len(servers)} servers are on each GPU, and each needs its share as {MEMORY_SHARE}, at "
            f"most 1 in total ({table}); set it, for example to {STATIC_SHARE / len(servers):.2f}, or set cluster.gpus "
            "to have the shares planned"
        )

    for policy, engine in servers.items():
        if engine.transport == "distributed" and engine.python and engine.python.is_file():
            mismatch = nccl_mismatch(engine.python)
            if mismatch:
                raise PlacementError(
                    f"policies.{policy}: engine.transport: distributed: {mismatch}"
                )
