"""How a trainer's weights reach an engine: senders by name, and what both sides agree on.

- `handover`   what an engine asks for (`SyncRoute`) and what it is told (`Handover`)
- `blocks`     of rows, in which full tensors travel
- `checksum`   of one tensor, by its bytes;  `gpu_hash`: SGLang's own
- `digest`     the checksums of a stream, as its engine holds it
- `manifest`   the tensors that a model has
- `memory`     places in shared memory, swept of what was left behind
- `shared`     the embedded engine's own buffers, mapped by the trainer (same machine)
- `folder`     safetensors in a folder that both sides see, of all tensors or of the changed ones
- `delta`      the elements that changed since the version the engine holds
- `bucket`     tensors as one flat run of bytes;  `push`: such buckets into SGLang, by CUDA IPC or a process group
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
