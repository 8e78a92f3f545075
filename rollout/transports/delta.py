"""The elements that changed since the version the engine holds, bit for bit, as a safetensors file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollout.engines.protocol import EngineError
from rollout.transports.blocks import Rows
from rollout.transports.digest import digest_of
from rollout.transports.handover import Handover, Route
from rollout.transports.manifest import complete, read_manifest

_INDEX, _VALUE = "#index", "#value"  # after a tensor's name: flat positions int32 or int64, and what stands there now
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class DeltaSender:
    """Rank 0 keeps the last version sent, compares bit patterns, and writes positions and values of what differs.

    A tensor of which so much changed that positions cost more than they save is written whole, and so are all when
    the engine holds another version than the last one sent. Nothing is rounded.
    """

    def __init__(self, route: Route, *, rank: int, exchange: Callable[[Any], list[Any]]) -> None:
        self._route = route
        self._writes = rank == 0
        self._manifest = read_manifest(route.model)
        self._last: dict[str, Tensor] = {}
        self._version: int | None = None

    def send(self, weights: Iterable[tuple[str, Rows]], version: int, state: Mapping[str, Any]) -> Handover:
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
        return Handover(
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
