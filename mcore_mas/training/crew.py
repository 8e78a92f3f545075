"""A run's processes on the devices that are set aside for them: started, and started again when some are lost."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from ray.exceptions import RayError

from mcore_mas.config.run import RunConfig, for_policy
from mcore_mas.megatron.rank_watch import RankMonitor
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.planning.worker_groups import GroupKey, Part, PlacementError
from mcore_mas.runtime.checkpoint import CheckpointError
from mcore_mas.runtime.cluster import NodeLost, alive_nodes, current_node, watch_nodes
from mcore_mas.runtime.engine_factory import close_engines, make_engines
from mcore_mas.runtime.placement import DevicePlacement, Room, room_for
from mcore_mas.runtime.trainer_group import TrainerGroup, TrainerTurns
from mcore_mas.runtime.trainer_specs import critic_spec, policy_spec
from mcore_mas.training.policy_trainer import PolicyTrainer
from rollout.base.async_tasks import cancel_tasks
from rollout.base.errors import EngineError
from rollout.base.processes import ProcessLost

_T = TypeVar("_T")

_NOTICE_S = (
    90.0  # from an error that the loss of a node causes until Ray says that the node is gone
)
_OF_A_NODE = (
    RayError | EngineError | CheckpointError | ProcessLost
)  # what the loss of one may show as
_REPLACE_S = (
    600.0  # that a node which was lost may take to be replaced where there is no room without it
)


class Crew:
    """The engines and trainers of a run; engines outlive a loss of nodes that they are not on."""

    def __init__(self, config: RunConfig, room: Room, *, joined: bool) -> None:
        """Nothing runs before `start`; in a Ray that was `joined`, processes may be on several nodes."""
        threads = room.threads_of(config, joined=joined)
        cluster = config.cluster.model_copy(update={"threads_per_process": threads})
        self._config, self.room, self._joined = (
            config.model_copy(update={"cluster": cluster}),
            room,
            joined,
        )
        self._placement = DevicePlacement(room, joined=joined)
        self.engines: dict[str, Any] = {}
        self.trainers: dict[str, PolicyTrainer] = {}

    @property
    def offloaded(self) -> list[TrainerGroup]:
        """Trainers that give memory away while the team acts; of those on the same ranks the first."""
        own = self._config.policies
        groups = [
            g
            for name, trainer in self.trainers.items()
            if own[name].offload
            for g in trainer.groups.values()
        ]
        return [group for group in groups if group.home is group]

    def start(self, kl: Mapping[str, Mapping[str, float]]) -> None:
        """Start all that does not run; `kl` are adaptive coefficients that a checkpoint has.

        Raises:
            PlacementError: there is no room for it.
        """
        self._placement.fill()
        places, nodes = self._placement.options, self._placement.nodes
        models = {
            policy: model
            for policy, model in self._config.models.items()
            if policy not in self.engines
        }
        self.engines |= make_engines(
            self._config,
            models,
            self._config.folder / "train" / "engines",
            trained=True,
            places={
                policy: places[policy, "engine"]
                for policy in models
                if (policy, "engine") in places
            },
            far={policy: self._is_far(policy) for policy in models} if self._joined else None,
            berths=self._berths,
        )
        turns = TrainerTurns() if self._config.cluster.one_by_one else None
        self.trainers = {}
        for name in self._config.trained:
            self.trainers[name] = self._trainer(name, kl.get(name), turns)
        if self._joined:
            for name in self.trainers:
                own = getattr(self.engines[name], "transport", "")
                if own == "shared" and {*nodes[name, "trainer"]} != {current_node()}:
                    self.engines[name].transport = "disk"

    async def guard(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What `work` gives.

        Raises:
            NodeLost: a node that trainers are on was lost first, or is what `work` failed of.
            ProcessLost: `work` failed of a trainer's rank that is gone or hangs.
        """
        used = {
            node
            for (_, part), nodes in self._placement.nodes.items()
            if part != "engine"
            for node in nodes
        }
        if not self._joined:
            return await work
        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch_nodes(used))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and isinstance(working.exception(), _OF_A_NODE):
                await asyncio.wait({watching}, timeout=_NOTICE_S)
            if watching.done():
                watching.result()
            return working.result()
        finally:
            await cancel_tasks([working, watching])

    async def replace(self, lost: ProcessLost, note: Callable[[str], None]) -> None:
        """End all trainers. With a node also engines with a part on it, and wait until there is room for them again.

        Raises:
            PlacementError: there is none within some minutes.
        """
        for trainer in self.trainers.values():
            for group in trainer.groups.values():
                group.close()
        if not isinstance(lost, NodeLost):
            return
        alive = {node.id for node in alive_nodes()}
        devices = {
            (workers.policy, workers.part): workers.devices for workers in self.room.worker_groups
        }
        ended: list[GroupKey] = [key for key in self._placement.nodes if key[1] != "engine"]
        for key, nodes in self._placement.nodes.items():
            grown = len(nodes) > devices.get(
                key, 0
            )  # trainers have the first choice of what there is
            if key[1] == "engine" and (
                self.room.pool == "shared" or grown or not alive.issuperset(nodes)
            ):
                close_engines({key[0]: self.engines.pop(key[0])})
                ended.append(key)
        self._placement.drop(ended)
        began = told = time.monotonic()
        while True:
            try:
                self.room = self._placement.room = room_for(self._config, alive_nodes())
            except PlacementError as error:
                if time.monotonic() - began > _REPLACE_S:
                    raise
                if told == began:
                    told = time.monotonic()
                    note(f"waiting for nodes: {error}")
                await asyncio.sleep(1)
            else:
                return

    def close(self) -> None:
        """End the engines; trainers end with their Ray."""
        close_engines(self.engines)

    def _berths(self, policy: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        """What takes one more place for a policy's engine, and gives one back."""
        key: GroupKey = (policy, "engine")
        return partial(self._placement.take, key), partial(self._placement.give, key)

    def _is_far(self, policy: str) -> bool:
        """Whether an engine is asked from other nodes than its own."""
        if for_policy(self._config, policy).engine.name == "sglang":
            return len(self.room.nodes) > 1
        return {*self._placement.nodes[policy, "engine"]} != {current_node()}

    def _trainer(
        self, name: str, kl: Mapping[str, float] | None, turns: TrainerTurns | None
    ) -> PolicyTrainer:
        """A policy's trainer, with its critic where it has one; on the ranks of the policy that holds their model."""
        config, places, critic = self._config, self._placement.options, None
        holder = self.trainers.get(config.holder(name))
        base = holder.groups[config.holder(name)] if holder else None

        def group_of(
            who: str, spec: TrainerSpec, part: Part, base: TrainerGroup | None
        ) -> TrainerGroup:
            folder, hang_s = (config.folder / "train" / "ranks").resolve(), config.cluster.hang_s
            return TrainerGroup(
                who,
                spec,
                threads=config.cluster.threads_per_process or 1,
                places=places.get((name, part)),
                turns=turns,
                watched=RankMonitor(folder=folder, policy=who, hang_s=hang_s) if hang_s else None,
                base=base,
            )

        group = group_of(name, policy_spec(name, config), "trainer", base)
        if config.policies[name].critic is not None:
            base = group if config.policies[name].share_base else None
            critic = group_of(f"{name}-critic", critic_spec(name, config), "critic", base)
        return PolicyTrainer(name, config, group, critic=critic, kl=kl)
