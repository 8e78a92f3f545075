"""Engines and trainers of a run: started on their devices, and started again when some are lost."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

from ray.exceptions import RayError

from mcore_mas.config.run import RunConfig
from mcore_mas.config.run_sections import for_policy
from mcore_mas.megatron.rank_watch import RankMonitor
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.planning.worker_groups import Part, PlacementError
from mcore_mas.runtime.checkpoint import CheckpointError
from mcore_mas.runtime.cluster import NodeLost, alive_nodes, watch_nodes
from mcore_mas.runtime.devices import RunDevices, find_devices
from mcore_mas.runtime.engine_factory import close_engines, engine_requests, make_engines
from mcore_mas.runtime.placement import DevicePlacement
from mcore_mas.runtime.rank_pool import MemoryRotation
from mcore_mas.runtime.trainer_group import TrainerGroup
from mcore_mas.runtime.trainer_specs import critic_spec, policy_spec
from mcore_mas.training.colocation import offload_trainers
from mcore_mas.training.policy_trainer import PolicyTrainer
from rollout.base.async_tasks import cancel_tasks
from rollout.base.errors import EngineError
from rollout.base.restarts import ProcessLost

_T = TypeVar("_T")

# errors that the loss of a node can cause before Ray reports the loss
_CAUSED_BY_LOSS = (RayError, EngineError, CheckpointError, ProcessLost)
_REPORT_S = 90.0  # time from such an error until Ray reports that the node is gone
_REPLACE_S = 600.0  # time for which a run waits for enough devices after the loss of a node


class RunWorkers:
    """The engines and trainers of a run.

    Trainers restart together after a loss. If a node is lost, its engines restart too; in a shared pool,
    all engines do.
    """

    def __init__(self, config: RunConfig, devices: RunDevices) -> None:
        """Initialize without starting processes; see `start`."""
        threads = devices.threads_per_process(config)
        cluster = config.cluster.model_copy(update={"threads_per_process": threads})
        self.devices = devices
        self.engines: dict[str, Any] = {}
        self.trainers: dict[str, PolicyTrainer] = {}
        self._config = config.model_copy(update={"cluster": cluster})
        self._placement = DevicePlacement(devices)

    @property
    def groups_to_offload(self) -> list[TrainerGroup]:
        """Trainer groups to offload during rollouts, one for each set of ranks."""
        groups: list[TrainerGroup] = []
        for policy, trainer in self.trainers.items():
            if self._config.policies[policy].offload:
                groups.extend(group for group in trainer.groups.values() if group.owns_ranks)
        return groups

    def start(self, kl: Mapping[str, Mapping[str, float]]) -> None:
        """Start the engines that do not run, and all trainers.

        Args:
            kl: state of the adaptive KL coefficients in the checkpoint, by policy; {} at a new start.

        Raises:
            PlacementError: there are too few devices.
        """
        self._placement.fill()
        self._start_engines()
        rotation = MemoryRotation() if self._config.cluster.one_by_one else None
        self.trainers = {}
        for policy in self._config.trained:
            self.trainers[policy] = self._make_trainer(policy, kl.get(policy), rotation)
        self._avoid_shared_memory_between_nodes()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of `work`, while the nodes of the trainers are watched.

        Raises:
            NodeLost: a node of the trainers is lost, also if `work` fails first because of that.
            ProcessLost: a rank of a trainer is gone or hangs.
        """
        if not self.devices.joined:
            return await work

        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(watch_nodes(self._trainer_nodes()))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and isinstance(working.exception(), _CAUSED_BY_LOSS):
                await asyncio.wait({watching}, timeout=_REPORT_S)
            if watching.done():
                watching.result()
            return working.result()
        finally:
            await cancel_tasks([working, watching])

    async def recover(self, lost: ProcessLost, note: Callable[[str], None]) -> None:
        """End all trainers after a loss, so that `start` can start them again.

        After the loss of a node, the engines on it end too, and in a shared pool all engines. The run
        then waits until there are enough devices.

        Args:
            lost: the loss.
            note: called with one line if the run has to wait.

        Raises:
            PlacementError: there are too few devices after some minutes.
        """
        for trainer in self.trainers.values():
            for group in trainer.groups.values():
                group.close()
        if isinstance(lost, NodeLost):
            self._release_devices()
            await self._wait_for_devices(note)

    def close(self) -> None:
        """End the engines. Trainers are Ray actors, and end when the run's Ray is shut down."""
        close_engines(self.engines)

    def _start_engines(self) -> None:
        """Start an engine for every policy whose engine does not run yet."""
        models = {}
        placements = {}
        for policy, model in self._config.models.items():
            if policy in self.engines:
                continue
            models[policy] = model
            actor_options = self._placement.options.get((policy, "engine"))
            if actor_options is not None:
                placements[policy] = actor_options
            elif for_policy(self._config, policy).engine.name == "embedded":
                placements[policy] = [self._placement.driver_node_options()]
        requests = engine_requests(
            self._config,
            models,
            self._config.folder / "train" / "engines",
            trained=True,
            placements=placements,
            nodes=len(self.devices.nodes) if self.devices.joined else None,
            restart_guard=self._offload_for_restart,
        )
        self.engines |= make_engines(requests)

    def _offload_for_restart(self) -> AbstractAsyncContextManager[object]:
        """Return a context manager that offloads the trainers for a block in which an engine restarts.

        It does nothing if engines and trainers do not share GPUs.
        """
        if not self._config.engine.sleep:
            return nullcontext()
        return offload_trainers(self.groups_to_offload)

    def _avoid_shared_memory_between_nodes(self) -> None:
        """Let engines whose trainer is on other nodes take weights from a folder."""
        if not self.devices.joined:
            return
        for policy in self.trainers:
            engine = self.engines[policy]
            trainer_nodes = set(self._placement.nodes[self._config.holder(policy), "trainer"])
            in_memory = getattr(engine, "transport", "") == "shared"
            if in_memory and trainer_nodes != {self.devices.driver_node}:
                engine.transport = "disk"

    def _trainer_nodes(self) -> set[str]:
        """Return Ray's ids of the nodes that trainers and critics are on."""
        trainer_nodes: set[str] = set()
        for (_, part), nodes in self._placement.nodes.items():
            if part != "engine":
                trainer_nodes.update(nodes)
        return trainer_nodes

    def _release_devices(self) -> None:
        """Release the devices of all trainers and of the engines on lost nodes; end these engines.

        In a shared pool, all engines end.
        """
        alive = {node.id for node in alive_nodes()}
        released = []
        for key, nodes in self._placement.nodes.items():
            policy, part = key
            if part == "engine":
                if self.devices.pool == "split" and alive.issuperset(nodes):
                    continue
                close_engines({policy: self.engines.pop(policy)})
            released.append(key)
        self._placement.drop(released)

    async def _wait_for_devices(self, note: Callable[[str], None]) -> None:
        deadline = time.monotonic() + _REPLACE_S
        noted = False
        while True:
            try:
                self.devices = find_devices(self._config, alive_nodes())
                self._placement.devices = self.devices
                return
            except PlacementError as error:
                if time.monotonic() > deadline:
                    raise
                if not noted:
                    note(f"waiting for nodes: {error}")
                    noted = True
            await asyncio.sleep(1)

    def _make_trainer(
        self, policy: str, kl: Mapping[str, float] | None, rotation: MemoryRotation | None
    ) -> PolicyTrainer:
        """Start the trainer of a policy, and its critic.

        If the policy shares its base model with others, they train on the ranks of the first one.
        """
        config = self._config
        holder = config.holder(policy)
        base = self.trainers[holder].groups[holder] if holder in self.trainers else None
        group = self._make_group(
            policy, policy_spec(policy, config), (policy, "trainer"), rotation=rotation, base=base
        )
        critic = None
        if config.policies[policy].critic is not None:
            critic = self._make_group(
                f"{policy}.critic",
                critic_spec(policy, config),
                (policy, "critic"),
                rotation=rotation,
                base=group if config.policies[policy].share_base else None,
            )
        return PolicyTrainer(policy, config, group, critic=critic, kl=kl)

    def _make_group(
        self,
        name: str,
        spec: TrainerSpec,
        placement_key: tuple[str, Part],
        *,
        rotation: MemoryRotation | None,
        base: TrainerGroup | None,
    ) -> TrainerGroup:
        """Start the ranks of a policy or of its critic.

        Args:
            name: name in logs: POLICY, or POLICY.critic.
            spec: spec of the trainer.
            placement_key: the policy and its part in the placement.
            rotation: argument of `TrainerGroup`.
            base: argument of `TrainerGroup`.
        """
        monitor = None
        if self._config.cluster.hang_s:
            folder = (self._config.folder / "train" / "ranks").resolve()
            monitor = RankMonitor(folder=folder, policy=name, hang_s=self._config.cluster.hang_s)
        return TrainerGroup(
            name,
            spec,
            threads=self._config.cluster.threads_per_process or 1,
            actor_options=self._placement.options.get(placement_key),
            rotation=rotation,
            monitor=monitor,
            base=base,
        )
