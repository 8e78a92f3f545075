"""Weight sync through a shared folder: all tensors, the changed ones, or the changed elements."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.models.tensors import Rows, complete, tensor_shapes
from rollout.sync.digests import digest_of
from rollout.sync.protocol import SyncRoute, WeightUpdate

_FILE_BYTES = 1 << 30  # of one file: what a rank holds of the model besides its shard


class FolderSender:
    """Writes every version into a folder of its own below the route's place; the one before it is kept no longer."""

    def __init__(self, route: SyncRoute, *, rank: int, exchange: Callable[[Any], list[Any]]) -> None:
        self._route = route
        self._writes = rank == 0
        self._manifest = tensor_shapes(route.model)

    def send(self, weights: Iterable[tuple[str, Rows]], version: int, state: Mapping[str, Any]) -> WeightUpdate:
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
        return WeightUpdate(
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

    def __init__(self, route: SyncRoute, *, rank: int, exchange: Callable[[Any], list[Any]]) -> None:
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


_INDEX, _VALUE = "#index", "#value"  # after a tensor's name: flat positions int32 or int64, and what stands there now
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class DeltaSender:
    """Rank 0 keeps the last version sent, compares bit patterns, and writes positions and values of what differs.

    A tensor of which so much changed that positions cost more than they save is written whole, and so are all when
    the engine holds another version than the last one sent. Nothing is rounded.
    """

    def __init__(self, route: SyncRoute, *, rank: int, exchange: Callable[[Any], list[Any]]) -> None:
        self._route = route
        self._writes = rank == 0
        self._manifest = tensor_shapes(route.model)
        self._last: dict[str, Tensor] = {}
        self._version: int | None = None

    def send(self, weights: Iterable[tuple[str, Rows]], version: int, state: Mapping[str, Any]) -> WeightUpdate:
        """Write `v<version>.safetensors` (see `Sender`)."""
        began = time.perf_counter()
        base = self._version if self._version is not None and state.get("base") == self._version else None
        self._version = None  # until all of the new version is written
        digest = digest_of(self._route)
        out: dict[str, Tensor] = {}
        for name, full in complete(weights, self._manifest):
            if not self._writes:
                continue
            tensor = full.detach().cpu().contiguous()
            digest.add(name, tensor.float())
            out |= changes(name, self._last[name] if base is not None else None, tensor)
            self._last[name] = tensor.clone()
        file = Path(self._route.place) / f"v{version:06d}.safetensors"
        if self._writes:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            save_file(out, str(partial), metadata={"format": "pt", "base": json.dumps(base)})
            partial.rename(file)
            for old in file.parent.glob("v[0-9]*.safetensors"):
                if old != file:
                    old.unlink()
        self._version = version
        return WeightUpdate(
            version=version,
            transport=self._route.transport,
            place=str(file),
            checksums=digest.finish(),
            bytes=sum(tensor.nbytes for tensor in out.values()),
            seconds=time.perf_counter() - began,
        )


def changes(name: str, before: Tensor | None, now: Tensor) -> dict[str, Tensor]:
    """What to write so that `now` can be made from `before`: nothing, positions and values, or all of it."""
    if before is None:
        return {name: now}
    integers = _INTEGERS[now.element_size()]
    index = (before.view(-1).view(integers) != now.view(-1).view(integers)).nonzero()[:, 0]
    if not len(index):
        return {}
    index = index.to(torch.int32 if now.numel() < 2**31 else torch.int64)
    if len(index) * (index.element_size() + now.element_size()) >= now.nbytes:
        return {name: now}
    return {name + _INDEX: index, name + _VALUE: now.view(-1)[index.long()]}


def patched(tensors: Iterable[tuple[str, Tensor]], file: Path, held: int) -> Iterator[tuple[str, Tensor]]:
    """A stream of the weights as `file` makes them out of `tensors`, the full tensors of version `held`.

    Raises:
        EngineError: the file does not start from that version.
    """
    with safe_open(str(file), "pt") as delta:
        base = json.loads(delta.metadata()["base"])
        if base is not None and base != held:
            raise EngineError(f"{file}: changes since version {base}, but the engine holds version {held}")
        names = set(delta.keys())
        for name, tensor in tensors:
            if name in names:
                yield name, delta.get_tensor(name)
            elif name + _INDEX in names:
                value = delta.get_tensor(name + _VALUE)
                whole = tensor.to(value.dtype, copy=True).contiguous()
                whole.view(-1)[delta.get_tensor(name + _INDEX).long()] = value
                yield name, whole
            else:
                yield name, tensor
