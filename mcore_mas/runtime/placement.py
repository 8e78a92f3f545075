"""Placement (colocation): which devices each policy's trainer, critic and engine take, together or apart."""

import itertools
import platform
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcore_mas.config.run import RunConfig, engine_holder, for_policy
from mcore_mas.planning.machine import available_cores, visible_gpu_ids
from mcore_mas.planning.memory import engine_weight_bytes, kv_bytes_per_token
from mcore_mas.planning.worker_groups import (
    DeviceType,
    GroupKey,
    PlacementError,
    Pool,
    WorkerGroup,
    check_fits,
    count_devices,
    gpus_per_engine,
    list_worker_groups,
)
from mcore_mas.runtime.cluster import Node
from mcore_mas.runtime.local_ray import KEEP_PAGES
from rollout.base.nested import merged
from rollout.engines import EngineConfig
from rollout.engines.sglang.settings import nccl_mismatch
from rollout.models.architecture import read_architecture
from rollout.records.grouping import group_pairs

Options = dict[str, Any]  # of a Ray actor

_WAIT_S = 60.0
_FREE_S = 1.0  # in which a device that is free is set aside
_STATIC = 0.8  # of a GPU's memory for what servers on it hold; the rest is for what they compute
_SHARE = "mem-fraction-static"  # of `sglang.launch_server`
_FINEST = 10_000  # parts of a device that Ray tells apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The devices that a run may take, of this machine or of the nodes of a Ray that runs already."""

    kind: DeviceType
    pool: Pool
    worker_groups: Sequence[WorkerGroup]
    nodes: Mapping[str, int]  # devices by Ray's id of the node
    labels: Mapping[str, str | None] = field(
        default_factory=dict
    )  # what of them are told apart by, the same way

    @property
    def cpus(self) -> int:
        """How many CPUs a Ray of the run's own is told of."""
        return sum(self.nodes.values()) if self.kind == "CPU" else 1

    def threads_of(self, config: RunConfig, *, joined: bool) -> int:
        """Threads of each process: what is set, else the cores over the processes that work at a time.

        Engines and trainers take turns, unless what is trained is a step old. 1 in a Ray that was `joined`, whose nodes
        other runs may be on, and in the deterministic mode: among several, a row of a product has other bits beside
        other rows.
        """
        if config.cluster.threads_per_process or joined or config.engine.deterministic:
            return config.cluster.threads_per_process or 1
        engines = sum(workers.devices for workers in self.worker_groups if workers.part == "engine")
        trainers = sum(
            workers.devices for workers in self.worker_groups if workers.part != "engine"
        )
        return max(
            1,
            available_cores()
            // max(1, engines + trainers if config.ahead else max(engines, trainers)),
        )

    @property
    def gpus(self) -> int:
        """How many GPUs it is told of, the first of the machine's."""
        return sum(self.nodes.values()) if self.kind == "GPU" else 0

    @property
    def told(self) -> dict[str, Any]:
        """Its kind, how many devices, and what they are called, as a finished run records it."""
        seen = self.kind == "GPU" and torch.cuda.is_available()
        name = torch.cuda.get_device_name() if seen else f"{self.kind}, {platform.machine()}"
        return {
            "kind": self.kind,
            "count": sum(self.nodes.values()),
            "nodes": len(self.nodes),
            "name": name,
        }


def room_for(config: RunConfig, nodes: Sequence[Node] = ()) -> Room:
    """Room for everything of a run, on what this machine computes on, or on `nodes`.

    Raises:
        PlacementError: there are too few devices, or too few on one node.
    """
    pool = config.cluster.pool
    gpus = config.cluster.device != "cpu" and any(node.gpus for node in nodes)
    kind: DeviceType = ("GPU" if gpus else "CPU") if nodes else kind_here(config)
    worker_groups = list_worker_groups(config, kind)
    own = {
        "": torch.cuda.device_count()
        if kind == "GPU"
        else config.cluster.cpus or count_devices(worker_groups, pool)
    }
    if kind == "GPU" and config.retriever and config.retriever.gpus:
        if nodes:
            raise PlacementError(
                "retriever.device: cuda: a Ray that is joined has all GPUs; serve elsewhere (retriever.urls)"
            )
        own[""] -= config.retriever.gpus
    devices = {node.id: node.gpus if kind == "GPU" else node.cpus for node in nodes} or own
    _check_labels(worker_groups, kind, devices, nodes)
    check_fits(worker_groups, pool, kind, list(devices.values()))
    if kind == "GPU":
        _check_servers(config)
    return Room(
        kind=kind,
        pool=pool,
        worker_groups=worker_groups,
        nodes=devices,
        labels={node.id: node.pool for node in nodes},
    )


