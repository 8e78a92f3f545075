"""Transfers between host and GPU: micro-batches to the device ahead of time, statistics back in one copy."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
_ALIGNMENT = 256  # bytes, as cudaMalloc aligns: a kernel may load 16 bytes at once


def upload(value: _T, device: torch.device, stream: torch.cuda.Stream | None = None) -> _T:
    """Copy all tensors in a value to a device, by a single transfer from page-locked memory.

    On the CPU nothing is copied.

    Args:
        value: a tensor, or a tuple or dataclass that holds tensors, tuples and dataclasses of them.
        stream: CUDA stream of the transfer, for which the current stream must wait before it uses the
            result; None: the current stream.
    """
    if device.type == "cpu":
        return value

    tensors: dict[int, Tensor] = {}  # by id, so that a tensor that occurs twice is sent once
    _map_tensors(value, lambda tensor: tensors.setdefault(id(tensor), tensor))
    sizes = [math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for slot, tensor in zip(packed.split(sizes), tensors.values(), strict=True):
        slot[: tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))

    current_stream = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        on_device = packed.to(device, non_blocking=True)
    # The allocator would otherwise reuse the memory for the next transfer on `stream`, although the
    # current stream may still compute with it.
    on_device.record_stream(current_stream)
    slots = dict(zip(tensors, on_device.split(sizes), strict=True))

    def view_on_device(tensor: Tensor) -> Tensor:
        slot: Tensor = slots[id(tensor)][: tensor.nbytes]
        return slot.view(tensor.dtype).view(tensor.shape)

    return _map_tensors(value, view_on_device)  # type: ignore[no-any-return]


def prefetch(
    values: Iterable[_T], device: torch.device, stream: torch.cuda.Stream | None
) -> Iterator[_T]:
    """Yield each value on the device once the transfer of the next one has been started on `stream`.

    So the transfer of a micro-batch runs during the computation of the one before it.
    """
    previous: tuple[_T, torch.cuda.Event | None] | None = None
    for value in values:
        uploaded = upload(value, device, stream)
        arrival = stream.record_event() if stream else None
        if previous is not None:
            yield _await_arrival(*previous, device)
        previous = uploaded, arrival
    if previous is not None:
        yield _await_arrival(*previous, device)


def _await_arrival(value: _T, arrival: torch.cuda.Event | None, device: torch.device) -> _T:
    """Make the device's current stream wait for the transfer of a value; return the value."""
    if arrival is not None:
        torch.cuda.current_stream(device).wait_event(arrival)
    return value


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy float32 tensors [n] to the CPU in one transfer, so that the host waits for the device once."""
    if not tensors:
        return []
    joined = torch.cat(list(tensors)).cpu()
    return list(joined.split([len(tensor) for tensor in tensors]))


def _map_tensors(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Convert a tensor, or the tensors of nested tuples and dataclasses; return other values unchanged."""
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, tuple):
        return tuple(_map_tensors(item, convert) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        converted = {
            field.name: _map_tensors(getattr(value, field.name), convert) for field in fields(value)
        }
        return replace(value, **converted)
    return value
