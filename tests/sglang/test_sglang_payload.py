"""Payloads of the transport `tensor`, read by SGLang's own classes on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rollout.sync import cuda_ipc
from rollout.sync.cuda_ipc import SharedTensor, serialize
from rollout.sync.push import flatten

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

READER = Path(__file__).with_name("read_payload.py")
GPU = "22222222-0000-0000-0000-000000000000"  # the second one of the reader


class TensorOnGPU:
    """CPU tensor that claims to be on this process's first GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def reduce_cuda_tensor(shared: TensorOnGPU) -> tuple[Any, tuple[Any, ...]]:
    """Return what torch's `reduce_tensor` returns of a CUDA tensor, with its bytes in place of the memory's handle."""
    tensor = shared.tensor
    content = tensor.view(torch.uint8).numpy().tobytes()
    storage_device = 0
    storage = (torch.storage.TypedStorage, tensor.dtype, storage_device, content, tensor.nbytes, 0)
    counter_and_event = (False, b"counter", 0, b"event", True)
    arguments = (torch.Tensor, tensor.size(), tensor.stride(), 0, *storage, *counter_and_event)
    return reductions.rebuild_cuda_tensor, arguments


def test_sglang_finds_the_gpu_and_the_tensors(sglang: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "://" in sglang:
        pytest.skip("the reader runs in SGLang's environment")
    monkeypatch.setattr(reductions, "reduce_tensor", reduce_cuda_tensor)
    monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda device: GPU)
    flat, metadata = flatten(
        [
            ("half", torch.tensor([1.0, -2.0]).bfloat16()),
            ("one", torch.tensor([[0.5], [3.0]])),
            ("byte", torch.ones(1).byte()),
        ]
    )
    shared = SharedTensor(TensorOnGPU(flat))  # type: ignore[arg-type]
    payload = serialize({"flattened_tensor": shared, "metadata": metadata})

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if not torch.cuda.is_available():
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    # The reader is the second rank, which must not read the payload of the first.
    completed = subprocess.run(
        [sglang, str(READER)],
        input=json.dumps(["payload of the first rank", payload]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert completed.returncode == 0, completed.stderr[-2000:]
    assert json.loads(completed.stdout.splitlines()[-1]) == {
        "gpu": 1,
        "tensors": {
            "one": ["torch.float32", [[0.5], [3.0]]],
            "half": ["torch.bfloat16", [1.0, -2.0]],
            "byte": ["torch.uint8", [1]],
        },
    }