def _check_labels(
    worker_groups: Sequence[WorkerGroup],
    kind: DeviceType,
    devices: Mapping[str, int],
    nodes: Sequence[Node],
) -> None:
    for label in dict.fromkeys(
        workers.node_label for workers in worker_groups if workers.node_label
    ):
        own = [workers for workers in worker_groups if workers.node_label == label]
        there = [devices[node.id] for node in nodes if node.pool == label]
        if not there:
            known = ", ".join(sorted({node.pool for node in nodes if node.pool})) or "none"
            raise PlacementError(
                f"cluster.nodes.{own[0].policy}: no node has the label pool={label} for its {own[0].part} (there are "
                f"{known}); start one with `ray start --labels pool={label}`"
            )
        try:
            check_fits(own, "split", kind, there)
        except PlacementError as error:
            raise PlacementError(f"nodes with the label pool={label}: {error}") from None


def _check_servers(config: RunConfig) -> None:
    """Refuse servers without a share of a GPU that several are on, or with another NCCL than the trainers'."""
    engines = {policy: for_policy(config, policy).engine for policy in config.models}
    ours = {
        policy: engine
        for policy, engine in engines.items()
        if engine.name == "sglang" and not engine.urls
    }
    own = {
        policy: engine for policy, engine in ours.items() if engine_holder(config, policy) == policy
    }
    shares = {policy: _share(engine) for policy, engine in own.items()}
    if (
        config.cluster.pool == "shared"
        and len(own) > 1
        and not (all(shares.values()) and sum(shares.values()) <= 1)
    ):
        table = ", ".join(f"{policy} {share or 'none'}" for policy, share in shares.items())
        raise PlacementError(
            f"engine.options: {len(own)} servers are on each GPU, and each needs its share as {_SHARE}, all "
            f"of them at most 1 ({table}); for example {_STATIC / len(own):.2f}, or cluster.gpus for a planned one"
        )
    for policy, engine in own.items():
        python = engine.python if engine.transport == "distributed" else None
        if python and python.is_file() and (told := nccl_mismatch(python)):
            raise PlacementError(f"policies.{policy}: engine.transport: distributed: {told}")


def kind_here(config: RunConfig) -> DeviceType:
    """What a run computes on, on this machine.

    Raises:
        PlacementError: it is to be GPUs, and there is none.
    """
    gpus = config.cluster.device != "cpu" and torch.cuda.is_available()
    if config.cluster.device == "cuda" and not gpus:
        raise PlacementError(
            "cluster.device: cuda, and torch sees no GPU here; set it to auto or cpu"
        )
    return "GPU" if gpus else "CPU"


