"""Reads a payload of the transport `tensor` from its input, as an SGLang rank that sees two GPUs does.

The payload says that its tensor lies on a GPU. Here there is none: what CUDA would open by its handle is the run of
bytes that the handle itself has. All else is SGLang's own: what it lets a pickle name, which of its GPUs it takes the
tensor's to be, and how it finds the tensors in the bucket. Prints which GPU that was, and the tensors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers import tp_worker
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.utils import patch_torch
from torch.multiprocessing import reductions

GPUS = ["11111111-0000-0000-0000-000000000000", "22222222-0000-0000-0000-000000000000"]
RANK = 1
found: dict[str, Any] = {}


def opened(*arguments: Any) -> torch.Tensor:
    """In the place of torch's `rebuild_cuda_tensor`; the seventh argument is the GPU, the eighth the handle."""
    found["gpu"] = arguments[6]
    return torch.frombuffer(bytearray(arguments[7]), dtype=arguments[5]).as_strided(
        arguments[1], arguments[2]
    )


class Model:
    """Notes what it is to load."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        found["tensors"] = {name: [str(tensor.dtype), tensor.tolist()] for name, tensor in weights}


def main() -> None:
    patch_torch.monkey_patch_torch_reductions()
    reductions._rebuild_cuda_tensor_original = opened
    torch.cuda.device_count = lambda: len(GPUS)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=GPUS[device])
    tp_worker.get_parallel = lambda: SimpleNamespace(tp_rank=RANK)
    payload = tp_worker.BaseTpWorker.deserialize_own_rank(None, json.load(sys.stdin))
    updater = SimpleNamespace(get_model=Model)
    WeightUpdater._update_weights_from_flattened_bucket(
        updater, flattened_tensor_bucket_dict=payload
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
