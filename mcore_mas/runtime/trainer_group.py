"""Trainer group (a worker group): one policy's ranks as Ray actors, seen from the controller."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import warnings
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mcore_mas.megatron.batch import CostModel, Microbatch
from mcore_mas.megatron.collectives import all_gather_json
from mcore_mas.megatron.rank_watch import RankMonitor, RankWatchdog
from mcore_mas.megatron.spec import TrainerSpec, init_process_groups
from mcore_mas.planning.gpus import peak_flops
from mcore_mas.runtime.errors import ClusterError
from rollout.base.async_tasks import cancel_tasks
from rollout.base.digests import Digest
from rollout.base.processes import ProcessLost, interface_of
from rollout.sync.transport import SyncRoute, WeightSender, WeightUpdate, make_sender

if TYPE_CHECKING:
    from mcore_mas.megatron.step.trainer import MegatronTrainer

_LOOPBACK = "127.0.0.1"
_START_S = 600.0  # that Ray may take to start the processes of all ranks
_GONE_S = 10.0  # in which Ray knows that a rank is gone
_ANY_TIME_S = 30 * 86_400.0
_Gone = ray.exceptions.RayActorError


_Shared = Sequence[dict[str, Any]]  # of each micro-batch its fields, arrays for tensors


def _shared(microbatches: Sequence[Microbatch]) -> Any:
    """Micro-batches for all ranks. Experts on record, GBs of them, are mapped by the ranks of a machine, not copied."""
    return ray.put(
        [
            {name: _array(getattr(batch, name)) for name in Microbatch.__slots__}
            for batch in microbatches
        ]
    )


def _array(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) else value


def _mapped(shared: _Shared) -> list[Microbatch]:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # Ray's store is read-only, of which torch warns: nobody writes there
        return [
            Microbatch(**{name: _tensor(name, value) for name, value in own.items()})
            for own in shared
        ]


def _tensor(name: str, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return torch.from_numpy(
        value if name == "routing" else value.copy()
    )  # which a loss of one's own may write to


class _Rank:
    """One process of the trainers of a policy, or of all policies on one frozen model."""

    def __init__(self, threads: int, watched: RankMonitor | None) -> None:
        from mcore_mas.megatron.step.trainer import (
            MegatronTrainer,  # loads Megatron, which the controller does not
        )

        self._load, self._watched = MegatronTrainer, watched
        self._watch: RankWatchdog | None = None
        self._rank = 0  # until it joins the others
        self._threads = threads
        self._store: Any = None
        self._trainers: dict[str, MegatronTrainer] = {}
        self._senders: dict[str, tuple[SyncRoute, WeightSender]] = {}

    def node(self) -> str:
        """The address of the node that this rank is on."""
        return str(ray.util.get_node_ip_address())

    def host(self, address: str) -> tuple[str, int]:
        """Open the place where the ranks meet, at `address` only; on rank 0. The port is the system's choice."""
        listener = socket.create_server((address, 0))
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return address, port

    def join(self, rank: int, place: tuple[str, int], specs: Mapping[str, TrainerSpec]) -> str:
        """Meet the other ranks and load the model, once for all policies; returns what its GPU is called, if any."""
        self._rank = rank
        if self._watched:
            self._watch = RankWatchdog(self._watched.status_file(rank), self._watched.hang_s)
        with self._phase("join"):
            first = next(iter(specs.values()))
            own = str(ray.util.get_node_ip_address()) if len(ray.nodes()) > 1 else _LOOPBACK
            for name in (
                "GLOO_SOCKET_IFNAME",
                "NCCL_SOCKET_IFNAME",
            ):  # else that of the host's name, if it has one
                os.environ.setdefault(name, interface_of(own))
            if first.cumem is not None:
                os.environ.setdefault("NCCL_CUMEM_ENABLE", first.cumem)
            store = self._store or TCPStore(*place, is_master=False)
            threads, patience_s = self._threads, self._patience_s
            init_process_groups(
                first, rank=rank, threads=threads, store=store, patience_s=patience_s
            )
            for policy, spec in specs.items():
                self._trainers[policy] = self._load(spec, next(iter(self._trainers.values()), None))
        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""

    @property
    def _patience_s(self) -> float:
        """Seconds that ranks wait for each other: until long after it is told that they hang."""
        return 2 * self._watched.hang_s if self._watched else _ANY_TIME_S

    def call(self, policy: str, method: str, *arguments: Any) -> Any:
        """Call the `method` of a policy's trainer, as all ranks do."""
        with self._phase(method):
            return getattr(self._trainers[policy], method)(*arguments)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return self._watch.phase(name) if self._watch else nullcontext()

    def update(
        self, policy: str, shared: _Shared, at: int | None
    ) -> tuple[dict[str, float], float]:
        """The trainer's metrics, and how many seconds it took."""
        began = time.perf_counter()
        return self.call(policy, "update", _mapped(shared), at), time.perf_counter() - began

    def score(self, policy: str, shared: _Shared, reference: bool) -> list[Any]:
        with self._phase("score"):
            scores = self._trainers[policy].score(_mapped(shared), reference=reference)
        return [] if self._rank else [score.numpy() for score in scores]

    def export(self, policy: str, route: SyncRoute, version: int) -> WeightUpdate:
        """Gather all weights, or the adapter, with the other ranks and send them along `route`."""
        lasting_route = replace(route, half=None)  # the half differs from update to update
        known = self._senders.get(policy)
        if known is None or known[0] != lasting_route:
            sender = make_sender(lasting_route, rank=self._rank, all_gather=all_gather_json)
            self._senders[policy] = lasting_route, sender
        model = self._trainers[policy].model
        weights = model.weights() if route.adapter is None else model.adapter()
        with self._phase("export"):
            return self._senders[policy][1].send(weights, version, route.half)

    @ray.method(concurrency_group="writing")
    def written(self, policy: str) -> dict[str, Digest]:
        return self._trainers[policy].written()

    def write_model(self, policy: str, folder: Path) -> None:
        with self._phase("write_model"):
            self._trainers[policy].model.write(folder)

    def sleep(self) -> int:
        """All trainers; weights that they have in common are given away once."""
        with self._phase("sleep"):
            return sum(trainer.sleep() for trainer in self._trainers.values())

    def wake(self) -> None:
        with self._phase("wake"):
            for trainer in self._trainers.values():
                trainer.wake()