def gpus_of_servers(config: RunConfig) -> dict[str, list[list[str]]]:
    """The GPUs of each policy's servers in an evaluation, which has no trainers: all there are. [] where it has none.

    Where there are fewer than one server of each policy needs, servers share them, each GPU as many as any other.

    Raises:
        PlacementError: there are fewer GPUs than one server needs.
    """
    engines = {policy: for_policy(config, policy).engine for policy in config.models}
    elsewhere: dict[str, list[list[str]]] = {
        policy: [[]] * engine.servers for policy, engine in engines.items()
    }
    sizes = gpus_per_engine(config)
    if not sizes or kind_here(config) != "GPU":
        return elsewhere
    gpus, one = visible_gpu_ids(), sum(sizes.values())
    gpus = gpus[: len(gpus) - (config.retriever.gpus if config.retriever else 0)]
    largest = max(sizes, key=lambda policy: sizes[policy])
    if sizes[largest] > len(gpus):
        raise PlacementError(
            f"an evaluation needs {sizes[largest]} GPUs for a server of {largest} (engine.tp), and there are "
            f"{len(gpus)}; lower engine.tp"
        )
    free, replicas = itertools.cycle(gpus), max(1, len(gpus) // one)
    own = {
        policy: [[next(free) for _ in range(tp)] for _ in range(replicas)]
        for policy, tp in sizes.items()
    }
    return elsewhere | own


def shared_out(config: RunConfig, gpus: Mapping[str, Sequence[Sequence[str]]]) -> RunConfig:
    """The run with a share of the memory for each of the servers in an evaluation that others are beside on its `gpus`.

    What they are given stays where it adds up to at most 1; else each has its weights, and of what is left as much as
    the others.

    Raises:
        PlacementError: they do not fit.
        ModelError: the shape of a model is not known.
    """
    on = group_pairs(
        (gpu, policy) for policy, servers in gpus.items() for own in servers for gpu in own
    )
    crowds = [policies for policies in on.values() if len(policies) > 1]
    engines = {policy: for_policy(config, policy).engine for crowd in crowds for policy in crowd}
    given = {policy: _share(engine) for policy, engine in engines.items()}
    if all(all(map(given.get, crowd)) and sum(given[p] for p in crowd) <= 1 for crowd in crowds):
        return config
    memory = min(
        torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())
    )
    held = {policy: _held(config.models[policy], engine) for policy, engine in engines.items()}
    shares = dict.fromkeys(engines, 1.0)
    for crowd in crowds:
        left = _STATIC * memory - sum(held[policy] for policy in crowd)
        if left <= 0:
            table = ", ".join(f"{policy} {held[policy] / 1e9:.1f}" for policy in crowd)
            raise PlacementError(
                f"an evaluation has {len(crowd)} engines on one GPU of {memory / 1e9:.1f} GB, and they hold {table} "
                "GB; give it more GPUs, or raise engine.tp"
            )
        served = sum(engines[policy].name == "sglang" for policy in crowd)
        for policy in crowd:
            shares[policy] = min(shares[policy], (held[policy] + left / max(1, served)) / memory)
    policies = dict(config.policies)
    for policy in (policy for policy, engine in engines.items() if engine.name == "sglang"):
        own = policies[policy].own
        changed = merged(own.engine, {"options": {_SHARE: round(shares[policy], 3)}})
        policies[policy] = policies[policy].model_copy(
            update={"own": own.model_copy(update={"engine": changed})}
        )
    return config.model_copy(update={"policies": policies})


def _share(engine: EngineConfig) -> float:
    """Of a GPU's memory, what an engine's server is told to take; 0: nothing."""
    share = engine.options.get(_SHARE, engine.options.get(_SHARE.replace("-", "_")))
    return float(share) if isinstance(share, int | float) else 0.0


def _held(model: str, engine: EngineConfig) -> float:
    """Bytes that an engine holds on each of its GPUs before it plays: weights, and if it is embedded its cache."""
    shape = read_architecture(model)
    if engine.name == "sglang":
        return engine_weight_bytes(shape, engine.tp)
    return 2 * (
        engine_weight_bytes(shape, 1)
        + engine.slots * engine.max_length * kv_bytes_per_token(shape, 1)
    )  # float32


def strategies(
    groups: Sequence[int],
    nodes: Sequence[int],
    wanted: Sequence[str | None] = (),
    labels: Sequence[str | None] = (),
) -> list[str]:
    """How the bundles of each group are to lie: on one node where one has room for them, else on as few as may be.

    Args:
        groups: devices of each, in the order in which they are placed.
        nodes: devices of each.
        wanted: the label that each group's nodes are to have, None for any; (): any for all.
        labels: of each node.
    """
    free = list(nodes)
    found = []
    for size, label in itertools.zip_longest(groups, wanted):
        fitting = [
            node
            for node, room in enumerate(free)
            if room >= size and label in (None, *labels[node : node + 1])
        ]
        if fitting:
            free[min(fitting, key=lambda node: free[node])] -= size
        found.append("STRICT_PACK" if fitting else "PACK")
    return found


