"""Weight sync through a folder that trainer and engine both see: full weights, or an adapter."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.base.files import atomic_folder
from rollout.models.adapter_weights import AdapterWeights, write_peft
from rollout.models.architecture import read_architecture
from rollout.models.named_buffers import META_STORAGE
from rollout.models.tensors import (
    WeightStream,
    buckets,
    check_stream,
    checksum,
    join_blocks,
    tensor_shapes,
)
from rollout.sync.transport import SentWeights, SyncRoute, WeightSender

# Limit of the tensors in one file, and so of those that rank 0 holds at a time. A larger tensor is
# alone in its file.
_FILE_BYTES = 1 << 30


class FolderSender(WeightSender):
    """Sender that writes each version into a folder of its own, and then removes all other versions."""

    def __init__(self, route: SyncRoute, **ranks: Any) -> None:
        super().__init__(route, **ranks)
        self._shapes = tensor_shapes(route.model)

    def write(self, weights: WeightStream, version: int, half: int | None) -> SentWeights:
        """Write `v<version>/` below the target.

        Raises:
            EngineError: see `WeightSender.send`. The version before is then still there.
        """
        folder = _version_folder(self.route, version)
        stream = check_stream(weights, self._shapes)
        if self.rank != 0:
            _drain(stream)
            return SentWeights(location=str(folder), bytes=0)

        size = 0
        checksums: dict[str, str] = {}
        with atomic_folder(folder) as partial:
            for number, bucket in enumerate(buckets(_on_host(stream), _FILE_BYTES)):
                file = partial / f"model-{number:05d}.safetensors"
                save_file(dict(bucket), str(file), metadata={"format": "pt"})
                for name, tensor in bucket:
                    size += tensor.nbytes
                    if self.route.checksums:
                        checksums[name] = checksum(tensor.float())
        for other in folder.parent.glob("v[0-9]*"):
            if other.name != folder.name:
                rmtree(other, ignore_errors=True)
        return SentWeights(location=str(folder), bytes=size, checksums=checksums)


class AdapterSender(WeightSender):
    """Sender that writes each version of an adapter in PEFT's format; the newest two folders stay."""

    def __init__(self, route: SyncRoute, **ranks: Any) -> None:
        super().__init__(route, **ranks)
        assert route.adapter is not None
        self._adapter = route.adapter
        layout = AdapterWeights(read_architecture(route.model), route.adapter, META_STORAGE)
        self._shapes = {name: tuple(buffer.shape) for name, buffer in layout.buffers.items()}

    def write(self, weights: WeightStream, version: int, half: int | None) -> SentWeights:
        """Write `v<version>/` below the target.

        Raises:
            EngineError: see `WeightSender.send`; or a tensor has an infinite value or NaN.
        """
        folder = _version_folder(self.route, version)
        stream = check_stream(weights, self._shapes)
        if self.rank != 0:
            _drain(stream)
            return SentWeights(location=str(folder), bytes=0)

        tensors = dict(_on_host(stream))
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise EngineError(
                    f"{name} of version {version} has a number that is not finite, so this version "
                    "is not sent; look at the training that produced it"
                )
        write_peft(
            folder,
            self.route.model,
            tensors,
            rank=self._adapter.rank,
            alpha=self._adapter.scale * self._adapter.rank,
            targets=self._adapter.targets,
        )
        # The version before stays, because a server that restarts reads it until all servers have the
        # new one.
        others = [path for path in folder.parent.glob("v[0-9]*") if path != folder]
        others.sort(key=lambda path: path.stat().st_mtime)
        for path in others[:-1]:
            rmtree(path, ignore_errors=True)
        size = sum(tensor.nbytes for tensor in tensors.values())
        return SentWeights(location=str(folder), bytes=size)


def _version_folder(route: SyncRoute, version: int) -> Path:
    return Path(route.target) / f"v{version:06d}"


def _on_host(stream: WeightStream) -> Iterator[tuple[str, Tensor]]:
    """Yield name and full tensor of a stream, in the host's memory."""
    for name, rows in stream:
        yield name, join_blocks(rows).detach().cpu().contiguous()


def _drain(stream: WeightStream) -> None:
    """Take part in gathering the tensors, without keeping any."""
    deque(stream, maxlen=0)
