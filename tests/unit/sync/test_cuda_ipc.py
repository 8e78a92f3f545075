"""Weights that trainer ranks share with SGLang's ranks on the same GPUs."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.sync import cuda_ipc
from rollout.sync.cuda_ipc import SharedTensor, TensorSender
from rollout.sync.transport import ServerOptions, SyncRoute
from tests.support.meeting import meeting
from tests.support.three_tensors import NAMES, tensors


class Server:
    """Server that loads buckets as SGLang does, from the memory that this process itself shares."""

    def __init__(self) -> None:
        self.tensors: dict[int, dict[str, Tensor]] = {}  # tensors by name, by rank of the server
        self.versions: set[str] = set()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/update_weights_from_tensor":
            body = json.loads(request.content)
            assert body["load_format"] == "flattened_bucket"
            self.versions.add(body["weight_version"])
            for rank, payload in enumerate(body["serialized_named_tensors"]):
                bucket = ForkingPickler.loads(base64.b64decode(payload))
                flat = bucket["flattened_tensor"]
                for entry in bucket["metadata"]:
                    part = flat[entry.start_idx : entry.end_idx].view(entry.dtype)
                    loaded = self.tensors.setdefault(rank, {})
                    loaded[entry.name] = part.reshape(entry.shape).clone()
        return httpx.Response(200, json={"success": True})


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_every_rank_of_a_server_takes_all_tensors(
    model: Path, shared_by_name: None, bucket_bytes: int
) -> None:
    server = Server()
    route = SyncRoute(
        transport="tensor",
        target="http://127.0.0.1:9",
        model=str(model),
        servers=ServerOptions(tp=2),
    )

    def send(rank: int, all_gather: Callable[[Any], list[Any]]) -> int:
        sender = TensorSender(route, rank=rank, all_gather=all_gather)
        sender.bucket_bytes = bucket_bytes
        sender.http = httpx.Client(transport=httpx.MockTransport(server))
        return sender.send(tensors().items(), 1).bytes

    with ThreadPoolExecutor(2) as pool:
        sizes = list(pool.map(send, range(2), meeting(2)))
    assert sizes == [sum(tensor.nbytes for tensor in tensors().values())] * 2
    assert server.versions == {"1"}
    for rank in (0, 1):
        assert set(server.tensors[rank]) == set(NAMES)
        for name, tensor in tensors().items():
            assert torch.equal(server.tensors[rank][name], tensor)


def test_too_few_ranks_for_the_servers_are_refused(model: Path, shared_by_name: None) -> None:
    route = SyncRoute(transport="tensor", target="http://a http://b", model=str(model))
    sender = TensorSender(route)
    sender.http = httpx.Client(transport=httpx.MockTransport(Server()))
    with pytest.raises(EngineError, match="2 servers of 1 GPUs, 1 ranks; use transport distr"):
        sender.send(tensors().items(), 1)


def test_a_rank_without_a_server_on_its_gpu_shares_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks, two servers of one GPU: torch keeps shared memory until somebody has opened it."""
    payloads: list[list[str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.startswith("/update_weights"):
            payloads.append(json.loads(request.content)["serialized_named_tensors"])
        return httpx.Response(200, json={"success": True})

    route = SyncRoute(transport="tensor", target="http://a http://b", model=str(model))
    shared = itertools.count(1)
    monkeypatch.setattr(cuda_ipc, "serialize", lambda _: str(next(shared)))

    def send(rank: int, all_gather: Callable[[Any], list[Any]]) -> None:
        sender = TensorSender(route, rank=rank, all_gather=all_gather)
        sender.http = httpx.Client(transport=httpx.MockTransport(answer))
        sender.send(tensors().items(), 1)

    with ThreadPoolExecutor() as pool:
        list(pool.map(send, range(3), meeting(3)))
    assert sorted(map(tuple, payloads)) == [("1",), ("2",)]
    assert next(shared) == 3


def test_a_gpu_is_named_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnAGpu:
        is_cuda = True
        device = torch.device("cuda", 0)

    arguments = tuple(range(15))
    monkeypatch.setattr(
        "torch.multiprocessing.reductions.reduce_tensor", lambda tensor: (tuple, arguments)
    )
    monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda device: f"GPU-{device.index}")
    rebuild, named = SharedTensor(OnAGpu()).__reduce__()  # type: ignore[arg-type]
    assert rebuild is tuple
    # rebuild_cuda_tensor has the device as its seventh argument
    assert named == (*arguments[:6], "GPU-0", *arguments[7:])
