"""Safetensors in a folder that trainer and engine both see: all tensors, or only those that changed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rollout.transports.blocks import Rows
from rollout.transports.digest import digest_of
from rollout.transports.handover import Handover, Route
from rollout.transports.manifest import complete, read_manifest

_FILE_BYTES = 1 << 30  # of one file: what a rank holds of the model besides its shard


class FolderSender:
    """Writes every version into a folder of its own below the route's place; the one before it is kept no longer."""

    def __init__(self, route: Route, *, rank: int, exchange: Callable[[Any], list[Any]]) -> None:
        self._route = route
        self._writes = rank == 0
        self._manifest = read_manifest(route.model)

    def send(self, weights: Iterable[tuple[str, Rows]], version: int, state: Mapping[str, Any]) -> Handover:
        """Write `v<version>/` (see `Sender`)."""
        began = time.perf_counter()
        final = Path(self._route.place) / f"v{version:06d}"
        partial = final.with_name(f".{final.name}.partial")
        if self._writes:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        digest = digest_of(self._route)
        written, held, size = 0, {}, 0
        known = self._begin(state)
        for name, full in complete(weights, self._manifest):
            if not self._writes:
                continue
            digest.add(name, full.detach())  # where it is: a GPU is faster at it
            tensor = full.detach().cpu().contiguous()
            if not self._wanted(name, tensor, known):
                continue
            held[name] = tensor
            size += held[name].nbytes
            written += held[name].nbytes
            if size >= _FILE_BYTES:
                _write(partial, held)
                held, size = {}, 0
        if held:
            _write(partial, held)
        self._end(version)
        if self._writes:
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in final.parent.glob("v[0-9]*"):
                if old.name != final.name and old.name != state.get("keep"):
                    shutil.rmtree(old, ignore_errors=True)
        return Handover(
            version=version,
            transport=self._route.transport,
            place=str(final),
            checksums=digest.finish(),
            bytes=written,
            seconds=time.perf_counter() - began,
        )

    def _begin(self, state: Mapping[str, Any]) -> bool:
        """Whether the engine holds the version sent last."""
        return False

    def _wanted(self, name: str, tensor: Tensor, known: bool) -> bool:
        return True

    def _end(self, version: int) -> None:
        pass


class ChangedSender(FolderSender):
    """Writes only tensors that differ from the last version sent, if the engine holds that one; else all."""

    def __init__(self, route: Route, *, rank: int, exchange: Callable[[Any], list[Any]]) -> None:
        super().__init__(route, rank=rank, exchange=exchange)
        self._last: dict[str, Tensor] = {}
        self._version: int | None = None

    def _begin(self, state: Mapping[str, Any]) -> bool:
        known = self._version is not None and state.get("base") == self._version
        self._version = None  # until all of the new version is written
        return known

    def _wanted(self, name: str, tensor: Tensor, known: bool) -> bool:
        before = self._last.get(name)
        if known and before is not None and torch.equal(_bits(before), _bits(tensor)):
            return False
        self._last[name] = tensor.clone()
        return True

    def _end(self, version: int) -> None:
        self._version = version


def _bits(tensor: Tensor) -> Tensor:
    """The same bytes as integers: -0.0 is not 0.0, and NaN is itself."""
    return tensor.contiguous().view(torch.uint8)


def _write(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, str(folder / f"model-{len(list(folder.iterdir())):05d}.safetensors"), metadata={"format": "pt"})
