"""One policy's ranks as Ray actors: the controller's side of a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from mcore_mas.megatron import parallel
from mcore_mas.megatron.batch import Microbatch
from mcore_mas.megatron.trainer import MegatronTrainer, TrainerSpec

_BUCKET_BYTES = 64 << 20


class _Rank:
    """One process of a policy's tensor-parallel group."""

    def __init__(self, spec: TrainerSpec, rank: int, address: str, port: int, threads: int) -> None:
        parallel.start(rank=rank, tp=spec.tp, address=address, port=port, threads=threads)
        self._trainer = MegatronTrainer(spec)

    def ready(self) -> bool:
        return True

    def update(self, microbatches: Sequence[Microbatch]) -> dict[str, float]:
        return self._trainer.update(microbatches)

    def export(self, send: bool) -> list[ray.ObjectRef]:
        """Gather all weights with the other ranks; the sender puts them into the object store in buckets."""
        buckets: list[ray.ObjectRef] = []
        bucket: list[tuple[str, Any]] = []
        size = 0
        for name, tensor in self._trainer.weights():
            if not send:
                continue
            bucket.append((name, tensor.cpu().numpy()))
            size += tensor.nbytes
            if size >= _BUCKET_BYTES:
                buckets.append(ray.put(bucket))
                bucket, size = [], 0
        if bucket:
            buckets.append(ray.put(bucket))
        return buckets

    def save(self, folder: str) -> None:
        self._trainer.save(Path(folder))

    def restore(self, folder: str) -> None:
        self._trainer.restore(Path(folder))

    def write_model(self, folder: str) -> None:
        self._trainer.write_model(Path(folder))


class Gang:
    """A policy's trainer, spread over `spec.tp` Ray actors that make the same calls."""

    def __init__(self, policy: str, spec: TrainerSpec, *, threads: int) -> None:
        """Start the ranks; returns before they have loaded the model (see `ready`)."""
        self.policy = policy
        port = parallel.free_port()
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        actor = ray.remote(num_cpus=0, num_gpus=gpus)(_Rank)
        self._ranks = [
            actor.options(name=f"{policy}-rank{rank}").remote(spec, rank, "127.0.0.1", port, threads)
            for rank in range(spec.tp)
        ]

    async def ready(self) -> None:
        """Wait until every rank holds its shard."""
        await self._all("ready")

    async def update(self, microbatches: Sequence[Microbatch]) -> dict[str, float]:
        """One optimizer step; see `MegatronTrainer.update`."""
        return (await self._all("update", ray.put(list(microbatches))))[0]

    async def export(self) -> list[ray.ObjectRef]:
        """All weights as references to buckets of (Hugging Face name, full array); the bytes stay in the store."""
        refs = [rank.export.remote(send=i == 0) for i, rank in enumerate(self._ranks)]
        return [await ref for ref in refs][0]

    async def save(self, folder: Path) -> None:
        """Write weights and optimizer state into `folder`."""
        await self._all("save", str(folder))

    async def restore(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        await self._all("restore", str(folder))

    async def write_model(self, folder: Path) -> None:
        """Write a Hugging Face folder of the policy as it is now."""
        await self._all("write_model", str(folder))

    async def _all(self, method: str, *arguments: object) -> list[Any]:
        refs = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        return [await ref for ref in refs]
