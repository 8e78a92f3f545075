"""Tensors to this rank's device: all of a micro-batch in one copy, which nobody waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
_ALIGNED = 256  # bytes, as the allocator's own: a kernel may read 16 at once


def upload(value: _T, device: torch.device) -> _T:
    """The same with all its tensors on `device`: those of a tensor, a tuple or a dataclass, and of what is in them.

    They travel together from page-locked memory, beside what the device computes. On the CPU nothing is copied.
    """
    if device.type == "cpu":
        return value
    found: dict[int, Tensor] = {}  # a tensor that is in several places travels once
    _replaced(value, lambda tensor: found.setdefault(id(tensor), tensor))
    sizes = [tensor.nbytes + -tensor.nbytes % _ALIGNED for tensor in found.values()]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for place, tensor in zip(packed.split(sizes), found.values(), strict=True):
        place[: tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    places = dict(zip(found, packed.to(device, non_blocking=True).split(sizes), strict=True))

    def moved(tensor: Tensor) -> Tensor:
        there: Tensor = places[id(tensor)][: tensor.nbytes]
        return there.view(tensor.dtype).view(tensor.shape)

    result: _T = _replaced(value, moved)
    return result


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Float32 tensors [n] on the CPU, by one copy, for which the host waits once."""
    if not tensors:
        return []
    together = torch.cat(list(tensors)).cpu()
    return list(together.split([len(tensor) for tensor in tensors]))


def ahead(values: Iterable[_T]) -> Iterator[_T]:
    """Each value once the one after it has been made as well."""
    waiting: list[_T] = []
    for value in values:
        waiting.append(value)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def _replaced(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_replaced(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: _replaced(getattr(value, name), change) for name in names})
    return value
