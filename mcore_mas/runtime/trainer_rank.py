"""Rank of a trainer: one process with a shard of the model, as a Ray actor."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mcore_mas.megatron.collectives import all_gather_json
from mcore_mas.megatron.rank_watch import RankMonitor, RankWatchdog
from mcore_mas.megatron.spec import TrainerSpec, init_process_groups
from mcore_mas.runtime.shared_microbatches import SharedMicrobatches, map_microbatches
from rollout.base.digests import Digest
from rollout.base.network import interface_of
from rollout.sync.transport import SyncRoute, WeightSender, WeightUpdate, make_sender

if TYPE_CHECKING:
    from mcore_mas.megatron.step.trainer import MegatronTrainer

LOOPBACK = "127.0.0.1"

# Without a watchdog ranks wait for each other for 30 days, which is longer than any run.
_UNWATCHED_TIMEOUT_S = 30 * 86_400.0


class TrainerRank:
    """Rank of the trainer of a policy, or of all policies with adapters on one frozen model."""

    def __init__(self, threads: int, monitor: RankMonitor | None) -> None:
        """Import Megatron; `join` loads the model.

        Args:
            threads: number of torch's threads in this process.
            monitor: the controller's view of the ranks, in whose files this rank reports its
                phases; None if no rank is watched.
        """
        # The controller imports this module, and does not need Megatron.
        from mcore_mas.megatron.step.trainer import MegatronTrainer

        self._trainer_class = MegatronTrainer
        self._threads = threads
        self._monitor = monitor
        self._watchdog: RankWatchdog | None = None
        self._rank = 0  # until it joins the others
        self._store: Any = None
        self._trainers: dict[str, MegatronTrainer] = {}  # by policy
        self._senders: dict[str, tuple[SyncRoute, WeightSender]] = {}  # by policy

    def node_address(self) -> str:
        """Return the address of the node that this rank is on."""
        return str(ray.util.get_node_ip_address())

    def open_store(self, address: str) -> tuple[str, int]:
        """Open the store at which the ranks meet, on rank 0.

        Args:
            address: address of this node, at which the store listens on a free port.

        Returns:
            Address and port of the store.
        """
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

    def join(
        self, rank: int, store_address: tuple[str, int], specs: Mapping[str, TrainerSpec]
    ) -> str:
        """Join the other ranks and load the model, once for all policies.

        Args:
            rank: number of this rank.
            store_address: address and port of the store at which the ranks meet.
            specs: specs of the trainers, by policy. The trainers share the model of the first one.

        Returns:
            Name of this rank's GPU; "" without one.
        """
        self._rank = rank
        if self._monitor:
            self._watchdog = RankWatchdog(self._monitor.status_file(rank), self._monitor.hang_s)
        with self._phase("join"):
            first_spec = next(iter(specs.values()))
            _set_network_environment(first_spec.cumem)
            set_launch_order(first_spec.tp)
            set_deterministic_kernels(deterministic=first_spec.deterministic)
            store = self._store or TCPStore(*store_address, is_master=False)
            init_process_groups(
                first_spec,
                rank=rank,
                threads=self._threads,
                store=store,
                patience_s=self._timeout_s,
            )
            for policy, spec in specs.items():
                base = next(iter(self._trainers.values()), None)
                self._trainers[policy] = self._trainer_class(spec, base)
        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""

    @property
    def _timeout_s(self) -> float:
        """Seconds that ranks wait for each other: until long after the watchdog reports a hang."""
        return 2 * self._monitor.hang_s if self._monitor else _UNWATCHED_TIMEOUT_S

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """Report a phase to the watchdog for this block."""
        return self._watchdog.phase(name) if self._watchdog else nullcontext()

    def save(self, policy: str, folder: Path) -> None:
        """Copy weights and optimizer state, which are then written in the background."""
        with self._phase("save"):
            self._trainers[policy].save(folder)

    @ray.method(concurrency_group="writing")
    def wait_written(self, policy: str) -> dict[str, Digest]:
        """Wait until the state that `save` copied is on disk; return the digests by file."""
        return self._trainers[policy].wait_written()

    def restore(self, policy: str, folder: Path) -> None:
        """Load a state that `save` wrote."""
        with self._phase("restore"):
            self._trainers[policy].restore(folder)

    def update(
        self, policy: str, shared: SharedMicrobatches, position: int | None
    ) -> tuple[dict[str, float], float]:
        """Take one optimizer step; return the trainer's metrics, and the seconds that it took."""
        started = time.perf_counter()
        with self._phase("update"):
            metrics = self._trainers[policy].update(map_microbatches(shared), position)
        return metrics, time.perf_counter() - started

    def keep_version(self, policy: str, version: int, count: int) -> None:
        """Copy the present weights to host memory; see `ShardedModel.keep_version`."""
        with self._phase("keep_version"):
            self._trainers[policy].keep_version(version, count)

    def score(
        self, policy: str, shared: SharedMicrobatches, reference: bool, version: int | None
    ) -> list[Any]:
        """Return the scores of each micro-batch, as float32 arrays [N], on rank 0; [] on other ranks."""
        with self._phase("score"):
            scores = self._trainers[policy].score(
                map_microbatches(shared), reference=reference, version=version
            )
        return [score.numpy() for score in scores] if self._rank == 0 else []

    def send_weights(self, policy: str, route: SyncRoute, version: int) -> WeightUpdate:
        """Gather all weights, or the adapter, with the other ranks, and send them along a route."""
        with self._phase("send_weights"):
            sender = self._sender(policy, route)
            model = self._trainers[policy].model
            weights = model.weights() if route.adapter is None else model.adapter()
            return sender.send(weights, version, route.half)

    def _sender(self, policy: str, route: SyncRoute) -> WeightSender:
        """Return the sender of a route, and make one if the route has changed."""
        lasting_route = replace(route, half=None)  # the half alternates from update to update
        if policy in self._senders:
            last_route, sender = self._senders[policy]
            if last_route == lasting_route:
                return sender
            sender.close()
        sender = make_sender(lasting_route, rank=self._rank, all_gather=all_gather_json)
        self._senders[policy] = lasting_route, sender
        return sender

    def write_model(self, policy: str, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        with self._phase("write_model"):
            self._trainers[policy].model.write(folder)

    def sleep(self) -> int:
        """Offload all trainers; return the bytes of GPU memory that become free.

        Weights that trainers share are offloaded once.
        """
        with self._phase("sleep"):
            return sum(trainer.sleep() for trainer in self._trainers.values())

    def wake(self) -> None:
        """Load all trainers back to the GPU."""
        with self._phase("wake"):
            for trainer in self._trainers.values():
                trainer.wake()


def _set_network_environment(cumem: str | None) -> None:
    """Set the network interface of gloo and NCCL, and NCCL_CUMEM_ENABLE.

    The interface is that of this node's address in Ray, or loopback if there is one node.
    Without this setting gloo would take the interface of the host name's address, and NCCL the
    first one that it finds. Settings of the user are kept.

    Args:
        cumem: value of NCCL_CUMEM_ENABLE; None leaves it to NCCL.
    """
    has_other_nodes = len(ray.nodes()) > 1
    address = str(ray.util.get_node_ip_address()) if has_other_nodes else LOOPBACK
    interface = interface_of(address)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)
    if cumem is not None:
        os.environ.setdefault("NCCL_CUMEM_ENABLE", cumem)


def set_launch_order(tp: int) -> None:
    """Let a GPU start kernels in the order in which they are launched, if tensor-parallel ranks exchange data.

    Megatron launches an exchange before the product that hides it. With several hardware queues, the
    product may start first and leave no multiprocessor to the exchange. A setting of the user is kept.
    It must be set before this process uses CUDA.
    """
    if tp > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def set_deterministic_kernels(*, deterministic: bool) -> None:
    """Make Transformer Engine choose deterministic attention, if the run is `deterministic`.

    The kernels of this package are deterministic in any case. A setting of the user is kept.
    """
    if deterministic:
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


# `wait_written` waits in a separate thread, so that later calls need not wait for files.
TrainerRankActor = ray.remote(  # type: ignore[call-overload]
    num_cpus=0, concurrency_groups={"writing": 1}
)(TrainerRank)
