"""What is sent for a GPU, read by SGLang's own classes on a machine without one."""

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
GPU = "22222222-0000-0000-0000-000000000000"  # the reader's second


class OnAGpu:
    """A tensor as it would be on this process's first GPU."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def reduced(shared: OnAGpu) -> tuple[Any, tuple[Any, ...]]:
    """What torch's `reduce_tensor` gives of a CUDA tensor, with its bytes in the place of the memory's handle."""
    tensor, size = shared.tensor, shared.tensor.nbytes
    of_storage = (
        torch.storage.TypedStorage,
        tensor.dtype,
        0,
        tensor.view(torch.uint8).numpy().tobytes(),
        size,
        0,
    )
    counter_and_event = (False, b"counter", 0, b"event", True)
    whole = (torch.Tensor, tensor.size(), tensor.stride(), 0, *of_storage, *counter_and_event)
    return reductions.rebuild_cuda_tensor, whole


def test_sglang_finds_the_gpu_and_the_tensors(sglang: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "://" in sglang:
        pytest.skip("the reader runs in SGLang's environment")
    monkeypatch.setattr(reductions, "reduce_tensor", reduced)
    monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda device: GPU)
    half, one, byte = (
        torch.tensor([1.0, -2.0]).bfloat16(),
        torch.tensor([[0.5], [3.0]]),
        torch.ones(1).byte(),
    )
    flat, metadata = flatten([("half", half), ("one", one), ("byte", byte)])
    shared = SharedTensor(OnAGpu(flat))  # type: ignore[arg-type]
    payload = serialize({"flattened_tensor": shared, "metadata": metadata})
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.run(
        [sglang, str(READER)],
        input=json.dumps(["the first rank's is not for the second to read", payload]),
        env=environment | ({} if torch.cuda.is_available() else {"SGLANG_USE_CPU_ENGINE": "1"}),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert said.returncode == 0, said.stderr[-2000:]
    assert json.loads(said.stdout.splitlines()[-1]) == {
        "gpu": 1,
        "tensors": {
            "one": ["torch.float32", [[0.5], [3.0]]],
            "half": ["torch.bfloat16", [1.0, -2.0]],
            "byte": ["torch.uint8", [1]],
        },
    }