class DevicePlacement:
    """Devices that are set aside in the running Ray: actor options for every process, and the node that it is on."""

    def __init__(self, room: Room, *, joined: bool = False) -> None:
        """Nothing is set aside before `fill`. In a Ray that was `joined`, actors are given what a run's own Ray has."""
        self.room = room
        own = KEEP_PAGES | {"CUDA_VISIBLE_DEVICES": ""}
        self._actor = {"runtime_env": {"env_vars": own}} if joined and room.kind == "CPU" else {}
        self._groups: dict[GroupKey, list[Any]] = {}
        self.options: dict[GroupKey, list[Options]] = {}
        self.nodes: dict[GroupKey, list[str]] = {}  # Ray's id of each process's node

    def fill(self) -> None:
        """Set devices aside for every group of workers that has none.

        Raises:
            PlacementError: Ray does not find room for a group within a minute, or not in one piece.
        """
        room = self.room
        missing = [t for t in room.worker_groups if (t.policy, t.part) not in self._groups]
        held = Counter(node for nodes in self.nodes.values() for node in nodes)
        free = [devices - held[node] for node, devices in room.nodes.items()]
        if room.pool == "shared" and missing:
            most = count_devices(missing, "shared")
            group = _group([1] * most, strategies([most], free)[0], room.kind)
            part = _FINEST // len(missing) / _FINEST  # rounded down, so that all of them fit
            for workers in missing:
                self._settle(workers, [group], 1, part)
            return
        hardest_first = sorted(
            missing,
            key=lambda workers: (workers.node_label is None, -max(workers.placement_group_sizes)),
        )
        pieces = [
            (workers, size) for workers in hardest_first for size in workers.placement_group_sizes
        ]
        labels = [room.labels.get(node) for node in room.nodes]
        hows = strategies(
            [size for _, size in pieces],
            free,
            [workers.node_label for workers, _ in pieces],
            labels,
        )
        made = group_pairs(
            ((t.policy, t.part), _group([t.tp] * (size // t.tp), how, room.kind, t.node_label))
            for (t, size), how in zip(pieces, hows, strict=True)
        )
        for t in hardest_first:
            self._settle(t, made[t.policy, t.part], t.tp, 1)

    def drop(self, keys: Collection[GroupKey]) -> None:
        """Give the devices of these back; what still runs on them ends."""
        dropped = {id(group): group for key in keys for group in self._groups.pop(key, ())}
        for key in keys:
            self.options.pop(key, None)
            self.nodes.pop(key, None)
        for group in dropped.values():
            remove_placement_group(group)

    def take(self, key: GroupKey) -> Options | None:
        """One more device for an engine that has one each, None where none is free."""
        kind, label = (
            self.room.kind,
            next(t.node_label for t in self.room.worker_groups if (t.policy, t.part) == key),
        )
        if ray.available_resources().get(kind, 0) < 1:
            return None
        try:
            group = _group([1], "PACK", kind, label, wait_s=_FREE_S)
        except PlacementError:
            return None
        self._groups[key].append(group)
        self.nodes[key] += placement_group_table(group)["bundles_to_node_id"].values()
        self.options[key].append(self._actor | _options(group, 0, kind, 1))
        return self.options[key][-1]

    def give(self, key: GroupKey, place: Options) -> None:
        """Give one device of an engine that has one each back; what still runs on it ends."""
        number = next(n for n, own in enumerate(self.options[key]) if own is place)
        del self.options[key][number], self.nodes[key][number]
        remove_placement_group(self._groups[key].pop(number))

    def _settle(self, workers: WorkerGroup, groups: Sequence[Any], size: int, part: float) -> None:
        """Give workers their places in groups whose bundles have `size` devices; neighbours are on one node."""
        key, own = (workers.policy, workers.part), []
        nodes = [
            *self.room.nodes
        ]  # by address, as trainers number their ranks; that of a Ray of one's own has no name
        for group in groups:
            node_of = placement_group_table(group)["bundles_to_node_id"]
            ordered = sorted(
                node_of, key=lambda b: (nodes.index(node_of[b]) if node_of[b] in nodes else 0, b)
            )
            own += [(node_of[b], group, b) for b in ordered for _ in range(size)]
        del own[workers.devices :]
        if any(count % workers.tp for count in Counter(node for node, _, _ in own).values()):
            raise PlacementError(
                f"{workers.policy}: {workers.part} needs every {workers.tp} {self.room.kind}s on one node (tp), and "
                "the nodes' free ones do not divide so; use a smaller tp, or cluster.pool: split"
            )
        self._groups[key], self.nodes[key] = list(groups), [node for node, _, _ in own]
        self.options[key] = [
            self._actor | _options(group, bundle, self.room.kind, part) for _, group, bundle in own
        ]


def _group(
    bundles: Sequence[int],
    strategy: str,
    kind: DeviceType,
    label: str | None = None,
    *,
    wait_s: float = _WAIT_S,
) -> Any:
    wanted = [{"pool": label}] * len(bundles) if label else None
    group = placement_group(
        [{kind: size} for size in bundles], strategy=strategy, bundle_label_selector=wanted
    )
    if not group.wait(wait_s):
        remove_placement_group(group)
        raise PlacementError(
            f"Ray has no room for {sum(bundles)} {kind}s together ({strategy}); is something else there?"
        )
    return group


def _options(group: Any, bundle: int, kind: DeviceType, part: float) -> Options:
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle
    )
    devices = {"num_gpus": part, "num_cpus": 0} if kind == "GPU" else {"num_cpus": part}
    return {**devices, "scheduling_strategy": strategy}
