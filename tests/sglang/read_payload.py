"""Read a payload of the transport `tensor` from stdin, as an SGLang rank on a machine with two GPUs does.

The payload refers to a tensor on a GPU. There is no GPU here, so the handle of the GPU memory contains the tensor's
bytes, and only torch's function that opens a handle is replaced. The rest is SGLang's own code: its restricted
unpickler, the choice of the GPU, and the search for tensors in the bucket. The program prints the GPU and the tensors.
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
result: dict[str, Any] = {}


def rebuild_cpu_tensor(*arguments: Any) -> torch.Tensor:
    """Return the tensor whose bytes are in the handle; takes the arguments of torch's `rebuild_cuda_tensor`."""
    _, size, stride, _, _, dtype, gpu, handle, *_ = arguments
    result["gpu"] = gpu
    return torch.frombuffer(bytearray(handle), dtype=dtype).as_strided(size, stride)


class Model:
    """Model that records the tensors that it gets."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        result["tensors"] = {name: [str(tensor.dtype), tensor.tolist()] for name, tensor in weights}


def main() -> None:
    patch_torch.monkey_patch_torch_reductions()
    reductions._rebuild_cuda_tensor_original = rebuild_cpu_tensor
    torch.cuda.device_count = lambda: len(GPUS)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=GPUS[device])
    tp_worker.get_parallel = lambda: SimpleNamespace(tp_rank=RANK)
    payload = tp_worker.BaseTpWorker.deserialize_own_rank(None, json.load(sys.stdin))
    updater = SimpleNamespace(get_model=Model)
    WeightUpdater._update_weights_from_flattened_bucket(
        updater, flattened_tensor_bucket_dict=payload
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
