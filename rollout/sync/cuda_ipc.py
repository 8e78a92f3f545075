"""Weight sync by CUDA IPC into SGLang servers on the trainer's own GPUs."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # registers with ForkingPickler how tensors are sent
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.sync.push import LOAD_FORMAT, PushSender, flatten


class TensorSender(PushSender):
    """Sender in which each trainer rank shares its bucket with the server rank on the same GPU.

    SGLang's format is a pickle of CUDA IPC handles and names, as its `MultiprocessingSerializer`
    writes it. This class only writes such pickles and never reads one.

    The next bucket is gathered while the servers load one. SGLang answers when its copies are
    queued, not when they are done. The sender keeps a bucket until the answer; after that, torch
    keeps its memory until the server has released it.
    """

    def send_bucket(self, bucket: Sequence[tuple[str, Tensor]], version: int) -> None:
        """Send a bucket by the handles of all ranks; see `PushSender.send_bucket`."""
        tp = self.route.servers.tp
        server_ranks = len(self.urls) * tp
        flat: Tensor | None = None
        payload = ""
        # Other ranks share nothing, because torch never frees shared memory that nobody has opened.
        if self.rank < server_ranks:
            flat, metadata = flatten(bucket)
            if flat.is_cuda:
                torch.cuda.synchronize()  # the servers' streams do not wait for this one
            payload = serialize({"flattened_tensor": SharedTensor(flat), "metadata": metadata})

        payloads = self.all_gather(payload)
        if len(payloads) < server_ranks:
            raise EngineError(
                "transport 'tensor' needs a trainer rank on every GPU of the engine: "
                f"{len(self.urls)} servers of {tp} GPUs, {len(payloads)} ranks; "
                "use transport distributed or disk"
            )
        bodies = [
            {
                "serialized_named_tensors": payloads[first : first + tp],
                "load_format": LOAD_FORMAT,
                "weight_version": str(version),
                "flush_cache": False,
            }
            for first in range(0, server_ranks, tp)
        ]
        self.on_rank_0(partial(self._post_after_last, bodies))
        self._in_flight = flat

    def _post_after_last(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        """Send a bucket to the servers once they have loaded the one before."""
        self.settle()
        self._responses = self.post("/update_weights_from_tensor", bodies)


class SharedTensor:
    """A tensor that another process unpickles as a view of this process's memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> Any:
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = reduce_tensor(self._tensor)
        if self._tensor.is_cuda:
            # The seventh argument is the number of the GPU. Processes number the GPUs that they
            # see, so SGLang expects the GPU's UUID in its place (utils/patch_torch.py).
            uuid = gpu_uuid(self._tensor.device)
            arguments = (*arguments[:6], uuid, *arguments[7:])
        return rebuild, arguments


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def serialize(payload: object) -> str:
    """Pickle a payload in base64, as SGLang's `MultiprocessingSerializer.serialize` does."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(payload)
    return base64.b64encode(buffer.getvalue()).decode()