# a thread of its own waits for what is written while the ranks' other calls go on in their order
_RANKS = ray.remote(num_cpus=0, concurrency_groups={"writing": 1})(_Rank)  # type: ignore[call-overload]


def meeting_address(nodes: Sequence[str]) -> str:
    """Where ranks meet: on the loopback of the one node that all of them are on, else at the address of rank 0's."""
    return _LOOPBACK if len(set(nodes)) == 1 else nodes[0]


class TrainerTurns:
    """Trainers on the same devices of which only the one that works has its memory."""

    def __init__(self) -> None:
        self.groups: list[TrainerGroup] = []  # one that joins has no memory yet
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def of(self, group: TrainerGroup) -> AsyncIterator[None]:
        """Inside the block `group` has its memory; it keeps it until another one works."""
        async with self._lock:
            for other in self.groups:
                if other is not group:
                    await other.sleep()
            await group.wake()
            yield


class TrainerGroup:
    """A policy's trainer, spread over `spec.ranks` Ray actors that make the same calls."""

    def __init__(
        self,
        policy: str,
        spec: TrainerSpec,
        *,
        threads: int,
        places: Sequence[Mapping[str, Any]] | None = None,
        turns: TrainerTurns | None = None,
        watched: RankMonitor | None = None,
        base: TrainerGroup | None = None,
    ) -> None:
        """Start the ranks; returns before they have loaded the model (see `ready`), which waits for its turn.

        Args:
            places: actor options of each rank, as `DevicePlacement` of `mcore_mas.training` gives them; None: a GPU
                each where there are any, and none set aside.
            watched: where they say what they are at; None: a rank that hangs is waited for.
            base: is not `ready` yet, and trains adapters on the same model; its ranks do this policy's work too, one
                call after the other, hold the frozen model once, and sleep and wake as one. It takes the places of
                `places` and `turns`.
        """
        self.policy = policy
        if places is None:
            places = [
                {"num_gpus": 1 if not base and ray.cluster_resources().get("GPU") else 0}
            ] * spec.ranks
        self.home: TrainerGroup = base.home if base else self  # whose ranks do the work
        self._cpu: bool = base._cpu if base else not any(place.get("num_gpus") for place in places)
        self.cost_model = CostModel.of(
            spec, cpu=self._cpu
        )  # what micro-batches are to be packed for
        if base:
            self.home._specs[policy] = spec
            return
        self._specs: dict[str, TrainerSpec] = {policy: spec}
        self._watched = watched
        self._turns = turns
        self._asleep, self._joined = turns is not None, False
        self._peak: float | None = None  # of a rank's GPU, once `ready`
        self._waking = asyncio.Lock()
        self._calling = asyncio.Lock()  # ranks take calls in the order in which they were made
        if turns:
            turns.groups.append(self)
        # in their order once `ready`
        self._ranks = [_RANKS.options(**place).remote(threads, watched) for place in places]

    async def ready(self) -> None:
        """Number the ranks by node, and on it as their places are, and wait until each has its shard.

        So the ranks of an engine that shares their GPUs lie as they do. With a `base` this is the base's to do.

        Raises:
            ClusterError: Ray does not start the processes.
        """
        if self.home is not self:
            return
        try:
            async with asyncio.timeout(_START_S):
                nodes = await self._ask(rank.node.remote() for rank in self._ranks)
        except TimeoutError:
            raise ClusterError(
                f"policy {self.policy}: Ray has not started its {len(self._ranks)} processes within {_START_S:.0f} s; "
                "its logs say why: in train/ray of the run's folder, or in /tmp/ray on the nodes of a joined Ray"
            ) from None
        order = sorted(range(len(nodes)), key=lambda number: (nodes[number], number))
        self._ranks = [self._ranks[number] for number in order]
        async with self._turn():
            self._joined = True
            place = await self._ranks[0].host.remote(meeting_address(sorted(nodes)))
            joins = (
                rank.join.remote(number, place, self._specs)
                for number, rank in enumerate(self._ranks)
            )
            self._peak = peak_flops((await self._ask(joins))[0])

    def close(self) -> None:
        """End all ranks, also those that wait for one that is gone."""
        for rank in self.home._ranks:
            ray.kill(rank)

    async def update(
        self, microbatches: Sequence[Microbatch], at: int | None = None
    ) -> dict[str, float]:
        """One optimizer step; see `MegatronTrainer.update`.

        Its metrics say too how many seconds it took of all devices, and of GPUs whose peak is known how many
        floating-point operations they can do in these.
        """
        metrics, seconds = (await self._all("update", _shared(microbatches), at))[0]
        spent = {"device_s": seconds * len(self.home._ranks)}
        if self.home._peak:
            spent["peak_flops"] = self.home._peak * spent["device_s"]
        return {**metrics, **spent}

    async def score(
        self, microbatches: Sequence[Microbatch], *, reference: bool = False
    ) -> list[Tensor]:
        """Log-probabilities, or a critic's values, of each micro-batch; see `MegatronTrainer.score`."""
        scores = (await self._all("score", _shared(microbatches), reference))[0]
        # what comes out of the object store is read-only, and torch has no tensors of that kind
        return [torch.from_numpy(score.copy()) for score in scores]

    async def export(self, route: SyncRoute, version: int) -> WeightUpdate:
        """Send all weights over an engine's `route`; their bytes do not pass through this process.

        Raises:
            EngineError: the engine does not have these tensors, or does not take them.
        """
        updates: list[WeightUpdate] = await self._all("export", route, version)
        return updates[0]

    async def sleep(self) -> int:
        """Give memory away while nothing is trained; returns the bytes on all ranks; see `MegatronTrainer.sleep`."""
        async with self.home._calling:
            return await self.home._rest(asleep=True)

    async def wake(self) -> None:
        """Take it back."""
        async with self.home._calling:
            await self.home._rest(asleep=False)

    async def _rest(self, *, asleep: bool) -> int:
        given = []
        if asleep != self._asleep and (asleep or self._joined):
            given = await self._ask(
                (rank.sleep if asleep else rank.wake).remote() for rank in self._ranks
            )
        self._asleep = asleep
        return sum(given) if asleep else 0

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Inside the block it has no memory, and what it is asked waits; then it has what it had."""
        async with self.home._calling:
            slept = self.home._asleep
            await self.home._rest(asleep=True)  # after what the ranks are at
            try:
                yield
            finally:
                await self.home._rest(asleep=slept)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Inside the block it can be asked anything; afterwards it sleeps again if it slept."""
        async with self.home._waking:  # another policy on these ranks may want the same
            slept = self.home._asleep
            await self.wake()
            try:
                yield
            finally:
                if slept:
                    await self.sleep()

    async def save(self, folder: Path) -> None:
        """Copy weights and optimizer state, which the ranks then write into `folder` beside their other work."""
        await self._all("call", "save", folder)

    async def written(self) -> dict[str, Digest]:
        """Wait until what `save` copied is on disk; size and digest of every file by name.

        Raises:
            OSError: a rank could not write.
            ProcessLost: one has died.
        """
        files: dict[str, Digest] = {}
        for number, ref in enumerate(
            [rank.written.remote(self.policy) for rank in self.home._ranks]
        ):
            try:
                files |= await ref
            except ray.exceptions.RayError as error:
                self._check_lost([number] if isinstance(error, _Gone) else (), error)
                reason = str(getattr(error, "cause", error)).strip().splitlines()[-1]
                raise OSError(f"rank {number} of {self.policy}: {reason}") from error
        return files

    async def restore(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        await self._all("call", "restore", folder)

    async def write_model(self, folder: Path) -> None:
        """Write a Hugging Face folder of the policy as it is now."""
        await self._all("write_model", folder)

    def _turn(self) -> AbstractAsyncContextManager[None]:
        home = self.home
        return home._turns.of(home) if home._turns else nullcontext()

    async def _all(self, method: str, *arguments: object) -> list[Any]:
        """What every rank's `method` gives for this policy, when it has its turn."""
        async with self._turn():
            async with self.home._calling:
                calls = [
                    getattr(rank, method).remote(self.policy, *arguments)
                    for rank in self.home._ranks
                ]
            return await self._ask(calls)

    async def _ask(self, calls: Iterable[Any]) -> list[Any]:
        """What the ranks' calls return. The first that fails is not kept waiting for by those that hang for its sake.

        Raises:
            ProcessLost: a rank is gone, or hangs.
        """
        asked = [asyncio.wrap_future(call.future()) for call in calls]
        together, home = asyncio.gather(*asked), self.home
        watched = home._watched if home._joined else None
        watching: asyncio.Future[Any] = asyncio.ensure_future(
            watched.wait_for_hang(asked) if watched else asyncio.Event().wait()
        )
        try:
            await asyncio.wait({together, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not together.done():
                await watching
            if together.exception():  # others complain of a rank that is gone, and often sooner
                await asyncio.wait(asked, timeout=_GONE_S)
                lost = [
                    n
                    for n, own in enumerate(asked)
                    if own.done() and isinstance(own.exception(), _Gone)
                ]
                self._check_lost(lost, together.exception())
            return list(together.result())
        finally:
            await cancel_tasks([together, *asked, watching])

    def _check_lost(self, ranks: Sequence[int], error: BaseException | None) -> None:
        if ranks:
            raise ProcessLost(
                f"policy {self.policy}: rank {', '.join(map(str, ranks))} died"
            ) from error
