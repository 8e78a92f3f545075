"""Weight sync: how a trainer's weights reach an engine. Senders by name, and what both sides agree on.

- `protocol`  what an engine asks for (`SyncRoute`) and what it is told (`WeightUpdate`)
- `shared`    the embedded engine's own buffers, mapped by the trainer (same machine)
- `disk`      safetensors in a folder that both sides see: all tensors, the changed ones, or the changed elements
- `push`      buckets of tensors into SGLang, by CUDA IPC or a process group
- `digests`   the checksums of a stream of weights, as its engine holds them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout.base.registry import lookup
from rollout.sync.protocol import SyncRoute, WeightSender

# Import paths: a sender loads only what it needs.
SENDERS = {
    "shared": "rollout.sync.shared:SharedSender",
    "disk": "rollout.sync.disk:FolderSender",
    "changed": "rollout.sync.disk:ChangedSender",
    "delta": "rollout.sync.disk:DeltaSender",
    "tensor": "rollout.sync.push:TensorSender",
    "distributed": "rollout.sync.push:GroupSender",
}


def alone(value: Any) -> list[Any]:
    """The exchange of a sender without fellow ranks."""
    return [value]


def make_sender(route: SyncRoute, *, rank: int = 0, exchange: Callable[[Any], list[Any]] = alone) -> WeightSender:
    """The trainer's side of `route` on one of its ranks; `exchange` gives every rank what each of them gave.

    Raises:
        UnknownName: no such transport.
    """
    made: WeightSender = lookup("transport", lookup("transport", route.transport, SENDERS), {})(
        route, rank=rank, exchange=exchange
    )
    return made
