"""Collective communication of plain Python values between ranks."""

# mypy: disable-error-code="attr-defined"

import json
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from mcore_mas.megatron.device import rank_device


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather a JSON value of every rank, in rank order, on every rank.

    `torch.distributed.all_gather_object` does the same with pickle, which could run code that another rank sends.

    Args:
        value: numbers, strings, lists, and dictionaries with strings as keys.
        group: ranks that take part; None: all.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return [value]

    device = rank_device()
    encoded = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)

    # all_gather needs tensors of equal size, so the sizes are gathered first, and the texts are padded.
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(encoded)], device=device), group=group)
    longest = int(max(sizes))
    padded = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(world_size)]
    dist.all_gather(padded, pad(encoded, (0, longest - len(encoded))), group=group)
    return [
        json.loads(bytes(text[: int(size)].tolist()))
        for text, size in zip(padded, sizes, strict=True)
    ]
