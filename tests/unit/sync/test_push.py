"""Weights that are pushed into SGLang: buckets, sessions, and failures that all ranks hear of."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.models.tensors import buckets
from rollout.sync.cuda_ipc import TensorSender
from rollout.sync.process_group import DistributedSender
from rollout.sync.push import flatten
from rollout.sync.transport import SyncRoute
from tests.support.meeting import meeting
from tests.support.three_tensors import NAMES, tensors


def route(model: Path) -> SyncRoute:
    return SyncRoute(transport="tensor", target="http://127.0.0.1:9", model=str(model))


def test_a_bucket_is_laid_out_as_sglang_reads_it() -> None:
    given = [
        ("half", torch.tensor([1.0, 2.0, 3.0]).bfloat16()),
        ("one", torch.tensor([[0.5]])),
        ("byte", torch.ones(1).byte()),
    ]
    flat, metadata = flatten(given)
    assert flat.tolist() == [
        0,
        0,
        0,
        63,
        128,
        63,
        0,
        64,
        64,
        64,
        1,
    ]  # 0.5 | 1, 2, 3 as bfloat16 | 1; little end first
    assert [(m.name, m.start_idx, m.end_idx, m.numel) for m in metadata] == [
        ("one", 0, 4, 4),
        ("half", 4, 10, 6),
        ("byte", 10, 11, 1),
    ]
    for entry in metadata:  # what FlattenedTensorBucket.reconstruct_tensors does
        tensor = flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape)
        assert torch.equal(tensor, dict(given)[entry.name])
    sizes = [[name for name, _ in bucket] for bucket in buckets(given, limit=7)]
    assert sizes == [["half"], ["one", "byte"]]
    assert [len(bucket) for bucket in buckets(given, limit=1)] == [1, 1, 1]


@pytest.mark.parametrize("refused", ["/update_weights_from_tensor", "/begin_weight_update", ""])
def test_a_session_is_ended_however_a_push_ends(model: Path, refused: str) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        refuses = request.url.path == refused
        return httpx.Response(
            400 if refuses else 200, json={"success": not refuses, "message": "not now"}
        )

    sender = TensorSender(route(model))
    sender.http = httpx.Client(transport=httpx.MockTransport(answer))
    if refused:
        with pytest.raises(EngineError, match=f"{refused}: status 400: not now"):
            sender.send(tensors().items(), 1)
    else:
        sender.send(tensors().items(), 1)
    whole = [
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/flush_cache",
    ]
    begun, _, ended, _ = whole
    # a refused beginning may be a session that a dead trainer has left open
    assert asked == {"": whole, begun: [begun, ended] * 2, whole[1]: whole[:3]}[refused]


class Sent:
    """A broadcast that has ended."""

    def wait(self) -> None:
        pass


@pytest.fixture
def broadcasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of servers that are not there, which gets all that is sent to it."""
    monkeypatch.setattr(DistributedSender, "_form_group", lambda self: None)
    monkeypatch.setattr("torch.distributed.broadcast", lambda *_, **__: Sent())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize("kind", [TensorSender, DistributedSender])
def test_the_next_bucket_is_gathered_while_servers_load_one(
    model: Path, kind: type[TensorSender | DistributedSender], broadcasts: None
) -> None:
    drawn = {name: threading.Event() for name in NAMES}
    loading: list[int] = []
    most: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.startswith("/update_weights"):
            number = len(most)
            loading.append(number)
            most.append(len(loading))
            # its answer comes when the tensor after the next, which closes the next one's bucket, was drawn
            assert drawn[NAMES[min(number + 2, len(NAMES) - 1)]].wait(10)
            loading.remove(number)
        return httpx.Response(200, json={"success": True})

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors().items():
            drawn[name].set()
            yield name, tensor

    sender = kind(route(model))
    sender.bucket_bytes = 1  # a bucket for every tensor
    sender.http = httpx.Client(transport=httpx.MockTransport(answer))
    sender.send(stream(), 1)
    assert most == [1] * len(NAMES) and not loading  # one at a time, and all of them


@pytest.mark.parametrize("kind", [TensorSender, DistributedSender])
def test_what_one_rank_is_refused_stops_all_at_the_same_tensor(
    model: Path, kind: type[TensorSender | DistributedSender], broadcasts: None
) -> None:
    updates: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        update = request.url.path.startswith("/update_weights")
        updates.extend([request.url.path] if update else [])
        refuses = update and len(updates) == 2
        return httpx.Response(
            400 if refuses else 200, json={"success": not refuses, "message": "no memory"}
        )

    drawn: dict[int, list[str]] = {0: [], 1: []}

    def stream(rank: int) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors().items():
            drawn[rank].append(name)
            yield name, tensor

    def play(rank: int, sender: TensorSender | DistributedSender) -> str:
        with pytest.raises(EngineError) as caught:
            sender.send(stream(rank), 1)
        sender.send(stream(rank), 2)  # in step with each other still
        return str(caught.value)

    senders = [
        kind(route(model), rank=rank, all_gather=all_gather)
        for rank, all_gather in enumerate(meeting(2))
    ]
    for sender in senders:
        sender.bucket_bytes = 1  # a bucket for every tensor
        sender.http = httpx.Client(transport=httpx.MockTransport(answer))
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(play, range(2), senders))
    assert said[0] == said[1]
    assert said[0].endswith("status 400: no memory")
    assert drawn[0] == drawn[1] == [*NAMES, *NAMES]  # the third has closed the second's bucket
    assert len(updates) == 2 + 3


@pytest.mark.parametrize(
    ("status", "message", "is_reused"),
    [
        (200, "Succeeded to destroy custom process group.", True),
        (400, "The group to be destroyed does not exist.", True),
        (400, "Failed to destroy custom process group: NCCL.", False),
    ],
)
def test_the_group_of_an_earlier_trainer_is_destroyed_before_one_is_formed(
    model: Path, status: int, message: str, is_reused: bool
) -> None:
    bodies: dict[str, dict[str, object]] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        bodies[request.url.path] = json.loads(request.content)
        if request.url.path == "/destroy_weights_update_group":
            return httpx.Response(status, json={"success": status == 200, "message": message})
        return httpx.Response(400, json={"success": False, "message": "no group today"})

    sender = DistributedSender(route(model))
    sender.http = httpx.Client(transport=httpx.MockTransport(answer))
    for number in range(2):
        name = f"mcore_mas-{number}"
        with pytest.raises(EngineError, match="no group today"):
            sender.begin()
        assert bodies["/destroy_weights_update_group"] == {"group_name": name}
        formed = str(bodies["/init_weights_update_group"]["group_name"])
        assert formed.startswith(name)
        assert (formed == name) is is_reused
