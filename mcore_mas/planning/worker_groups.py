"""Worker groups of a run: the processes that need a device each, and a check that they fit.

`list_worker_groups` derives them from a config, and `check_fits` compares them with the nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mcore_mas.config.run import RunConfig
from mcore_mas.config.run_sections import engine_holder, for_policy

DeviceType = Literal["GPU", "CPU"]
Pool = Literal["shared", "split"]
Part = Literal["trainer", "critic", "engine"]
GroupKey = tuple[str, Part]  # policy, part


class PlacementError(ValueError):
    """The worker groups of a run do not fit the devices; one line with the needs of each policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """Processes of one part of a policy, with a device each."""

    policy: str
    part: Part
    devices: int
    tp: int = 1  # consecutive ranks that must be on one node
    node_label: str | None = None  # required value of the nodes' label `pool`; None: any node
    on_driver_node: bool = False  # it must be on the node of the command that trains

    @property
    def placement_group_sizes(self) -> list[int]:
        """Devices of each Ray placement group.

        All ranks of a trainer are placed together. The replicas of an engine are placed one by
        one, because they do not communicate.
        """
        if self.part == "engine":
            return [self.tp] * (self.devices // self.tp)
        return [self.devices]


def list_worker_groups(config: RunConfig, device_type: DeviceType) -> list[WorkerGroup]:
    """Return all worker groups of a run that need devices of this type, policy by policy."""
    worker_groups = []
    for policy in config.policies:
        worker_groups.extend(_trainer_groups(config, policy))
        worker_groups.extend(_engine_groups(config, policy, device_type))
    return worker_groups


def _trainer_groups(config: RunConfig, name: str) -> list[WorkerGroup]:
    policy = config.policies[name]
    if name not in config.trained or config.holder(name) != name:
        return []  # the policy is frozen, or trains an adapter on the ranks of another policy

    nodes = config.cluster.nodes.get(name)
    parts: list[Part] = ["trainer"]
    if policy.critic is not None and not policy.share_base:
        parts.append("critic")
    return [
        WorkerGroup(
            policy=name,
            part=part,
            devices=policy.ranks,
            tp=policy.tp,
            node_label=nodes.train if nodes else None,
        )
        for part in parts
    ]


def _engine_groups(config: RunConfig, name: str, device_type: DeviceType) -> list[WorkerGroup]:
    if config.policies[name].remote is not None:
        return []

    engine = for_policy(config, name).engine
    if engine.urls or engine_holder(config, name) != name:
        return []  # the servers run elsewhere, or the engine of another policy has this adapter

    if device_type == "GPU" and engine.name == "embedded" and engine.device == "cpu":
        return []

    nodes = config.cluster.nodes.get(name)
    tp = engine.tp if engine.name == "sglang" else 1
    workers = WorkerGroup(
        policy=name,
        part="engine",
        devices=engine.replicas * tp,
        tp=tp,
        node_label=nodes.rollout if nodes else None,
        on_driver_node=engine.name == "embedded",
    )
    return [workers]


def count_devices(worker_groups: Sequence[WorkerGroup], pool: Pool) -> int:
    """Return the number of devices that the groups take.

    In the pool "split" each group has separate devices; in "shared" all groups use the same ones.
    """
    sizes = [workers.devices for workers in worker_groups]
    return sum(sizes) if pool == "split" else max(sizes, default=0)


def check_fits(
    worker_groups: Sequence[WorkerGroup],
    pool: Pool,
    device_type: DeviceType,
    nodes: Sequence[int],
) -> None:
    """Check that the groups fit the nodes.

    Args:
        worker_groups: groups of the run.
        pool: "split" or "shared"; see `count_devices`.
        device_type: type of the devices, for the error.
        nodes: number of devices of each node.

    Raises:
        PlacementError: there are too few devices, or no node has enough for a tensor-parallel
            group.
    """
    required = count_devices(worker_groups, pool)
    available = sum(nodes)
    if required > available:
        raise PlacementError(_describe_shortage(worker_groups, pool, device_type, available))

    largest_node = max(nodes)
    for workers in worker_groups:
        if workers.tp > largest_node:
            raise PlacementError(
                f"{workers.policy}: {workers.part} needs {workers.tp} {device_type}s of one node "
                f"(tp), and the largest of {len(nodes)} nodes has {largest_node}; use a smaller tp"
            )


def _describe_shortage(
    worker_groups: Sequence[WorkerGroup], pool: Pool, device_type: DeviceType, available: int
) -> str:
    """Describe what the groups need, by policy, and how many devices there are."""
    parts_by_policy: dict[str, list[str]] = {}
    for workers in worker_groups:
        parts_by_policy.setdefault(workers.policy, []).append(f"{workers.part} {workers.devices}")
    table = "; ".join(f"{policy}: {', '.join(parts)}" for policy, parts in parts_by_policy.items())

    shared = count_devices(worker_groups, "shared")
    advice = "use fewer ranks"
    if shared <= available:
        advice = f"use cluster.pool: shared, which needs {shared}"
    if device_type == "GPU":
        advice += ", or compute on CPUs: cluster.device: cpu"

    return (
        f"cluster.pool: {pool} needs {count_devices(worker_groups, pool)} {device_type}s ({table}), and there "
        f"are {available}; {advice}, or more {device_type}s"
    )


def evaluated_policies(config: RunConfig) -> list[str]:
    """Return the policies that have an engine in an evaluation, which has no teachers and no opponent.

    Every policy that plays an agent has an engine of its own, also if its adapter shares one in
    training. Remote models have none.
    """
    agent_policies = {agent.policy for agent in config.agents.values()}
    return [policy for policy in config.models if policy in agent_policies]


def evaluates_on_all_nodes(config: RunConfig) -> bool:
    """Return True if all engines of an evaluation are SGLang servers that it starts; any node can run these."""
    engines = [for_policy(config, policy).engine for policy in evaluated_policies(config)]
    return bool(engines) and all(engine.name == "sglang" and not engine.urls for engine in engines)


def gpus_per_engine(config: RunConfig) -> dict[str, int]:
    """Return the number of GPUs of one engine of an evaluation, by policy.

    Policies whose engine needs no GPU of this run are left out.
    """
    sizes = {}
    for policy in evaluated_policies(config):
        engine = for_policy(config, policy).engine
        if engine.urls:
            continue
        if engine.name == "sglang":
            sizes[policy] = engine.tp
        elif engine.name == "embedded" and engine.device != "cpu":
            sizes[policy] = 1
    return sizes
