"""Trainer group: the controller's view of a policy's trainer, which has several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from mcore_mas.megatron.batch import CostModel, Microbatch
from mcore_mas.megatron.rank_watch import RankMonitor
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.runtime.rank_pool import MemoryRotation, RankPool
from mcore_mas.runtime.shared_microbatches import share_microbatches
from rollout.base.digests import Digest
from rollout.sync.transport import SyncRoute, WeightUpdate


class TrainerGroup:
    """Trainer of a policy or a critic; a `MegatronTrainer` is its part on one rank.

    Groups of policies with adapters on one frozen model share their ranks. These hold the model
    once, do the work of one policy after the other, and sleep and wake as one.

    Attributes:
        policy: name of the policy, or POLICY.critic.
        cost_model: cost of micro-batches on these ranks, for packing.
        owns_ranks: False if the group shares the ranks of another one, which started them.
    """

    _ranks: RankPool

    def __init__(
        self,
        policy: str,
        spec: TrainerSpec,
        *,
        threads: int,
        actor_options: Sequence[Mapping[str, Any]] | None = None,
        rotation: MemoryRotation | None = None,
        monitor: RankMonitor | None = None,
        base: TrainerGroup | None = None,
    ) -> None:
        """Start the processes of the ranks; `ready` waits until they have loaded the model.

        Args:
            policy: name of the policy, or POLICY.critic.
            spec: spec of the trainer.
            threads: number of torch's threads on each rank.
            actor_options: Ray's options of each rank's actor, as `DevicePlacement` gives them;
                None: one GPU for each rank, if there are any.
            rotation: trainers on the same devices, of which only one at a time is loaded; None if
                no other trainer uses the devices.
            monitor: detects ranks that hang; None waits for them forever.
            base: group whose ranks also do the work of this policy, and which is not `ready` yet.
                `actor_options`, `rotation` and `monitor` are then those of `base`.
        """
        self.policy = policy
        self.owns_ranks = base is None
        if base is not None:
            self._ranks = base._ranks
            self._ranks.specs[policy] = spec
        else:
            if actor_options is None:
                num_gpus = 1 if ray.cluster_resources().get("GPU") else 0
                actor_options = [{"num_gpus": num_gpus}] * spec.ranks
            self._ranks = RankPool(
                policy,
                spec,
                threads=threads,
                actor_options=actor_options,
                monitor=monitor,
                rotation=rotation,
            )
        self.cost_model = CostModel.of(spec, cpu=self._ranks.is_on_cpu)

    async def ready(self) -> None:
        """Wait until all ranks have loaded the model; a group with a base leaves this to its base.

        Raises:
            ClusterError: Ray does not start the processes.
        """
        if self.owns_ranks:
            await self._ranks.start()

    def close(self) -> None:
        """Kill all ranks."""
        self._ranks.close()

    async def update(
        self, microbatches: Sequence[Microbatch], position: int | None = None
    ) -> dict[str, float]:
        """Take one optimizer step; see `MegatronTrainer.update`.

        Args:
            microbatches: micro-batches of the step.
            position: position in the learning rate schedule; None: the number of
                updates so far.

        Returns:
            The trainer's metrics, `device_s` (the update's seconds times the number of ranks), and
            `peak_flops` (the floating-point operations that all ranks could do in this time), if
            their peak is known.
        """
        shared = share_microbatches(microbatches)
        results = await self._ranks.call(self.policy, "update", shared, position)
        metrics, seconds = results[0]
        device_s = seconds * len(self._ranks)
        metrics = {**metrics, "device_s": device_s}
        if self._ranks.peak_flops:
            metrics["peak_flops"] = self._ranks.peak_flops * device_s
        return metrics

    async def keep_version(self, version: int, count: int) -> None:
        """Copy the present weights to host memory; see `ShardedModel.keep_version`."""
        await self._ranks.call(self.policy, "keep_version", version, count)

    async def score(
        self,
        microbatches: Sequence[Microbatch],
        *,
        reference: bool = False,
        version: int | None = None,
    ) -> list[Tensor]:
        """Compute the log-probabilities of all labels, or a critic's values; see `MegatronTrainer.score`.

        Returns:
            For each micro-batch with N labels, a float32 tensor [N] on the CPU.
        """
        shared = share_microbatches(microbatches)
        results = await self._ranks.call(self.policy, "score", shared, reference, version)
        # Arrays of the object store are read-only, which tensors cannot be.
        return [torch.from_numpy(score.copy()) for score in results[0]]

    async def send_weights(self, route: SyncRoute, version: int) -> WeightUpdate:
        """Send all weights along an engine's route; their bytes do not pass through this process.

        Args:
            route: route that the engine has offered for its next weights.
            version: version that the weights get.

        Returns:
            Rank 0's update, for the engine's `commit_update`.

        Raises:
            EngineError: the engine does not have these tensors, or does not take them.
            ProcessLost: a rank has died, or hangs.
        """
        updates: list[WeightUpdate] = await self._ranks.call(
            self.policy, "send_weights", route, version
        )
        return updates[0]

    async def sleep(self) -> int:
        """Offload the trainer; return the bytes that become free on all ranks."""
        return await self._ranks.sleep()

    async def wake(self) -> None:
        """Load the trainer back to its devices."""
        await self._ranks.wake()

    def offloaded(self) -> AbstractAsyncContextManager[None]:
        """Offload the trainer for a block; calls wait until the block ends."""
        return self._ranks.offloaded()

    def awake(self) -> AbstractAsyncContextManager[None]:
        """Load the trainer for a block, and offload it afterwards if it was offloaded."""
        return self._ranks.awake()

    async def save(self, folder: Path) -> None:
        """Copy weights and optimizer state; the ranks write them to a folder in the background."""
        await self._ranks.call(self.policy, "save", folder)

    async def wait_written(self) -> dict[str, Digest]:
        """Wait until the state that `save` copied is on disk; return size and digest by file.

        Raises:
            OSError: a rank could not write its files.
            ProcessLost: a rank has died.
        """
        return await self._ranks.wait_written(self.policy)

    async def restore(self, folder: Path) -> None:
        """Load a state that `save` wrote."""
        await self._ranks.call(self.policy, "restore", folder)

    async def write_model(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        await self._ranks.call(self.policy, "write_model", folder)
